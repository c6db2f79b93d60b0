"""How the discovery script travels: once per amount, since Spark passes it no argument."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from hopsgpu.discovery import script
from hopsgpu.spec import MOST_GPUS

# The directory in the container; Spark runs `./hopsgpu-discovery/gpus-2`.
ALIAS = "hopsgpu-discovery"


def script_for(amount: int) -> str:
    """Path, in the container, of the script that gives out `amount` GPUs."""
    return f"./{ALIAS}/gpus-{amount}"


def pack_scripts(target: Path) -> Path:
    """Writes the archive that YARN unpacks as `ALIAS`: the script and a name per amount."""
    content = Path(script.__file__).read_bytes()
    with tarfile.open(target, "w:gz") as archive:
        for amount in range(1, MOST_GPUS + 1):
            entry = tarfile.TarInfo(f"gpus-{amount}")
            entry.mode = 0o755
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return target
