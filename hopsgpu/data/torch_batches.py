"""Batches as torch tensors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hopsgpu.data.columns import Column, ColumnKind, warn_of_missing_shapes
from hopsgpu.data.position import Pass
from hopsgpu.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class BatchSource:
    """The source of a dataset's batches.

    Attributes:
        read: returns the batches of some epochs, and counts the batches that the user receives.
        read_part: returns the batches of a pass for one of the processes that share the shard.
        start_pass: returns the pass of an epoch, from the number of processes.
        count_batch: counts a batch of a pass.
        waiting: entered each time that the training waits for batches, to count the time.
    """

    read: Callable[[Sequence[int]], Iterator[Mapping[str, Array]]]
    read_part: Callable[[Pass, int], Iterator[Mapping[str, Array]]]
    start_pass: Callable[[int, int], Pass]
    count_batch: Callable[[Pass], None]
    waiting: AbstractContextManager[None]


def dataset(
    source: BatchSource, columns: Sequence[Column], count: int, epoch: int, pin_memory: bool | None
) -> Any:
    """Return a torch.utils.data.IterableDataset.

    Args:
        count: number of batches of an epoch.
        epoch: number of the first epoch.
        pin_memory: whether tensors are page-locked; None for yes if there is a GPU.

    Raises:
        ConfigError: a column has dates or times, or lists of them.
    """
    _check_types(columns)
    torch = importlib.import_module("torch")
    is_pinned = bool(torch.cuda.is_available()) if pin_memory is None else pin_memory

    class Batches(torch.utils.data.IterableDataset):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            self._epoch = epoch
            self._pass: Pass | None = None

        def __len__(self) -> int:
            return count

        def set_epoch(self, epoch: int) -> None:
            self._epoch = epoch

        def begin(self, readers: int) -> Pass:
            """Return the pass of the next epoch, for worker processes that start after this."""
            current, self._epoch = self._epoch, self._epoch + 1
            self._pass = source.start_pass(current, readers)
            return self._pass

        def loader(self, num_workers: int, **options: Any) -> Any:
            """Return a torch DataLoader whose workers each read a part of the shard.

            Each iteration is an epoch. The order of the rows depends on the number of workers.

            Args:
                num_workers: number of processes, at least 1.
                options: options of `DataLoader`, such as `prefetch_factor` and `collate_fn`, which
                    a worker calls with a batch.

            Raises:
                ConfigError: the number is no integer ≥ 1, or an option cannot be used here.
            """
            check_workers(num_workers, options)
            return _loader_class(torch, source)(
                self, batch_size=None, num_workers=num_workers, **options
            )

        def __iter__(self) -> Iterator[dict[str, Any]]:
            worker = torch.utils.data.get_worker_info()
            _check_no_accelerate()
            if worker is None:
                current, self._epoch = self._epoch, self._epoch + 1
                return _tensors(torch, source.read([current]), columns, is_pinned)
            if self._pass is None or self._pass.leg.readers != worker.num_workers:
                raise ConfigError(
                    "num_workers must be 0: each worker would read the whole shard, and the dataset"
                    " itself reads ahead. If batches need work in other processes, use"
                    f" dataset.loader({worker.num_workers}) instead of DataLoader(dataset, ...)"
                )
            if not self._pass.total:
                return iter(())
            # Page-locked memory cannot be sent to another process.
            return _tensors(torch, source.read_part(self._pass, worker.id), columns, False)

    return Batches()


def _check_no_accelerate() -> None:
    """Raise a ConfigError if a loader of Accelerate's `prepare` is among the callers.

    Such a loader reads ahead, and divides the batches of rank 0's shard among the ranks.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "accelerate.data_loader":
            raise ConfigError(
                "a loader over context().data must not be given to Accelerate's prepare(), nor to"
                " the Trainer of transformers, which prepares it: only rank 0's rows would be read"
                " and divided among the ranks, although each rank has its own rows already. Give"
                " only the model and the optimizer to prepare()"
            )
        frame = frame.f_back  # type: ignore[assignment]


def _check_types(columns: Sequence[Column]) -> None:
    for column in columns:
        if column.dtype.kind in "mM":
            raise ConfigError(
                f"column {column.name!r} has the type {column.dtype}, which torch does not have:"
                " convert it to a number in Spark (unix_timestamp, datediff), or leave it out of"
                " columns="
            )


def _loader_class(torch: Any, source: BatchSource) -> Any:
    end = object()

    class Loader(torch.utils.data.DataLoader):  # type: ignore[misc]
        """Counts batches of worker processes when the training receives them."""

        def __iter__(self) -> Iterator[Any]:
            # Start the pass before the workers are forked. Batches that workers have read ahead do
            # not count.
            pass_ = self.dataset.begin(self.num_workers)
            batches = super().__iter__()
            pass_.is_open = True
            try:
                while True:
                    with source.waiting:
                        batch = next(batches, end)
                    if batch is end:
                        return
                    source.count_batch(pass_)
                    yield batch
            finally:
                pass_.is_open = False

    return Loader


def check_workers(num_workers: object, options: Mapping[str, Any]) -> None:
    """Raise a ConfigError unless `Batches.loader` accepts these arguments."""
    if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
        raise ConfigError(
            f"num_workers={num_workers!r}: must be an integer ≥ 1; without workers, use the dataset"
            " itself"
        )
    fixed = {"batch_size", "sampler", "batch_sampler", "shuffle", "drop_last", "dataset"}
    if wrong := sorted(fixed & options.keys()):
        raise ConfigError(
            f"{', '.join(wrong)}: cannot be given here, since the dataset makes the batches; give"
            " batch_size, shuffle and drop_remainder to torch(...)"
        )
    for name, accepted in (("persistent_workers", False), ("in_order", True)):
        if options.get(name, accepted) is not accepted:
            raise ConfigError(
                f"{name}={options[name]!r}: must be {accepted}, so that a checkpoint knows which"
                " batches were trained"
            )


def _tensors(
    torch: Any, batches: Iterator[Mapping[str, Array]], columns: Sequence[Column], is_pinned: bool
) -> Iterator[dict[str, Any]]:
    for number, batch in enumerate(batches):
        if number == 0:
            warn_of_missing_shapes(columns, batch)
        yield {c.name: _values(torch, c.kind, batch[c.name], is_pinned) for c in columns}


def _values(torch: Any, kind: ColumnKind, array: Array, is_pinned: bool) -> Any:
    if kind is ColumnKind.NUMBER:
        return _tensor(torch, array, is_pinned)
    if kind is ColumnKind.RAGGED and all(row.dtype != object for row in array):
        return [_tensor(torch, row, is_pinned) for row in array]
    return array.tolist()


def _tensor(torch: Any, array: Array, is_pinned: bool) -> Any:
    # Copy read-only arrays: a change in place must not reach other epochs or read-only pages. A
    # writeable array belongs to its batch.
    if not is_pinned:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    import numpy as np

    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    tensor = torch.empty(array.shape, dtype=kind, pin_memory=True)
    np.copyto(tensor.numpy(), array)
    return tensor
