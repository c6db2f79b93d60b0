"""Trains a regression; Hydra reads its configuration from the directory `conf`.

torchrun    --nproc-per-node 2 train.py optimizer=adam epochs=4
hopsgpu run --nproc-per-node 2 --output outputs train.py optimizer=adam epochs=4
"""

from __future__ import annotations

import hydra
import torch
import torch.distributed as dist
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch.nn.parallel import DistributedDataParallel


class Regression(torch.nn.Module):
    """A linear model whose size the configuration gives."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(features, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.linear(values)


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(config.seed)
    model = DistributedDataParallel(Regression(config.features))
    optimizer = instantiate(config.optimizer, params=model.parameters())
    values = torch.randn(256, config.features, generator=torch.Generator().manual_seed(rank))
    targets = values.sum(dim=1, keepdim=True)
    for epoch in range(config.epochs):
        loss = torch.nn.functional.mse_loss(model(values), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch} loss {mean.item() / dist.get_world_size():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
