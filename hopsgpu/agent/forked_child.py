"""Setup that makes a forked process like a fresh interpreter, before the user's code runs."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import FileFinder
from pathlib import Path
from typing import Any

from hopsgpu import linux
from hopsgpu.agent.rank_environment import as_bytes
from hopsgpu.rank import entry as rank
from hopsgpu.rank import files


@dataclass(frozen=True)
class ServerState:
    """The state of a fork server before it imported anything for its ranks.

    Attributes:
        path: `sys.path` without the working directory and the entries of PYTHONPATH.
        locale: LC_CTYPE, which Python sets if it finds the C locale (PEP 538), or None.
    """

    path: tuple[str, ...]
    umask: int
    locale: str | None

    @classmethod
    def now(cls) -> ServerState:
        """Return the state of this process, whose umask changes for a moment."""
        umask = os.umask(0o077)
        os.umask(umask)
        from_environment = _python_path_entries(os.environ)
        path = tuple(p for p in sys.path[1:] if p not in from_environment)
        return cls(path, umask, os.environ.get("LC_CTYPE"))


def detach_child(server: int, keep: Sequence[int] = ()) -> None:
    """Detach a forked child from its fork server: it leads a session, and dies with the server.

    Args:
        keep: descriptors that stay open, besides the first three.
    """
    os.setsid()
    linux.die_with(server)
    linux.reset_signals()
    low = 3
    for descriptor in sorted(keep):
        os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def write_to(log: Path) -> None:
    """Append the output of this process to a file, and give it an empty stdin."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(nothing)


def become_rank(
    directory: Path, environment: Mapping[str, str], initial_state: ServerState
) -> None:
    """Make this forked child's interpreter like that of `python -m hopsgpu.rank.entry`."""
    os.environb.clear()
    os.environb.update(as_bytes(environment))
    if initial_state.locale is not None and not os.environ.get("LC_ALL"):
        os.environ.setdefault("LC_CTYPE", initial_state.locale)
    work = directory / files.WORK
    os.chdir(work)
    os.umask(initial_state.umask)
    from_environment = _python_path_entries(os.environ)
    inherited = [p for p in initial_state.path if p not in from_environment]
    sys.path[:] = [str(work), *from_environment, *inherited]
    _forget_directories()
    # Children of one parent would otherwise share these random states and keys.
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    # The import of torch seeded the CPU's generator. Each process seeds its GPUs' by itself.
    if generator := getattr(sys.modules.get("torch"), "default_generator", None):
        generator.seed()
    if "multiprocessing.process" in sys.modules:
        process = sys.modules["multiprocessing.process"].current_process()
        process.authkey = os.urandom(32)
    # The cached value, if any, is the fork server's TMPDIR.
    tempfile.tempdir = None
    _forget_compilers_directories()
    rank.prepare_output()


def _forget_compilers_directories() -> None:
    """Reset the directories that torch's compiler and triton computed at their import."""
    # Some versions of torch lack some of these attributes.
    modules: Mapping[str, Any] = sys.modules
    config = modules.get("torch._dynamo.config")
    if (debug_directory := getattr(config, "default_debug_dir_root", None)) is not None:
        modules["torch._dynamo.config"].debug_dir_root = debug_directory()
    cache = getattr(modules.get("torch._dynamo.package"), "DynamoCache", None)
    if cache is not None and hasattr(cache, "_path_prefix"):
        directories = modules["torch._inductor.runtime.cache_dir_utils"]
        cache._path_prefix = str(Path(directories.cache_dir()) / "dynamo")
    if "triton.knobs" in sys.modules:
        os.environ.setdefault("TRITON_HOME", str(Path.home()))


def _forget_directories() -> None:
    """Like importlib.invalidate_caches(), except for zip files, which do not change.

    Reading the directories of Spark's large zip files again takes tens of milliseconds.
    """
    for path, finder in list(sys.path_importer_cache.items()):
        if finder is None:
            del sys.path_importer_cache[path]
        elif isinstance(finder, FileFinder):
            finder.invalidate_caches()


def _python_path_entries(environment: Mapping[str, str]) -> list[str]:
    """Return the entries that PYTHONPATH adds to `sys.path`."""
    parts = environment.get("PYTHONPATH", "").split(os.pathsep)
    return list(dict.fromkeys(str(Path(part).absolute()) for part in parts if part))
