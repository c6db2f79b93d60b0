"""The process that loads a call as a rank does, before GPUs are requested.

Run as `python -P -m hopsgpu.packaging.load_check_process DRIVER_PID` with the call as stdin. Its
stdout gets `loaded`, or an error in JSON.
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
# Characters of an error's message.
_MOST = 4096
# The file that raises the error of a missing environment variable.
_OF_ENVIRON = (os.__file__, "<frozen os>")
# Words of errors that only say that this process has no GPU.
_DEVICES = re.compile(r"\b(cuda|gpus?|nvidia|hip|devices?|backends?)\b", re.IGNORECASE)
# Errors of these modules are about the call. Those of other packages may be about a server or GPU.
_OWN_ERRORS = ("builtins", "__main__", "pickle", "_pickle")


def depends_on_node(error: BaseException) -> bool:
    """Return whether an error may have its reason here, so that a rank may load the call.

    Files, servers, packages, GPUs and what a rank knows of its gang may be on the nodes only.
    """
    if isinstance(error, (OSError, ImportError, MemoryError, HopsGpuError)):
        return True
    if type(error).__module__ not in _OWN_ERRORS:
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, KeyError) and frames and frames[-1].filename in _OF_ENVIRON:
        return True  # a missing environment variable
    is_general = isinstance(error, (RuntimeError, AssertionError))
    return is_general and _DEVICES.search(str(error)) is not None


def _loaded(call: int) -> bytes:
    """Load a call; return what to write to stdout."""
    try:
        main_module.load(Path(f"/proc/self/fd/{call}"))
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises is reported
        try:
            message = str(error)[:_MOST]
        except Exception as problem:  # noqa: BLE001 - a user's __str__
            message = f"(its __str__ raised {type(problem).__name__})"
        text = f"{type(error).__name__}: {message}" if message else type(error).__name__
        return json.dumps({"error": text, "depends": depends_on_node(error)}).encode()
    return LOADED


def main() -> None:
    """Load the call on stdin."""
    die_with(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    call, answer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.write(answer, _loaded(call))
    # Exit functions and threads of the user's code could delay the end.
    os._exit(0)


if __name__ == "__main__":
    main()
