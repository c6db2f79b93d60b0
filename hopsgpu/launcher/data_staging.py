"""A launch's data: written, examined and sharded before any GPU is requested."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.backends.spark.dataframe_writer import WriteProgress, write_frame
from hopsgpu.core.gang import GangState
from hopsgpu.core.run_record import DataRecord
from hopsgpu.core.spec import LaunchPlan
from hopsgpu.core.wait_reasons import WaitReason, reading_footers, writing_data
from hopsgpu.data.argument import DEFAULT_NAME, Data, Datasets
from hopsgpu.data.footer_cache import user_cache
from hopsgpu.data.position import Position, common_position
from hopsgpu.data.rank_shards import MAX_SHARD_BYTES, RankShards
from hopsgpu.data.shard_plan import EpochPlan, plan_epoch
from hopsgpu.data.source import ParquetSource, columns_of, order_digest, read_source
from hopsgpu.errors import Cancelled, ConfigError, StoreError
from hopsgpu.runs.status_board import GangBoard, StatusBoard
from hopsgpu.storage.bounded_calls import BoundedCall
from hopsgpu.storage.lake import LakePath
from hopsgpu.units import MIB, count_of

log = logging.getLogger(__name__)

_OWNERS_ONLY = 0o700
_POLL_SECONDS = 0.2
# Footers that are read between two progress reports.
_REPORT_FILES = 100
# Columns that a record names; a table of features can have thousands.
_MAX_COLUMNS = 200


class StagedSources:
    """The data of one run: written where it is a DataFrame, and its footers read.

    Attributes:
        sources: what the footers say, by name; empty without data.
        reference: description of each dataset for record and manifest, by name; None without data.
    """

    def __init__(
        self,
        datasets: Datasets | None,
        plan: LaunchPlan,
        application: GangApplication,
        board: StatusBoard,
        cancelled: threading.Event,
    ) -> None:
        self._datasets = datasets
        self._urls = plan.paths
        self._home = LakePath(plan.paths["run"], stop=cancelled) / DEFAULT_NAME
        self._application = application
        self._board = board
        self._cancelled = cancelled
        self._should_keep = datasets is not None and application.should_keep_data
        self.sources: Mapping[str, ParquetSource] = {}
        self.reference: Mapping[str, DataRecord] | None = None

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Prepare the data, and on exit remove what was written for the run, unless it is kept.

        Raises:
            ConfigError: the data cannot be read in place or written.
            StoreError: the data cannot be read, or the lake refuses the write.
            HopsGpuError: the Spark job that writes the data failed.
            Cancelled: the run was cancelled meanwhile; the Spark job is over. This does not wait
                for a lake that does not answer.
        """
        if self._datasets is None:
            yield
            return
        began = time.monotonic()
        with self._written(self._datasets):
            sources = {name: self._read(self._datasets, name) for name in self._datasets.named}
            self.sources = sources
            self.reference = {
                name: self._reference(data, sources[name])
                for name, data in self._datasets.named.items()
            }
            log.info(
                "%s: data is ready after %.1f s: %d rows in %d files",
                self._board.run_id,
                time.monotonic() - began,
                sum(source.num_rows for source in sources.values()),
                sum(len(source.files) for source in sources.values()),
            )
            yield

    def keep(self) -> None:
        """Have what was written for the run stay on the lake, for a run that resumes this one."""
        self._should_keep = True

    @contextlib.contextmanager
    def _written(self, datasets: Datasets) -> Iterator[None]:
        frames = dict(datasets.frames)
        if not frames:
            yield
            return
        try:
            self._home.make()
            self._home.set_mode(_OWNERS_ONLY)
            for name, frame in frames.items():
                self._write(datasets.label(name), frame)
            yield
        finally:
            if not self._should_keep:
                self._remove()

    def _write(self, label: str, frame: Any) -> None:
        log.debug("%s: writes %s to %s", self._board.run_id, label, self._urls[label])

        def report(written: WriteProgress) -> None:
            self._report(writing_data(label, written.ended, written.running, written.tasks))

        write_frame(
            self._application,
            frame,
            self._urls[label],
            label=label,
            tag=f"{self._board.run_id}-{label}",
            cancelled=self._cancelled,
            report=report,
        )

    def _read(self, datasets: Datasets, name: str) -> ParquetSource:
        label = datasets.label(name)

        lake = LakePath(self._urls[label], stop=self._cancelled)
        cancellation = f"the run was cancelled while the footers of {label} were read"

        def report_progress(read_count: int, files: int) -> None:
            if self._cancelled.is_set():
                raise Cancelled(cancellation)
            if read_count % _REPORT_FILES == 0:
                self._report(reading_footers(label, read_count, files))

        self._report(reading_footers(label))
        log.debug("%s: reads the footers of %s", self._board.run_id, label)
        is_frame = name in dict(datasets.frames)
        cache = None if is_frame else user_cache(self._application.user)
        # In a separate thread, because a lake that hangs would delay a cancellation for too long.
        reading = BoundedCall(
            f"hopsgpu-{self._board.run_id}-footers",
            lambda: read_source(lake, report_progress, cache),
        )
        while not reading.wait(_POLL_SECONDS):
            if self._cancelled.is_set():
                raise Cancelled(cancellation)
        try:
            source = reading.result(0)
        except Cancelled as error:
            raise Cancelled(cancellation) from error
        if source.unchecked:
            self._board.warn(
                f"{label} ({source.url}) may belong to a table with a transaction log, whose"
                f" directories also contain old rows: access was denied to {source.unchecked[0]}"
                + (f" and {len(source.unchecked) - 1} more" if source.unchecked[1:] else "")
            )
        return source

    def _report(self, why: WaitReason) -> None:
        self._board.state(GangState.PREPARING, why=why)

    def _remove(self) -> None:
        # A cancelled run does not wait a minute for a lake that is unreachable.
        home = LakePath(self._home.url, should_fail_fast=self._cancelled.is_set())
        try:
            home.remove()
        except StoreError as error:
            self._board.warn(
                f"the run's data stays on the lake until `hopsgpu runs prune` removes it: {error}"
            )

    def _reference(self, data: Data, source: ParquetSource) -> DataRecord:
        written = source.url.startswith(f"{self._home.url}/")
        columns = columns_of(source)
        unnamed = len(columns) - _MAX_COLUMNS
        return DataRecord(
            url=source.url,
            written=written,
            kept=self._should_keep if written else True,
            rows=source.num_rows,
            bytes=source.num_bytes,
            files=len(source.files),
            schema=dict([*columns.items()][:_MAX_COLUMNS]),
            more_columns=max(unnamed, 0),
            remainder=data.remainder,
            seed=data.seed,
        )


class StagedData(StagedSources):
    """The data of a launch, divided among its ranks.

    Attributes:
        shards: serialized shards for each rank; empty without data.
    """

    def __init__(
        self,
        datasets: Datasets | None,
        plan: LaunchPlan,
        application: GangApplication,
        board: GangBoard,
        cancelled: threading.Event,
    ) -> None:
        super().__init__(datasets, plan, application, board, cancelled)
        self._ranks = plan.spec.workers
        self.shards: Sequence[bytes] = ()

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Prepare the data and divide it, as `StagedSources.ready`.

        Raises:
            ConfigError: there are also fewer rows than ranks, or the data cannot be sharded.
        """
        with super().ready():
            if self._datasets is not None:
                self.shards = serialized_shards(self._datasets, self.sources, self._ranks)
            yield

    def shards_for(
        self, ranks: int, positions: Sequence[Mapping[str, Any]] = ()
    ) -> Sequence[bytes]:
        """Return the serialized shards for each rank of a world that continues at a checkpoint.

        Args:
            positions: those of the checkpoint, from `checkpoint_positions.latest_positions`; empty
                to begin with the first epoch.

        Returns:
            As `parts`; empty without data. Outside `ready()` there are no shards.

        Raises:
            ConfigError: as for `serialized_shards`.
            StoreError: a position is damaged, or of another version of hopsgpu.
        """
        if self._datasets is None:
            return ()
        if not positions and ranks == self._ranks:
            return self.shards
        checkpoint_positions = [Position.from_fields(fields) for fields in positions]
        position = common_position(checkpoint_positions) if checkpoint_positions else Position({})
        position, other_names = position.of_data(digests_of(self._datasets, self.sources))
        for name in other_names:
            self._board.warn(
                f"{self._datasets.label(name)} ({self.sources[name].url}) is other data, or is"
                " dealt in another way, than that of the checkpoint from which the ranks continue:"
                " it begins with epoch 0"
            )
        return serialized_shards(self._datasets, self.sources, ranks, position)


def digests_of(datasets: Datasets, sources: Mapping[str, ParquetSource]) -> dict[str, str]:
    """Return the digest of each dataset, as `Position` has it."""
    return {
        name: order_digest(sources[name], data.remainder, data.seed)
        for name, data in datasets.named.items()
    }


def serialized_shards(
    datasets: Datasets,
    sources: Mapping[str, ParquetSource],
    ranks: int,
    position: Position | None = None,
) -> tuple[bytes, ...]:
    """Return for each rank its shards of all datasets, serialized.

    Args:
        position: what earlier worlds have trained; None for nothing.

    Raises:
        ConfigError: there are fewer rows than ranks, or so many row groups that their plan is too
            large.
    """
    digests = digests_of(datasets, sources)
    plans: dict[str, EpochPlan] = {}
    for name, data in datasets.named.items():
        legs = () if position is None else position.legs.get(name, ())
        plan_one = functools.partial(plan_epoch, remainder=data.remainder, seed=data.seed)
        try:
            plans[name] = plan_one(sources[name], ranks, legs)
        except ConfigError as error:
            raise ConfigError(f"{datasets.label(name)} ({sources[name].url}): {error}") from None
    serialized, size = [], 0
    for rank in range(ranks):
        mine = RankShards(
            {name: plan.shards[rank] for name, plan in plans.items()},
            datasets.is_single,
            ranks,
            {name: plan.epoch for name, plan in plans.items()},
            {name: plan.rests[rank] for name, plan in plans.items() if plan.rests},
            Position({name: plan.legs for name, plan in plans.items()}, digests),
        )
        serialized.append(mine.dump())
        size += len(serialized[-1])
        if size > MAX_SHARD_BYTES:
            groups = sum(len(file.groups) for s in sources.values() for file in s.files)
            raise ConfigError(
                f"data has {count_of(groups, 'row group')}, whose shard plan for"
                f" {count_of(ranks, 'rank')} is larger than {MAX_SHARD_BYTES // MIB} MiB:"
                " rewrite the data with fewer row groups, of about 8 MB each"
            )
    return tuple(serialized)
