"""The process that loads a call as a rank does, before GPUs are requested.

Run as `python -P -m hopsgpu.packaging.load_check_process DRIVER_PID` with the call as stdin. It
writes `loaded`, or an error as JSON, to stdout.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import traceback
from pathlib import Path

from hopsgpu.errors import HopsGpuError
from hopsgpu.linux import die_with
from hopsgpu.packaging import main_module

LOADED = b"loaded"
_MAX_MESSAGE = 4096
# The file that raises KeyError for a missing environment variable.
_ENVIRON_FILES = (os.__file__, "<frozen os>")
# Words of errors whose cause may be that this process has no GPU.
_DEVICE_WORDS = re.compile(r"\b(cuda|gpus?|nvidia|hip|devices?|backends?)\b", re.IGNORECASE)
# Errors of other modules' classes may concern a server or GPU instead of the call.
_CALL_ERROR_MODULES = ("builtins", "__main__", "pickle", "_pickle")


def may_depend_on_node(error: BaseException) -> bool:
    """Return whether ranks may be able to load a call that raised an error here.

    Files, servers, packages, GPUs and facts about the gang may exist on the nodes only.
    """
    if isinstance(error, (OSError, ImportError, MemoryError, HopsGpuError)):
        return True
    if type(error).__module__ not in _CALL_ERROR_MODULES:
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, KeyError) and frames and frames[-1].filename in _ENVIRON_FILES:
        return True  # a missing environment variable
    is_general = isinstance(error, (RuntimeError, AssertionError))
    return is_general and _DEVICE_WORDS.search(str(error)) is not None


def _load_result(call: int) -> bytes:
    try:
        main_module.load(Path(f"/proc/self/fd/{call}"))
    except Exception as error:  # noqa: BLE001 - any error of the user's code is reported
        try:
            message = str(error)[:_MAX_MESSAGE]
        except Exception as problem:  # noqa: BLE001 - a user's __str__
            message = f"(its __str__ raised {type(problem).__name__})"
        text = f"{type(error).__name__}: {message}" if message else type(error).__name__
        return json.dumps({"error": text, "depends": may_depend_on_node(error)}).encode()
    return LOADED


def main() -> None:
    die_with(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    call, answer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.write(answer, _load_result(call))
    # Exit functions and threads of the user's code could delay a normal exit.
    os._exit(0)


if __name__ == "__main__":
    main()
