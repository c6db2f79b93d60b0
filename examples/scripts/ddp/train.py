"""Trains a classifier of digits with DistributedDataParallel, and continues from its snapshot.

    torchrun    --nproc-per-node 2 train.py --epochs 6
    hopsgpu run --nproc-per-node 2 --checkpoint-dir snapshots --model digits --model-dir out \
        train.py --epochs 6

The script does not know hopsgpu.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

log = logging.getLogger("train")


class Digits(Dataset):
    """Scikit-learn's images of 8 × 8 pixels."""

    def __init__(self) -> None:
        digits = load_digits()
        self._pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
        self._labels = torch.tensor(digits.target)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pixels[index], self._labels[index]


def save_snapshot(path: Path, model: torch.nn.Module, optimizer, epoch: int) -> None:
    """Replace the snapshot in one step, so that a kill leaves the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, draft)
    draft.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--snapshot", type=Path, default=Path("snapshots/snapshot.pt"))
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each epoch")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rank, device = dist.get_rank(), torch.device("cuda" if has_gpu else "cpu")

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    first = 0
    if args.snapshot.exists():
        state = torch.load(args.snapshot, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
        log.info("rank %d continues at epoch %d", rank, first)
    parallel = DistributedDataParallel(model)

    digits = Digits()
    sampler = DistributedSampler(digits, seed=0)
    loader = DataLoader(digits, args.batch_size, sampler=sampler, num_workers=1)
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1, device=device)
        for pixels, labels in loader:
            loss = torch.nn.functional.cross_entropy(parallel(pixels.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            save_snapshot(args.snapshot, model, optimizer, epoch + 1)
            mean = total.item() / len(loader) / dist.get_world_size()
            print(f"epoch {epoch} loss {mean:.6f}", flush=True)
        time.sleep(args.pause)
    if rank == 0:
        args.out.mkdir(exist_ok=True)
        torch.save(model.state_dict(), args.out / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
