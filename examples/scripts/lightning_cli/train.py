"""Trains by Lightning's command line, which reads config.yaml.

torchrun    --nproc-per-node 2 train.py fit --config config.yaml
hopsgpu run --nproc-per-node 2 --checkpoint-dir checkpoints train.py fit --config config.yaml
"""

from __future__ import annotations

import lightning
import torch
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    """A linear model; its arguments are options of the command line."""

    def __init__(self, features: int = 8, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.linear = torch.nn.Linear(features, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        values, targets = batch
        loss = torch.nn.functional.mse_loss(self.linear(values), targets)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            loss = self.trainer.callback_metrics["loss"].item()
            print(f"epoch {self.current_epoch} loss {loss:.6f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Sums(lightning.LightningDataModule):
    """Random rows and their sums."""

    def __init__(self, rows: int = 512, features: int = 8, batch_size: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(self.hparams.rows, self.hparams.features, generator=generator)
        rows = TensorDataset(values, values.sum(dim=1, keepdim=True))
        return DataLoader(rows, self.hparams.batch_size)


if __name__ == "__main__":
    # The configuration is in the project already.
    LightningCLI(Regression, Sums, save_config_callback=None)
