"""A script that trains with PyTorch: its classes go through files, workers and the compiler."""

from __future__ import annotations

import json
import traceback
from typing import NamedTuple

import torch
from torch import multiprocessing, nn
from torch.utils.data import DataLoader, Dataset

METHODS = ("fork", "spawn")


class Item(NamedTuple):
    number: int
    half: float


class Batch:
    def __init__(self, items: list[Item]) -> None:
        self.numbers = [item.number for item in items]


class Items(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Item:
        return Item(number, number / 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        y = self.linear(x)
        if twice:
            y = y * 2
        return y


def magnitude(x: torch.Tensor) -> torch.Tensor:
    if bool(x.sum() < 0):
        return -x
    return x


def work(rank: int, queue: multiprocessing.SimpleQueue) -> None:  # type: ignore[type-arg]
    queue.put(Batch([Item(rank, 0.0)]))


def saves_a_model() -> None:
    torch.save(Net(), "model.pt")
    assert type(torch.load("model.pt", weights_only=False)) is Net


def scripts_a_model() -> None:
    assert torch.jit.script(Net())(torch.ones(1, 1)).shape == (1, 1)
    assert torch.jit.script(magnitude)(-torch.ones(1)) == 1


def loads_with_workers() -> None:
    for method in METHODS:
        batches = list(
            DataLoader(
                Items(),
                batch_size=4,
                num_workers=2,
                collate_fn=Batch,
                multiprocessing_context=method,
                timeout=900,
            )
        )
        assert [type(batch) for batch in batches] == [Batch, Batch]
        assert batches[1].numbers == [4, 5, 6, 7]


def spawns() -> None:
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(work, args=(queue,), nprocs=1)
    assert type(queue.get()) is Batch


def train() -> tuple[dict[str, str], Net]:
    failed = {}
    for case in (saves_a_model, scripts_a_model, loads_with_workers, spawns):
        try:
            case()
        except BaseException:  # noqa: BLE001 - told, whatever it is
            failed[case.__name__] = traceback.format_exc()
    return failed, Net()


if __name__ == "__main__":
    from tests.unit.script_ranks import drive

    failures, net = drive(train)
    print(json.dumps({**failures, **({} if type(net) is Net else {"value": str(type(net))})}))
