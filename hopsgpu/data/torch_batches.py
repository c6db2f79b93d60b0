"""Batches as torch tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hopsgpu.data.columns import Column, Kind
from hopsgpu.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def dataset(
    batches: Callable[[Sequence[int]], Iterator[Mapping[str, Array]]],
    columns: Sequence[Column],
    count: int,
    epoch: int,
    pin_memory: bool | None,
) -> Any:
    """Return a torch.utils.data.IterableDataset.

    Args:
        batches: returns the batches of some epochs.
        columns: columns of the batches.
        count: number of batches of an epoch.
        epoch: number of the first epoch.
        pin_memory: whether tensors are page-locked; None for yes if there is a GPU.

    Raises:
        ConfigError: a column has dates or times, or lists of them.
    """
    for column in columns:
        if column.dtype.kind in "mM":
            raise ConfigError(
                f"column {column.name!r} has the type {column.dtype}, which torch does not have:"
                " convert it to a number in Spark (unix_timestamp, datediff), or leave it out of"
                " columns="
            )
    torch = importlib.import_module("torch")
    pinned = bool(torch.cuda.is_available()) if pin_memory is None else pin_memory

    class Batches(torch.utils.data.IterableDataset):  # type: ignore[name-defined,misc]
        """A rank's batches; each iteration is the next epoch."""

        def __init__(self) -> None:
            self._epoch = epoch

        def __len__(self) -> int:
            return count

        def set_epoch(self, epoch: int) -> None:
            """Set the epoch of the next iteration."""
            self._epoch = epoch

        def __iter__(self) -> Iterator[dict[str, Any]]:
            if torch.utils.data.get_worker_info() is not None:
                raise ConfigError(
                    "num_workers must be 0: each worker would read the whole shard, and the dataset"
                    " itself reads ahead"
                )
            current, self._epoch = self._epoch, self._epoch + 1
            return _tensors(torch, batches([current]), columns, pinned)

    return Batches()


def _tensors(
    torch: Any, batches: Iterator[Mapping[str, Array]], columns: Sequence[Column], pinned: bool
) -> Iterator[dict[str, Any]]:
    for batch in batches:
        yield {c.name: _values(torch, c.kind, batch[c.name], pinned) for c in columns}


def _values(torch: Any, kind: Kind, array: Array, pinned: bool) -> Any:
    if kind is Kind.NUMBER:
        return _tensor(torch, array, pinned)
    if kind is Kind.RAGGED and all(row.dtype != object for row in array):
        return [_tensor(torch, row, pinned) for row in array]
    return array.tolist()


def _tensor(torch: Any, array: Array, pinned: bool) -> Any:
    # A copy: a change in place must not reach other epochs, or pages that are mapped read-only.
    if not pinned:
        return torch.from_numpy(array.copy())
    import numpy as np

    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    tensor = torch.empty(array.shape, dtype=kind, pin_memory=True)
    np.copyto(tensor.numpy(), array)
    return tensor
