"""Processes of PyTorch that find each other by the environment they are given."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.contract.framework_ranks import local_gang, outer_address, results, stray

STEPS, BATCH = 5, 8


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def fit(model: nn.Module, rank: int, world_size: int) -> list[float]:
    """Linear regression by SGD on a rank's part of each batch; its loss in each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(STEPS, BATCH, 3, generator=torch.Generator().manual_seed(1))
    y = x.sum(dim=2, keepdim=True)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        part = slice(rank, None, world_size)
        loss = nn.functional.mse_loss(model(x[step][part]), y[step][part])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train() -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([1.0 + rank])
    dist.all_reduce(total)
    model = nn.parallel.DistributedDataParallel(linear())
    losses = fit(model, rank, world_size)
    dist.destroy_process_group()
    return {
        "sum": total.item(),
        "weights": model.module.weight.flatten().tolist(),
        "losses": losses,
        "gpus": os.environ["CUDA_VISIBLE_DEVICES"],
    }


def check(ranks: list[dict[str, Any]]) -> None:
    """That they trained as one process does."""
    alone = linear()
    losses = fit(alone, 0, 1)
    assert losses[-1] < losses[0]
    weights = alone.get_parameter("weight").flatten().tolist()
    for rank in ranks:
        assert rank["sum"] == 3.0
        assert rank["gpus"] == ""
        assert rank["weights"] == pytest.approx(weights, abs=1e-6)
    means = [sum(pair) / 2 for pair in zip(*(r["losses"] for r in ranks), strict=True)]
    assert means == pytest.approx(losses, abs=1e-6)


def test_ranks_of_one_container() -> None:
    check(results(local_gang(1, 2), Path(__file__), "train"))


@contextlib.contextmanager
def store() -> Iterator[int]:
    """A TCPStore that is served by this process, as an agent serves it; its port."""
    listener = socket.create_server((outer_address(), 0))
    port = listener.getsockname()[1]
    served = dist.TCPStore(
        outer_address(),
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    yield port
    del served


@pytest.mark.soak
def test_ranks_of_two_containers_and_a_hosted_store() -> None:
    """Rank 0 joins it too: it could not listen there."""
    with store() as port:
        assert stray((outer_address(), port))
        check(results(local_gang(2), Path(__file__), "train", store_port=port))
