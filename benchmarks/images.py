"""Images from Parquet, decoded in the workers of a DataLoader, compared with image files.

The rival is torch's own way: a Dataset that opens and decodes a file, as torchvision's ImageFolder
does, in a DataLoader with as many workers. Both decode with Pillow.
"""

from __future__ import annotations

import io
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from pyarrow import parquet
from torch.utils.data import DataLoader, Dataset

from benchmarks.table import heading, row
from hopsgpu.data.rank_data import RankData
from hopsgpu.data.shard_plan import plan_shards
from hopsgpu.data.source import read_source
from hopsgpu.storage.lake import LakePath

_IMAGES = 2_000
# Pixels, for files of about 60 kB.
_SIZE = (320, 240)
_BATCH = 32
_WORKERS = 2
_ROUNDS = 5
_GROUP = 200
_CACHE_BYTES = 1024**3


def measure(images: int = _IMAGES, rounds: int = _ROUNDS) -> dict[str, list[float]]:
    """Decode all images in two workers; return the images a second of each way in each round."""
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        _write(directory, images)
        shard = plan_shards(read_source(LakePath(f"file://{directory}/table")), 1)[0]
        with RankData(shard, directory / "cache", _CACHE_BYTES) as data:
            dataset = data.torch(_BATCH, shuffle=True)
            ours = dataset.loader(_WORKERS, collate_fn=_decode_batch)
            files: Any = _Files(sorted((directory / "files").iterdir()))
            theirs = DataLoader(files, _BATCH, shuffle=True, num_workers=_WORKERS)
            # Which caches the rows and the files' pages.
            _count(ours), _count(theirs)
            for _ in range(rounds):
                for way, batches in (("image files", theirs), ("Parquet, later epochs", ours)):
                    began = time.perf_counter()
                    if (found := _count(batches)) != images:
                        raise AssertionError(f"{found} images of {images}")
                    taken.setdefault(way, []).append(images / (time.perf_counter() - began))
                with RankData(shard, directory / "cold", _CACHE_BYTES) as fresh:
                    first = fresh.torch(_BATCH, shuffle=True)
                    began = time.perf_counter()
                    _count(first.loader(_WORKERS, collate_fn=_decode_batch))
                    rate = images / (time.perf_counter() - began)
                    taken.setdefault("Parquet, first epoch", []).append(rate)
    heading(f"{images:,} JPEG images in batches of {_BATCH}, {_WORKERS} workers; images a second")
    for way, rates in taken.items():
        row(way, rates)
    for way in ("Parquet, first epoch", "Parquet, later epochs"):
        pairs = zip(taken[way], taken["image files"], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        print(f"{way}: {ratio:.2f} times the rate of files (target: at least 1)", flush=True)
    return taken


def _write(directory: Path, images: int) -> None:
    (directory / "files").mkdir()
    (directory / "table").mkdir()
    random = np.random.default_rng(0)
    contents = []
    for number in range(images):
        coarse = random.integers(0, 256, (_SIZE[1] // 4, _SIZE[0] // 4, 3), np.uint8)
        encoded = io.BytesIO()
        Image.fromarray(coarse).resize(_SIZE).save(encoded, "jpeg", quality=95)
        contents.append(encoded.getvalue())
        (directory / "files" / f"{number:06}.jpg").write_bytes(contents[-1])
    print(f"\nan image has {sum(map(len, contents)) // images:,} bytes")
    table = pa.table({"image": pa.array(contents, pa.binary()), "label": range(images)})
    parquet.write_table(
        table, directory / "table" / "0.parquet", row_group_size=_GROUP, use_dictionary=False
    )


def _decode(content: bytes) -> torch.Tensor:
    with Image.open(io.BytesIO(content)) as image:
        return torch.from_numpy(np.array(image.convert("RGB")))


def _decode_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {"image": torch.stack([_decode(c) for c in batch["image"]]), "label": batch["label"]}


class _Files(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return _decode(self._paths[number].read_bytes()), number


def _count(batches: Iterable[Any]) -> int:
    return sum(len(batch["label"] if isinstance(batch, Mapping) else batch[1]) for batch in batches)


if __name__ == "__main__":
    measure()
