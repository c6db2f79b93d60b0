"""The environment variables of ranks: inherited, shared by a container's ranks, and own."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hopsgpu.frameworks import VARIABLES
from hopsgpu.packaging.python_env.environment import RankPython

# Variables of Spark or an earlier run, which a rank must not inherit from the executor.
_NOT_INHERITED = re.compile(
    r"OMP_NUM_THREADS|PYTHONPATH|PYTHONHASHSEED|PYTHON_WORKER_FACTORY_.*|SPARK_AUTH_.*"
    r"|TORCHELASTIC_.*|GROUP_.*|ROLE_.*|HOPSGPU_PROCESS_DAEMON"
)

# Variables of a single Spark task or rank. Frameworks do not read these at their import.
_NOT_SHARED = re.compile(
    r"HOPSGPU_.*|HOME|TMPDIR|(PY)?SPARK_.*|PYTHON_(WORKER|UNIX|FAULT|DAEMON).*"
)

# Directories that libraries write to. Without these variables, libraries use HOME or TMPDIR.
_WRITTEN = frozenset(
    {
        "CUDA_CACHE_PATH",
        "MPLCONFIGDIR",
        "NUMBA_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCH_EXTENSIONS_DIR",
        "TRITON_CACHE_DIR",
        "TRITON_HOME",
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
        "XDG_DATA_HOME",
        "XDG_RUNTIME_DIR",
        "XDG_STATE_HOME",
    }
)
# Directories of models and data sets, which may be filled already and only read.
_FILLED = frozenset({"HF_DATASETS_CACHE", "HF_HOME", "HF_HUB_CACHE", "KERAS_HOME", "TORCH_HOME"})

# An overloaded node imports torch in minutes. Ranks without the server would not be faster.
IMPORT_SECONDS = 600.0


@dataclass(frozen=True)
class ServerSpec:
    """The parameters of a fork server.

    Attributes:
        executable: the Python interpreter.
        environment: the variables that the server's ranks share.
        modules: top-level modules and submodules to import if they exist.
        import_seconds: after which ranks start without the server.
    """

    executable: str
    environment: Mapping[str, str]
    modules: tuple[str, ...] = ()
    import_seconds: float = IMPORT_SECONDS

    @property
    def packages(self) -> frozenset[str]:
        return frozenset(name for name in self.modules if "." not in name)

    @property
    def identity(self) -> tuple[Any, ...]:
        """A hashable value, equal for specs of the same server."""
        return self.executable, tuple(sorted(self.environment.items())), frozenset(self.modules)

    def as_fields(self) -> dict[str, Any]:
        return {
            "executable": self.executable,
            "environment": dict(self.environment),
            "modules": list(self.modules),
            "import_seconds": self.import_seconds,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ServerSpec:
        return cls(**{**fields, "modules": tuple(fields["modules"])})


def rank_environment(
    executor: Mapping[str, str], assigned: Mapping[str, str], python_path: Sequence[str]
) -> dict[str, str]:
    """Return a rank's variables: the assigned ones, and others inherited from the executor.

    Cache directories that this user cannot use are not inherited: an image may name those of the
    user that built it.
    """
    kept = {
        name: os.fsencode(value).decode("utf-8", "surrogateescape")
        for name, value in executor.items()
        if name not in VARIABLES
        and not _NOT_INHERITED.fullmatch(name)
        and _is_usable(name, Path(value))
    }
    inherited = executor.get("PYTHONPATH", "").split(os.pathsep)
    path = dict.fromkeys(p for p in [*python_path, *inherited] if p)
    return {**kept, "PYTHONPATH": os.pathsep.join(path), **assigned}


def as_bytes(environment: Mapping[str, str]) -> dict[bytes, bytes]:
    """Return the result of `rank_environment` in UTF-8, also if a locale is ASCII."""
    return {_utf8(name): _utf8(value) for name, value in environment.items()}


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _is_usable(name: str, path: Path) -> bool:
    # A relative path lies in the rank's working directory, where every path can be created.
    if name not in _WRITTEN | _FILLED or not path.is_absolute():
        return True
    if name in _FILLED and os.access(path, os.R_OK | os.X_OK):
        return True
    existing = next(above for above in (path, *path.parents) if os.path.lexists(above))
    # `access` first: `is_dir` fails if this user may not read the target of a link.
    return os.access(existing, os.W_OK | os.X_OK) and existing.is_dir()


def server_spec(
    executor: Mapping[str, str],
    shared: Mapping[str, str],
    modules: Sequence[str],
    python: RankPython,
) -> ServerSpec:
    """Return the spec of a fork server, which is the same in all Spark tasks of an executor."""
    lasting = {n: v for n, v in executor.items() if not _NOT_SHARED.fullmatch(n)}
    environment = rank_environment(lasting, shared, [*python.packages, package_path()])
    return ServerSpec(python.executable or sys.executable, environment, tuple(modules))


def own_variables(environment: Mapping[str, str], spec: ServerSpec) -> dict[str, str]:
    shared = spec.environment
    return {name: value for name, value in environment.items() if shared.get(name) != value}


def package_path() -> str:
    """Return the directory for a Python path that contains this `hopsgpu`."""
    return str(Path(__file__).absolute().parents[2])
