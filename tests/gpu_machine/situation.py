"""The state of the machine before the first check, which each check's process reads from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.gpu_machine.results import GpuMachine, as_text, machine_of

_MAX_WORKERS = 2


@dataclass(frozen=True)
class Situation:
    """The state of the machine before the first check.

    Attributes:
        all_gpus: addresses of all GPUs.
        usable_gpus: addresses of the GPUs that are not bad.
        pids_before: processes that computed on GPUs.
        memory_before: bytes in use on each GPU of which NVML reports them.
        directory: directory of the run's files.
    """

    machine: GpuMachine
    all_gpus: tuple[str, ...]
    usable_gpus: tuple[str, ...]
    pids_before: tuple[int, ...]
    memory_before: Mapping[str, int]
    directory: Path

    @property
    def whole_gpus(self) -> tuple[str, ...]:
        """The usable GPUs without MIG devices, which NCCL does not connect."""
        return tuple(gpu for gpu in self.usable_gpus if not gpu.startswith("MIG-"))

    @property
    def workers(self) -> int:
        """The number of ranks of a launch: two, or one on a machine without two whole GPUs."""
        return max(min(len(self.whole_gpus), _MAX_WORKERS), 1)

    @property
    def device_type(self) -> str:
        return "cuda" if self.machine.torch_cuda else "cpu"

    def verdict_file(self, name: str) -> Path:
        return self.directory / f"{name}.json"

    def log_file(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def save(self) -> None:
        fields = {name: value for name, value in vars(self).items() if name != "directory"}
        _file(self.directory).write_text(as_text(fields), encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Situation:
        fields = json.loads(_file(directory).read_text(encoding="utf-8"))
        return cls(
            machine_of(fields["machine"]),
            tuple(fields["all_gpus"]),
            tuple(fields["usable_gpus"]),
            tuple(fields["pids_before"]),
            fields["memory_before"],
            directory,
        )


def _file(directory: Path) -> Path:
    return directory / "situation.json"
