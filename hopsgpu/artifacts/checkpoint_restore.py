"""Chooses the checkpoint to restore, and downloads and verifies its files."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.artifacts.checkpoint_retention import newest_direction
from hopsgpu.artifacts.checkpoints import (
    Checkpoints,
    CheckpointShard,
    complete_shards,
    metric_shard,
    saving_ranks_of,
)
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.digests import DIGEST, MAX_LIST_BYTES, FileFacts, read_facts
from hopsgpu.storage.error_messages import ABSENT, DAMAGED, JSON_ERRORS
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.transfer import download_files

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Checkpoint:
    """A complete checkpoint: the shards of a step, one of each rank that saves."""

    checkpoints: Checkpoints
    step: int
    shards: frozenset[CheckpointShard]

    @property
    def home(self) -> LakePath:
        return self.checkpoints.root / str(self.step)


def download_latest(
    places: Sequence[Checkpoints],
    into: Path,
    *,
    all_ranks: bool = False,
    world_size: int | None = None,
    has_saved: bool = True,
) -> Path | None:
    """Download the latest checkpoint of the first place that has one; return None if none has.

    A place's latest checkpoint is the highest step that all saving ranks of its attempt have saved
    (`saving_ranks`); the present number of ranks has no effect. If a step was saved several times,
    the newest shards that all ranks saved together count. So all ranks get the same step.

    Some ranks may save before others have asked for the checkpoint from which they start.
    Therefore:

    - If the run resumes another run, a step of this attempt counts only once the saving ranks of
      the other run, carried over to this world, have saved the step too.
    - A rank that has not saved in this attempt ignores the saves and announcements of this attempt.

    Args:
        world_size: number of ranks in the attempt; None for as many as the earlier run had last.
        has_saved: whether this rank has saved in this attempt.

    The other arguments, the result and the errors are those of `download_best`.
    """

    def candidates() -> Iterator[_Checkpoint]:
        for place, *resumed in (places[number:] for number in range(len(places))):
            required = {
                rank
                for other in resumed
                for rank in saving_ranks_of({}, other.announced_ranks()).carried_over(world_size)
            }
            shards = drop_partial_saves(place.shards(), place.attempt, required)
            announced = place.announced_ranks()
            if place is places[0] and not has_saved:
                shards = drop_attempt(shards, place.attempt)
                announced = frozenset(rank for rank in announced if rank.attempt != place.attempt)
            for step, together in sorted(complete_shards(shards, announced).items(), reverse=True):
                yield _Checkpoint(place, step, together)

    return _download_first(candidates, into, all_ranks)


def download_best(
    places: Sequence[Checkpoints], into: Path, *, all_ranks: bool = False
) -> Path | None:
    """Download the checkpoint with the best metric of all places; return None if none has a metric.

    If metrics are equal, the newest checkpoint counts.

    Args:
        places: checkpoints to search, the run's own first.
        into: local directory that keeps what was downloaded.
        all_ranks: whether to return what all ranks saved, in one directory.

    Returns:
        The file or directory as this rank saved it; if this rank saved none, as the lowest rank
        saved it. With `all_ranks`, a directory with the files that the ranks saved, and with the
        contents of the directories that they saved.

    Raises:
        ConfigError: with `all_ranks`, two ranks saved different files of the same name.
        StoreError: the lake refused the operation, or a file is damaged.
    """

    def candidates() -> Iterator[_Checkpoint]:
        scored = [
            (metric_shard(shards), _Checkpoint(place, step, shards))
            for place in reversed(places)
            for step, shards in sorted(
                complete_shards(place.shards(), place.announced_ranks()).items()
            )
        ]
        sign = newest_direction([(shard.metric, shard.best) for shard, _ in scored])
        # The position breaks ties: the newest checkpoint comes last.
        ranking = [
            (sign * shard.metric, position, checkpoint)
            for position, (shard, checkpoint) in enumerate(scored)
            if shard.metric is not None
        ]
        ranking.sort(key=lambda entry: entry[:2], reverse=True)
        return iter([checkpoint for *_, checkpoint in ranking])

    return _download_first(candidates, into, all_ranks)


def drop_partial_saves(
    shards: Mapping[int, Collection[CheckpointShard]], attempt: int, ranks: Collection[int]
) -> Mapping[int, frozenset[CheckpointShard]]:
    """Return the shards by step, without an attempt's saves in which not all `ranks` took part.

    Shards with the same number are of one save. Shards of other attempts stay.
    """

    def is_kept(shard: CheckpointShard, group: Collection[CheckpointShard]) -> bool:
        if shard.attempt != attempt:
            return True
        key = (attempt, shard.number)
        savers = {other.rank for other in group if (other.attempt, other.number) == key}
        return savers.issuperset(ranks)

    return {
        step: frozenset(shard for shard in group if is_kept(shard, group))
        for step, group in shards.items()
    }


def drop_attempt(
    shards: Mapping[int, Collection[CheckpointShard]], attempt: int
) -> Mapping[int, frozenset[CheckpointShard]]:
    return {
        step: frozenset(shard for shard in group if shard.attempt != attempt)
        for step, group in shards.items()
    }


def _download_first(
    candidates: Callable[[], Iterator[_Checkpoint]], into: Path, all_ranks: bool
) -> Path | None:
    while (chosen := next(candidates(), None)) is not None:
        rank = chosen.checkpoints.rank
        shards = sorted(chosen.shards)
        if not all_ranks:
            shards = [next((shard for shard in shards if shard.rank == rank), shards[0])]
        # Shards of the run that this run resumes are downloaded into the same directory.
        urls = "\n".join([str(all_ranks), *((chosen.home / shard.name).url for shard in shards)])
        local = into / f"{chosen.step}-{hashlib.sha256(urls.encode()).hexdigest()[:16]}"
        try:
            is_here = local.is_dir() or _fetch(chosen.home, shards, local, all_ranks)
        except StoreError as error:
            if error.kind not in (DAMAGED, ABSENT):
                raise
            alternatives = (other for other in candidates() if other.home.url != chosen.home.url)
            raise _with_advice(error, chosen, next(alternatives, None)) from error
        if not is_here:
            # The next iteration finds the shards that replaced these.
            log.info("%s was replaced or removed during its download: retries", chosen.home.url)
        else:
            log.info("rank %d restores step %d from %s", rank, chosen.step, chosen.home.url)
            if all_ranks:
                return local
            (saved,) = local.iterdir()
            return saved
    log.debug("there is no complete checkpoint to restore")
    return None


def _with_advice(error: StoreError, damaged: _Checkpoint, other: _Checkpoint | None) -> StoreError:
    consequence = (
        "training then has no checkpoint to resume from"
        if other is None
        else f"training then resumes from step {other.step}, in {other.home.url}"
    )
    return StoreError(
        f"{error}. If you cannot restore the files of step {damaged.step}, remove the directory"
        f" {damaged.home.url}: {consequence}",
        error.kind,
    )


def _fetch(home: LakePath, shards: Sequence[CheckpointShard], local: Path, all_ranks: bool) -> bool:
    """Download shards; return False, and leave no file, if a shard was removed meanwhile."""
    local.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="draft-", dir=local.parent))
    problem: StoreError | None = None
    try:
        try:
            _download(home, shards, draft, all_ranks)
        except StoreError as error:
            problem = error
        if not {shard.record for shard in shards} <= set(home.names()):
            return False
        if problem is not None:
            raise problem
        try:
            draft.rename(local)
        except OSError:
            # Another process of this machine may have downloaded the same shards first.
            if not local.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return True


def _download(
    home: LakePath, shards: Sequence[CheckpointShard], target: Path, all_ranks: bool
) -> None:
    downloaded: dict[str, tuple[int, FileFacts]] = {}
    for shard in shards:
        facts, source = _facts(home / shard.record), home / shard.name
        if all_ranks:
            top, _, below = min(facts).partition("/")
            if below:
                source /= top
                facts = {name.partition("/")[2]: fact for name, fact in facts.items()}
            for name, fact in facts.items():
                rank, other = downloaded.setdefault(name, (shard.rank, fact))
                if other != fact:
                    raise ConfigError(
                        f"ranks {rank} and {shard.rank} saved different files named {name!r}, which"
                        " cannot be in one directory: use different names, or do not set all_ranks"
                    )
            facts = {
                name: fact for name, fact in facts.items() if downloaded[name][0] == shard.rank
            }
        download_files(facts, source, target)


def _facts(record: LakePath) -> dict[str, FileFacts]:
    content = record.read(MAX_LIST_BYTES)
    try:
        return read_facts(json.loads(content)["files"], DIGEST)
    except JSON_ERRORS as error:
        raise StoreError(f"{record.url} is damaged: {error!r}", DAMAGED) from error
