"""Print what the driver tells of the GPUs, as JSON on stdout: the program that `ask_driver` runs.

A driver that hangs blocks this process, not the one that waits for it.
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


def read(environ: Mapping[str, str], seconds: float, with_nvml: bool) -> Listing:
    """Return the node's GPUs.

    Args:
        environ: may name the nvidia-smi to use.
        seconds: time limit for everything; only the calls of nvidia-smi are held to it.
        with_nvml: whether to ask NVML first, if Python has `pynvml`.

    Raises:
        NoDriverError: there is neither NVML nor nvidia-smi.
        HungDriverError: nvidia-smi did not answer in time.
        DriverError: neither lists the GPUs; the message says why, for both.
    """
    until = time.monotonic() + seconds
    if not with_nvml or nvidia_smi.VARIABLE in environ:
        return nvidia_smi.read(environ, seconds)
    none = False
    try:
        return nvml.read(importlib.import_module("pynvml"))
    except (ImportError, NoDriverError) as error:
        none, refused = True, str(error)
    except DriverError as error:
        refused = str(error)
    try:
        return nvidia_smi.read(environ, until - time.monotonic())
    except HungDriverError:
        raise
    except DriverError as error:
        if none and isinstance(error, NoDriverError):
            raise NoDriverError(
                f"{error}; {refused}: check that this node has a GPU driver"
            ) from None
        raise DriverError(f"{error}; {refused}") from None


def main() -> None:
    """Print the listing, or why there is none.

    The program's arguments are the directory or archive of the package, the seconds, and NO_NVML or
    nothing.
    """
    seconds = float(sys.argv[2])
    try:
        answer = encode(read(os.environ, seconds, NO_NVML not in sys.argv[3:]))
    except DriverError as error:
        answer = encode(error)
    # On a line of its own, whatever else this process prints.
    print(f"\n{json.dumps(answer)}")
