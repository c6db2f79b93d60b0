"""The MIG devices into which each simulated GPU is divided. Pure.

Source: NVIDIA's MIG User Guide, "Supported MIG Profiles": a GPU has seven compute slices, and its
devices share its memory.
"""

from __future__ import annotations

import re

from hopsgpu.errors import ConfigError

# The first word of the name of each simulated GPU.
SIMULATED = "Simulated"
_ENTRY = re.compile(r"(([1-7])g\.([1-9]\d{0,2})gb(?:\+[a-z]+)?):([1-7])")
_MAX_COMPUTE_SLICES = 7
# Memory and name of the simulated GPUs, the smallest first.
_GPUS = ((40, "A100"), (80, "A100 80GB"), (141, "H200"))
# An A100's 1g.5gb has 4864 MiB, and its 1g.10gb has 9728.
_USABLE_SHARE = 0.95


def parse_mig(text: str) -> tuple[str, ...]:
    """Return the profile of each MIG device of a GPU, for a text such as "3g.20gb:1,1g.5gb:4".

    Raises:
        ConfigError: the text has another form, or no GPU has room for the devices.
    """
    entries = [_ENTRY.fullmatch(entry.strip()) for entry in text.split(",")]
    profiles = [entry for entry in entries if entry for _ in range(int(entry[4]))]
    if None in entries:
        raise ConfigError(
            f"mig={text!r}: must be PROFILE:COUNT[,PROFILE:COUNT…], such as 1g.10gb:7 or"
            " 3g.20gb:1,1g.5gb:4"
        )
    compute, memory = (sum(int(entry[group]) for entry in profiles) for group in (2, 3))
    if compute > _MAX_COMPUTE_SLICES or memory > _GPUS[-1][0]:
        raise ConfigError(
            f"mig={text!r}: these MIG devices have {compute} compute slices and {memory} GB, but a"
            f" GPU has {_MAX_COMPUTE_SLICES} and at most {_GPUS[-1][0]} GB: request fewer"
        )
    return tuple(entry[1] for entry in profiles)


def memory_gb(profile: str) -> int:
    """Return the memory that a profile names, in GB."""
    match = re.search(r"\.(\d+)gb", profile)
    assert match is not None
    return int(match[1])


def memory_mib(profile: str) -> int:
    """Return the memory that nvidia-smi shows for a device of a profile, in MiB."""
    return round(memory_gb(profile) * 1024 * _USABLE_SHARE)


def simulated_gpu(profiles: tuple[str, ...]) -> tuple[str, int]:
    """Return name and memory in MiB of the smallest simulated GPU with room for MIG devices."""
    wanted = sum(map(memory_gb, profiles))
    memory, name = next(gpu for gpu in _GPUS if gpu[0] >= wanted)
    return f"{SIMULATED} {name}", memory * 1024
