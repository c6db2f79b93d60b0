"""What is shipped to the ranks with a function, and what their Python must contain."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from hopsgpu.backends.backend import Site
from hopsgpu.control.channel import MOST_PAYLOAD
from hopsgpu.data.rank_shards import MOST_DEALT
from hopsgpu.errors import ConfigError
from hopsgpu.packaging.import_scan import ImportedModules, ImportRecorder
from hopsgpu.packaging.module_finder import MAINS, THERE
from hopsgpu.packaging.modules import PackedModules, Packer, roots_of
from hopsgpu.packaging.pickling import pickle_call

# The rest of the payload is for the data's shards, which travel in the same message.
_MOST_CALL = MOST_PAYLOAD - MOST_DEALT


def pickled(
    train_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[bytes, ImportedModules]:
    """Pickle the function with its arguments; return it, and the modules that they import.

    Raises:
        ConfigError: something cannot be pickled, or is too large to travel.
    """
    noted = ImportRecorder()
    call = pickle_call(train_fn, args, kwargs, noted=noted)
    _check_size(len(call), 0)
    return call, noted.imported()


def packed_modules(
    packer: Packer,
    train_fn: Callable[..., Any],
    call: bytes,
    imported: ImportedModules,
    application: Site,
) -> PackedModules:
    """Pack the user's modules that a function needs, which travel with it.

    Args:
        packer: packs the modules.
        train_fn: the function.
        call: the function with its arguments, pickled.
        imported: the modules that function and arguments import.
        application: the application in which the function runs.

    Raises:
        ConfigError: the modules and the pickled call are too large to travel.
    """
    modules = packer.pack(roots_of(train_fn, imported, application.added, packer.sources))
    _check_size(len(call), len(modules.archive))
    return modules


def needs_of(imported: ImportedModules, modules: PackedModules) -> tuple[str, ...]:
    """Return the top-level modules that unpickling the call needs, and that do not travel.

    Optional imports of the function are not among them.
    """
    tops = {name.partition(".")[0] for name in imported.needed}
    return tuple(sorted(tops - THERE - MAINS - modules.names - sys.stdlib_module_names))


def _check_size(call: int, modules: int) -> None:
    """Raise ConfigError if a pickled call and modules of these sizes (bytes) are too large."""
    if call + modules > _MOST_CALL:
        raise ConfigError(
            f"train_fn with its arguments is {call} bytes pickled, its modules are {modules}; at"
            f" most {_MOST_CALL} together are accepted. Give data by data=, or read it in the ranks"
        )
