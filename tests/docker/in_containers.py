"""Functions that ranks in containers run; this module imports neither pytest nor PySpark."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hopsgpu


def describe_container() -> dict[str, Any]:
    smi = os.environ["HOPSGPU_NVIDIA_SMI"]
    listed = subprocess.run([smi, "-L"], check=True, capture_output=True, text=True).stdout
    return {
        "executable": sys.executable,
        "prefix": sys.prefix,
        "processes": sum(entry.name.isdigit() for entry in Path("/proc").iterdir()),
        "cuda": os.environ["CUDA_VISIBLE_DEVICES"],
        "seen": listed.splitlines(),
        "shared_memory": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
        "has_leases_of_node": Path("/tmp/hopsgpu-gpu-leases").exists(),
    }


class Images:
    """Rows of 16 MiB, so that a batch of workers needs more than Docker's 64 MiB in /dev/shm."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.full((4 * 2**20,), float(index))


def train_with_workers() -> float:
    """Train with DDP over gloo, from a DataLoader whose workers use shared memory."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    dist.init_process_group("gloo")
    data: Any = Images()
    loader = DataLoader(data, batch_size=4, num_workers=2, sampler=DistributedSampler(data))
    model = DistributedDataParallel(torch.nn.Linear(4 * 2**20, 1))
    total = 0.0
    for batch in loader:
        loss = model(batch).mean()
        loss.backward()
        total += float(batch[:, 0].sum())
    sums = torch.tensor(total)
    dist.all_reduce(sums)
    dist.destroy_process_group()
    return float(sums)


def fill_memory() -> None:
    blocks = []
    while True:
        blocks.append(bytearray(64 * 2**20))


def wait_for_end() -> None:
    time.sleep(3600)


def count_steps(steps: int, seconds: float) -> int:
    """Save a checkpoint at each step; return the step with which this attempt began."""
    context = hopsgpu.context()
    latest = context.latest_checkpoint()
    begun = 0 if latest is None else int(latest.read_text())
    for step in range(begun, steps):
        Path("step").write_text(str(step + 1))
        context.save_checkpoint("step", step + 1)
        context.report(step + 1, saved=step)
        time.sleep(seconds)
    return begun


def objective(x: float) -> float:
    return (x - 2) ** 2


def import_shipped() -> str:
    import of_environment

    return str(of_environment.WORD)
