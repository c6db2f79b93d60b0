"""Lightning on a gang, with early stopping and checkpoints: a Trainer as on a laptop.

pip install 'hopsgpu[libraries]'
eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
python examples/lightning_callbacks.py
"""

from __future__ import annotations

from typing import Any

import hopsgpu

WORKERS = 2


def train(epochs: int) -> dict[str, Any]:
    """Return the losses, and how many epochs were enough."""
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    from hopsgpu.frameworks.lightning import gang_callback

    class Plane(L.LightningModule):
        """Fits y = x0 - 2 x1 + 3 x2."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def validation_step(self, batch: Any, _: int) -> None:
            loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
            self.log("val_loss", loss, sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    L.seed_everything(0, verbose=False)
    ctx = hopsgpu.context()
    x = torch.randn(512, 3)
    data = TensorDataset(x, x @ torch.tensor([[1.0], [-2.0], [3.0]]))
    best = ModelCheckpoint("checkpoints", monitor="val_loss", save_weights_only=False)
    trainer = L.Trainer(
        max_epochs=epochs,
        # Metrics to the driver, checkpoints to the lake.
        callbacks=[EarlyStopping("val_loss", min_delta=1e-4), best, gang_callback(ctx)],
        logger=False,
        enable_progress_bar=False,
    )
    model = Plane()
    # Lightning gives each rank its part of the rows.
    loaders = DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=64)
    found = ctx.latest_checkpoint()  # None if nothing was saved before
    trainer.fit(model, *loaders, ckpt_path=found)
    trainer.save_checkpoint(ctx.model_dir / "plane.ckpt", weights_only=True)  # rank 0 writes
    return {
        "epochs": trainer.current_epoch,
        "world": trainer.world_size,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "weights": model.layer.weight.flatten().tolist(),
        "resumed": found is not None,
    }


def main() -> None:
    spark = hopsgpu.session("lightning")
    result = hopsgpu.launch(train, kwargs={"epochs": 50}, workers=WORKERS, model="plane", retries=1)
    spark.stop()
    print(
        f"loss {result.value['val_loss']:.5f} after {result.value['epochs']} epochs of at most 50"
    )
    print(f"plane {result.value['weights']}, {result.model.url}")


if __name__ == "__main__":
    main()
