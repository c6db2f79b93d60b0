"""A program that prints the CUDA version of the driver and the build of PyTorch, as JSON.

The program is a process of its own, because a driver may hang.
"""

from __future__ import annotations

import json


def read_driver_cuda() -> str:
    """Return the latest CUDA version that the driver supports, as "13.0"; "" if it is unknown."""
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        return ""
    try:
        pynvml.nvmlInit()
        version = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
    except (pynvml.NVMLError, AttributeError):
        return ""
    return f"{version // 1000}.{version % 1000 // 10}"


def read_torch() -> dict[str, str]:
    """Return PyTorch's version and CUDA version, or why it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError, ValueError) as error:
        # OSError and ValueError: a library of CUDA is missing.
        return {"torch": "", "torch_cuda": "", "torch_problem": f"{type(error).__name__}: {error}"}
    return {"torch": str(torch.__version__), "torch_cuda": torch.version.cuda or ""}


if __name__ == "__main__":
    print("\n" + json.dumps({"cuda": read_driver_cuda(), **read_torch()}))
