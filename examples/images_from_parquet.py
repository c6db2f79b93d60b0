"""Images in a binary column of Parquet, decoded by a DataLoader's workers, on a gang.

eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
python examples/images_from_parquet.py
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import hopsgpu

WORKERS, SIDE = 2, 16


def pictures(numbers: Iterator[Any]) -> Iterator[Any]:
    """Yield PNG files by number, as Spark's executors create them: of vertical or flat bars."""
    import pandas as pd
    from PIL import Image, ImageDraw

    for batch in numbers:
        rows = []
        for number in batch["id"]:
            draw, label = random.Random(int(number)), int(number) % 2
            image, at = Image.new("L", (SIDE, SIDE), draw.randrange(60)), draw.randrange(2, 12)
            bar = (at, 1, at + 2, SIDE - 2) if label else (1, at, SIDE - 2, at + 2)
            ImageDraw.Draw(image).rectangle(bar, fill=draw.randrange(120, 256))
            image.save(file := io.BytesIO(), "PNG")
            rows.append((file.getvalue(), label))
        yield pd.DataFrame(rows, columns=["png", "label"])


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """This rank's rows; `__getitem__` runs in the DataLoader's workers."""

    def __init__(self, table: Any) -> None:
        self.png, self.label = table["png"], table["label"]

    def __len__(self) -> int:
        return len(self.png)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        import numpy as np
        from PIL import Image

        image = Image.open(io.BytesIO(self.png[row].as_py()))
        pixels = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)
        flipped = pixels.flip(0) if torch.rand(()) < 0.5 else pixels  # augmented
        return flipped[None], self.label[row].as_py()


def train(epochs: int) -> dict[str, Any]:
    """Return the loss of each epoch, and the sum of the weights."""
    import torch.distributed as dist

    ctx = hopsgpu.context()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", ctx.local_rank) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.AdaptiveMaxPool2d(4)
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(8 * 16, 2)).to(device)
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(
        Pictures(ctx.data.to_arrow()),
        batch_size=32,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        pin_memory=cuda,
    )
    losses = []
    for epoch in range(epochs):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ctx.report(epoch, loss=loss)
        losses.append(loss.item())
    weights = float(sum(p.detach().double().abs().sum() for p in model.parameters()))
    dist.destroy_process_group()
    return {"losses": losses, "weights": weights, "rows": len(loader.dataset)}


def main() -> None:
    spark = hopsgpu.session("images")
    frame = spark.range(512).mapInPandas(pictures, "png binary, label long")
    result = hopsgpu.launch(train, kwargs={"epochs": 6}, workers=WORKERS, data=frame)
    spark.stop()
    print(f"loss {result.value['losses'][0]:.4f} -> {result.value['losses'][-1]:.4f}")


if __name__ == "__main__":
    main()
