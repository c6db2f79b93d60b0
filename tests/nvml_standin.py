"""Installs a stand-in for NVIDIA's `pynvml`, for GPUs of which only the utilisation matters."""

from __future__ import annotations

import shutil
from pathlib import Path

_MODULE = Path(__file__).parent / "unit" / "discovery_standins" / "pynvml.py"


def install(directory: Path, utilisation: str = "80") -> Path:
    """Write the stand-in into a directory for the front of PYTHONPATH; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(_MODULE, directory)
    set_utilisation(directory, utilisation)
    return directory


def set_utilisation(directory: Path, utilisation: str) -> None:
    """Set the utilisation of all GPUs from now on: percent, or "unknown"."""
    draft = directory / "draft"
    draft.write_text(utilisation)
    # Readers find the old text or the new one.
    draft.rename(directory / "utilisation")
