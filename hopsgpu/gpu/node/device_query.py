"""The program that `ask_driver` runs: it prints the driver's GPUs as JSON on stdout.

A driver that hangs blocks this process, not the process that waits for the output.
"""

import importlib
import json
import os
import sys
import time
from typing import Mapping

from hopsgpu.gpu.node import nvidia_smi, nvml
from hopsgpu.gpu.node.devices import (
    NO_NVML,
    DriverError,
    HungDriverError,
    Listing,
    NoDriverError,
    encode,
)


def read(environ: Mapping[str, str], seconds: float, should_ask_nvml: bool) -> Listing:
    """Return the node's GPUs, from NVML or else from nvidia-smi.

    Args:
        environ: may name the nvidia-smi to use.
        seconds: time limit for everything; only the calls of nvidia-smi are stopped after it.

    Raises:
        NoDriverError: there is neither NVML nor nvidia-smi.
        HungDriverError: nvidia-smi did not answer in time.
        DriverError: neither lists the GPUs; the message says why, for both.
    """
    deadline = time.monotonic() + seconds
    if not should_ask_nvml or nvidia_smi.VARIABLE in environ:
        return nvidia_smi.read(environ, seconds)
    is_nvml_missing = False
    try:
        return nvml.read(importlib.import_module("pynvml"))
    except (ImportError, NoDriverError) as error:
        is_nvml_missing, refused = True, str(error)
    except DriverError as error:
        refused = str(error)
    try:
        return nvidia_smi.read(environ, deadline - time.monotonic())
    except HungDriverError:
        raise
    except DriverError as error:
        if is_nvml_missing and isinstance(error, NoDriverError):
            raise NoDriverError(
                f"{error}; {refused}: check that this node has a GPU driver"
            ) from None
        raise DriverError(f"{error}; {refused}") from None


def main() -> None:
    """Print the listing, or why there is none.

    The arguments are the directory or archive of the package, the seconds, and optionally NO_NVML.
    """
    seconds = float(sys.argv[2])
    try:
        answer = encode(read(os.environ, seconds, NO_NVML not in sys.argv[3:]))
    except DriverError as error:
        answer = encode(error)
    # On a line of its own: an imported module may have printed part of a line.
    print(f"\n{json.dumps(answer)}")
