"""Checkpoints from the lake: which one to restore, and its files, complete and verified."""

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
from hopsgpu.artifacts.checkpoints import Checkpoints, Part, complete, savers_of, score
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.digests import DIGEST, FileFacts, read_facts
from hopsgpu.storage.error_messages import ABSENT, DAMAGED, ODD_JSON
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.transfer import download_files

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Found:
    """A complete checkpoint: the parts of a step, one of each rank that saves."""

    checkpoints: Checkpoints
    step: int
    parts: frozenset[Part]

    @property
    def home(self) -> LakePath:
        return self.checkpoints.root / str(self.step)


def latest(
    places: Sequence[Checkpoints],
    into: Path,
    *,
    all_ranks: bool = False,
    world_size: int | None = None,
    begun: bool = True,
) -> Path | None:
    """Download the latest checkpoint of the first place that has one; return None if none has.

    A place's latest checkpoint is its highest step for which all savers of the attempt that saved
    it have a part (`checkpoint_savers`), however many ranks there are now. If a step was saved
    several times, the newest parts that all of them saved together count. So what only some ranks
    had saved when their attempt failed does not count, and all ranks get the same step.

    In a run that resumes another, what this attempt has saved counts only once the ranks that saved
    at the end of the other run, carried over to this world, have saved it too: some ranks may save
    before others have asked for the checkpoint from which they begin. For the same reason, nothing
    that this attempt has saved or announced counts for a rank that has not saved in it itself.

    Args:
        places: checkpoints to search, the run's own first.
        into: local directory that keeps what was downloaded.
        all_ranks: as for `best`.
        world_size: number of ranks in the attempt; None for as many as the earlier run had last.
        begun: whether this rank has saved in this attempt.

    Returns:
        As `best`.

    Raises:
        ConfigError, StoreError: as `best`.
    """

    def candidates() -> Iterator[_Found]:
        for place, *before in (places[number:] for number in range(len(places))):
            here = {
                rank
                for other in before
                for rank in savers_of({}, other.announced()).carried_over(world_size)
            }
            parts = without_torn(place.parts(), place.attempt, here)
            announced = place.announced()
            if place is places[0] and not begun:
                parts = parts_before_attempt(parts, place.attempt)
                announced = frozenset(one for one in announced if one.attempt != place.attempt)
            for step, there in sorted(complete(parts, announced).items(), reverse=True):
                yield _Found(place, step, there)

    return _downloaded(candidates, into, all_ranks)


def best(places: Sequence[Checkpoints], into: Path, *, all_ranks: bool = False) -> Path | None:
    """Download the checkpoint with the best metric of all places; return None if none has a metric.

    Of equal metrics, the newest checkpoint is the best.

    Args:
        places: checkpoints to search, the run's own first.
        into: local directory that keeps what was downloaded.
        all_ranks: whether to return what all ranks saved, in one directory.

    Returns:
        The file or directory as this rank saved it, or as the lowest rank did if this one has saved
        none. With `all_ranks`, a directory with the files that the ranks saved, and with the
        contents of the directories that they saved.

    Raises:
        ConfigError: with `all_ranks`, two ranks saved different files of the same name.
        StoreError: the lake refused the operation, or a file is damaged.
    """

    def candidates() -> Iterator[_Found]:
        found = [
            (score(parts), _Found(place, step, parts))
            for place in reversed(places)
            for step, parts in sorted(complete(place.parts(), place.announced()).items())
        ]
        scored = [
            (score.metric, checkpoint) for score, checkpoint in found if score.metric is not None
        ]
        sign = newest_direction([(score.metric, score.best) for score, _ in found])
        # The position breaks ties: of equal metrics, the newest is the best.
        order = sorted(enumerate(scored), key=lambda each: (sign * each[1][0], each[0]))
        return iter([checkpoint for _, (_, checkpoint) in reversed(order)])

    return _downloaded(candidates, into, all_ranks)


def without_torn(
    parts: Mapping[int, Collection[Part]], attempt: int, ranks: Collection[int]
) -> Mapping[int, frozenset[Part]]:
    """Return the parts by step, of one attempt only those that some ranks saved together.

    Args:
        parts: parts by step.
        attempt: number of the attempt; parts of other attempts stay.
        ranks: ranks that must all have saved a part of the same attempt and number.
    """

    def together(part: Part, there: Collection[Part]) -> bool:
        if part.attempt != attempt:
            return True
        like = (attempt, part.number)
        savers = {other.rank for other in there if (other.attempt, other.number) == like}
        return savers.issuperset(ranks)

    return {
        step: frozenset(part for part in there if together(part, there))
        for step, there in parts.items()
    }


def parts_before_attempt(
    parts: Mapping[int, Collection[Part]], attempt: int
) -> Mapping[int, frozenset[Part]]:
    """Return the parts by step, without those saved in an attempt."""
    return {
        step: frozenset(part for part in there if part.attempt != attempt)
        for step, there in parts.items()
    }


def _downloaded(
    candidates: Callable[[], Iterator[_Found]], into: Path, all_ranks: bool
) -> Path | None:
    while (found := next(candidates(), None)) is not None:
        rank = found.checkpoints.rank
        own = next((part for part in found.parts if part.rank == rank), min(found.parts))
        parts = sorted(found.parts) if all_ranks else [own]
        # Parts of the run that this one resumes are downloaded into the same directory.
        urls = "\n".join([str(all_ranks), *((found.home / part.name).url for part in parts)])
        local = into / f"{found.step}-{hashlib.sha256(urls.encode()).hexdigest()[:16]}"
        # Parts that were replaced meanwhile are gone, but the loop finds those that replaced them.
        try:
            there = local.is_dir() or _fetched(found.home, parts, local, all_ranks)
        except StoreError as error:
            if error.kind not in (DAMAGED, ABSENT):
                raise
            others = (other for other in candidates() if other.home.url != found.home.url)
            raise _with_advice(error, found, next(others, None)) from error
        if not there:
            log.info("%s was replaced or removed during its download: looks again", found.home.url)
        else:
            log.info("rank %d restores step %d from %s", rank, found.step, found.home.url)
            if all_ranks:
                return local
            (saved,) = local.iterdir()
            return saved
    log.debug("there is no complete checkpoint to restore")
    return None


def _with_advice(error: StoreError, found: _Found, other: _Found | None) -> StoreError:
    """Return the error about a damaged checkpoint, with advice.

    The advice is how to resume without the checkpoint, and from which step that is.
    """
    consequence = (
        "training then has no checkpoint to resume from"
        if other is None
        else f"training then resumes from step {other.step}, in {other.home.url}"
    )
    return StoreError(
        f"{error}. If you cannot restore the files of step {found.step}, remove the directory"
        f" {found.home.url}: {consequence}",
        error.kind,
    )


def _fetched(home: LakePath, parts: Sequence[Part], local: Path, all_ranks: bool) -> bool:
    """Download parts; return False, and leave nothing, if one was removed meanwhile."""
    local.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="draft-", dir=local.parent))
    problem: StoreError | None = None
    try:
        try:
            _download(home, parts, draft, all_ranks)
        except StoreError as error:
            problem = error
        if not {part.record for part in parts} <= set(home.names()):
            return False
        if problem is not None:
            raise problem
        try:
            draft.rename(local)
        except OSError:
            # Another process of this machine was faster.
            if not local.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return True


def _download(home: LakePath, parts: Sequence[Part], target: Path, all_ranks: bool) -> None:
    had: dict[str, tuple[int, FileFacts]] = {}
    for part in parts:
        facts, source = _facts(home / part.record), home / part.name
        if all_ranks:
            top, _, below = min(facts).partition("/")
            if below:
                source /= top
                facts = {name.partition("/")[2]: fact for name, fact in facts.items()}
            for name, fact in facts.items():
                rank, other = had.setdefault(name, (part.rank, fact))
                if other != fact:
                    raise ConfigError(
                        f"ranks {rank} and {part.rank} saved different files named {name!r}, which"
                        " cannot be in one directory: use different names, or do not set all_ranks"
                    )
            facts = {name: fact for name, fact in facts.items() if had[name][0] == part.rank}
        download_files(facts, source, target)


def _facts(record: LakePath) -> dict[str, FileFacts]:
    content = record.read()
    try:
        return read_facts(json.loads(content)["files"], DIGEST)
    except ODD_JSON as error:
        raise StoreError(f"{record.url} is damaged: {error!r}", DAMAGED) from error
