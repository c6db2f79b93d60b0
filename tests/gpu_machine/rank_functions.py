"""The functions that the ranks of the checks run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import hopsgpu

if TYPE_CHECKING:
    import torch


def _own_device(device_type: str) -> torch.device:
    """Return the device of this rank, which sees the GPUs of all ranks of its container."""
    import torch

    if device_type == "cuda":
        return torch.device("cuda", hopsgpu.context().local_rank)
    return torch.device(device_type)


def add_up(backend: str) -> dict[str, Any]:
    """Return the sum of rank + 1 over all ranks, and this rank's GPUs."""
    import torch
    import torch.distributed as dist

    ctx = hopsgpu.context()
    device = _own_device("cuda" if backend == "nccl" else "cpu")
    dist.init_process_group(backend)
    total = torch.full((2**20,), ctx.rank + 1.0, device=device)
    dist.all_reduce(total)
    mean = total.mean().item()
    dist.destroy_process_group()
    return {"sum": mean, "gpus": list(ctx.gpus)}


def ask_for_too_much_memory() -> None:
    """Allocate twice the GPU's memory at once, which takes nothing from others who use the GPU."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    torch.empty(2 * total, dtype=torch.uint8, device="cuda")


def train(device_type: str, seconds: float) -> dict[str, Any]:
    """Fit a network with DDP, on rows of a DataLoader with two workers, for some seconds.

    Returns:
        The losses of the first step and of each epoch's last step, the sum of the weights, and the
        type of their device.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    ctx = hopsgpu.context()
    has_cuda = device_type == "cuda"
    device = _own_device(device_type)
    dist.init_process_group("nccl" if has_cuda else "gloo")
    torch.manual_seed(0)
    # Large enough on a GPU that the samples of its utilisation are not 0 %.
    width = 4096 if has_cuda else 256
    hidden = torch.nn.Linear(256, width), torch.nn.ReLU(), torch.nn.Linear(width, width)
    network = torch.nn.Sequential(*hidden, torch.nn.ReLU(), torch.nn.Linear(width, 1))
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    x = torch.randn(8192, 256)
    rows = TensorDataset(x, x[:, :16].sum(dim=1, keepdim=True))
    loader = DataLoader(
        rows,
        batch_size=256,
        sampler=DistributedSampler(rows),
        num_workers=2,
        pin_memory=has_cuda,
        persistent_workers=True,
    )
    losses: list[float] = []
    is_over = torch.zeros(1, device=device)
    deadline = time.monotonic() + seconds
    # All ranks must make the same number of steps, so they agree on the end after each epoch.
    while not is_over.item():
        for inputs, targets in loader:
            outputs = model(inputs.to(device, non_blocking=True))
            loss = torch.nn.functional.mse_loss(outputs, targets.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if not losses:
                losses.append(loss.item())
        losses.append(loss.item())
        ctx.report(len(losses), loss=losses[-1])
        is_over.fill_(time.monotonic() > deadline)
        dist.all_reduce(is_over, dist.ReduceOp.MAX)
    weights = float(sum(p.detach().double().sum() for p in model.parameters()))
    dist.destroy_process_group()
    return {"losses": losses, "weights": weights, "device": device.type}


def hold_gpu(device_type: str, seconds: float) -> None:
    """Hold memory of the GPU without computing, for some seconds."""
    import torch

    block = torch.ones(2**26, device=_own_device(device_type))
    time.sleep(seconds)
    del block
