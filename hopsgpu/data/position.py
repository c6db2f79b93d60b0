"""The position in an epoch: which rows the worlds of a gang were given.

The next world may have another number of ranks, and continues at a checkpoint. All ranks of a world
read in step: they have received the same number of batches. A rank therefore knows the position of
all ranks, and the rows follow from the plan of the shards.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from hopsgpu.errors import StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")

_VERSION = 1


@dataclass(frozen=True)
class Leg:
    """The batches of an epoch that one world trained, up to its last checkpoint.

    Attributes:
        ranks: number of ranks of the world.
        batches: number of batches that each rank received.
        size: number of rows of a batch.
        drop_remainder: whether an epoch's last batch was left out if it was smaller.
        seed: seed of the shuffle; None for the shard's order.
        readers: number of processes that read a rank's shard, in turn.
        numbered: whether the loop gave the epoch a number. If not, the next pass over the data is
            the same epoch again.
        ended: whether the rank that saved had received all batches of the epoch.
    """

    ranks: int
    epoch: int = 0
    batches: int = 0
    size: int = 1
    drop_remainder: bool = False
    seed: int | None = None
    readers: int = 1
    numbered: bool = True
    ended: bool = False


@dataclass(frozen=True)
class Position:
    """The position in each dataset of a launch, as in a checkpoint's record.

    Attributes:
        legs: by dataset, the leg of each world in the present epoch, in order.
        digests: by dataset, the digest of the order of its rows (`source.order_digest`). For other
            data, the legs mean other rows.
    """

    legs: Mapping[str, tuple[Leg, ...]]
    digests: Mapping[str, str] = field(default_factory=dict)

    def of_data(self, digests: Mapping[str, str]) -> tuple[Position, tuple[str, ...]]:
        """Return the position in data with these digests, and the names of changed datasets."""
        changed = tuple(
            name
            for name, digest in digests.items()
            if name in self.legs and self.digests.get(name) != digest
        )
        legs = {name: () if name in changed else legs for name, legs in self.legs.items()}
        return Position(legs, digests), changed

    def as_fields(self) -> dict[str, Any]:
        datasets = {name: [asdict(leg) for leg in legs] for name, legs in self.legs.items()}
        return {"version": _VERSION, "datasets": datasets, "digests": dict(self.digests)}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Position:
        """Return the position that `as_fields` described.

        Raises:
            StoreError: the fields are of another version of hopsgpu, or damaged.
        """
        try:
            if fields["version"] != _VERSION:
                raise ValueError(f"version {fields['version']}, not {_VERSION}")
            datasets = fields["datasets"].items()
            legs = {name: tuple(Leg(**leg) for leg in dataset) for name, dataset in datasets}
            return cls(legs, dict(fields["digests"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(
                f"the position in the data that a checkpoint has is damaged, or of another version"
                f" of hopsgpu ({error!r}): resume with the version that saved it"
            ) from error


def common_position(positions: Sequence[Position]) -> Position:
    """Return the position of a gang from those that its ranks saved, the lowest rank's first.

    Ranks that read in step have received equally many batches. Only a rank with fewer rows may be
    at the end of the epoch already. If the ranks were not in step, a warning is logged, and the
    least position counts: later rows are trained again, and no row is left out.
    """
    first, *rest = positions
    return Position(
        {
            name: _common_legs(name, [legs, *(position.legs.get(name, ()) for position in rest)])
            for name, legs in first.legs.items()
        },
        first.digests,
    )


def _common_legs(name: str, legs_of_ranks: Sequence[tuple[Leg, ...]]) -> tuple[Leg, ...]:
    last = [legs[-1] for legs in legs_of_ranks if legs]
    if not last:
        return ()
    unfinished = [leg for leg in last if not leg.ended]
    furthest = max(last, key=lambda leg: (leg.epoch, leg.batches))
    if are_in_step(last):
        is_complete = len(last) == len(legs_of_ranks)
        return legs_of_ranks[last.index(furthest) if is_complete else 0]
    least = min(unfinished or last, key=lambda leg: (leg.epoch, leg.batches))
    log.warning(
        "the ranks that saved had not read %r in step (epochs and batches: %s): continues after"
        " batch %d of epoch %d, the least",
        name,
        sorted({(leg.epoch, leg.batches) for leg in last}),
        least.batches,
        least.epoch,
    )
    return next(legs for legs in legs_of_ranks if legs and legs[-1] == least)


def are_in_step(legs: Collection[Leg]) -> bool:
    """Return whether the ranks of a world have read in step, according to their last legs."""
    unfinished = {(leg.epoch, leg.batches) for leg in legs if not leg.ended}
    furthest = max((leg.epoch, leg.batches) for leg in legs)
    kinds = {replace(leg, batches=0, ended=False) for leg in legs}
    return len(kinds) == 1 and (not unfinished or unfinished == {furthest})


@dataclass
class Pass:
    """A pass over a rank's shard, with the number of batches that the rank has received.

    Attributes:
        leg: description of the pass; its `batches` and `ended` are not used.
        total: number of batches of the pass.
        is_rest: whether the pass reads the rest of an epoch that earlier worlds have started.
        received: number of batches that the user's code has received.
        is_known: whether `received` is known.
        fallback: number of the epoch with which to continue if `received` is unknown; None for the
            pass's own.
        is_open: whether a loop over the pass is known to run.
    """

    leg: Leg
    total: int
    is_rest: bool = False
    received: int = 0
    is_known: bool = True
    fallback: int | None = None
    is_open: bool = False

    @property
    def is_interrupted(self) -> bool:
        """Return whether a loop over the pass runs, and has received some, but not all batches."""
        return self.is_open and 0 < self.received < self.total

    def progress(self) -> Leg:
        if not self.is_known:
            epoch = self.leg.epoch if self.fallback is None else self.fallback
            return replace(self.leg, epoch=epoch, batches=0)
        return replace(self.leg, batches=self.received, ended=self.received >= self.total)


class Tracker:
    """Tracks the passes over one rank's dataset; the last pass that yielded a batch counts.

    Passes without a number count only if there is no pass with a number, which trains.

    Args:
        name: name of the dataset in messages.
        legs: the legs of earlier worlds in the present epoch.
        ranks: number of ranks of the gang.
    """

    def __init__(self, name: str, legs: tuple[Leg, ...], epoch: int, ranks: int) -> None:
        self.ranks = ranks
        self._name = name
        self._legs = legs
        self._epoch = epoch
        self._active: dict[bool, Pass] = {}
        self._completed: int | None = None
        self._has_warned = False

    def count_batch(self, pass_: Pass) -> None:
        """Count a batch just before the user's code receives it."""
        if self._active.get(pass_.leg.numbered) is not pass_:
            self._switch(pass_)
        pass_.received += 1

    def count_batches(self, batches: Generator[T, None, None], passes: deque[Pass]) -> Iterator[T]:
        """Yield the batches of consecutive passes and count them; close the generator at the end.

        Args:
            passes: another thread adds each pass before its first batch.
        """
        pass_: Pass | None = None
        remaining, active = 0, self._active
        try:
            with contextlib.closing(batches):
                for batch in batches:
                    if pass_ is None or not remaining:
                        pass_ = passes.popleft()
                        pass_.is_open, numbered = True, pass_.leg.numbered
                        remaining = pass_.total - pass_.received
                    remaining -= 1
                    # Not `count_batch`: a call takes as long as all other work on a batch of views.
                    if active.get(numbered) is not pass_:
                        self._switch(pass_)
                    pass_.received += 1
                    yield batch
                    del batch  # do not keep the batch after the reader has used it
        finally:
            if pass_ is not None:
                pass_.is_open = False

    def begin(self, pass_: Pass) -> None:
        """Make a pass the one that counts."""
        self._active[pass_.leg.numbered] = pass_

    def _switch(self, pass_: Pass) -> None:
        other = self._active.get(pass_.leg.numbered)
        if other is not None and (pass_.received or other.is_interrupted):
            # Two loops alternate or are nested, as in an evaluation within an epoch: which loop
            # trains is unknown.
            pass_.is_known = other.is_known = False
            pass_.fallback = other.fallback = min(pass_.leg.epoch, other.leg.epoch)
            pass_.is_rest = other.is_rest = pass_.is_rest or other.is_rest
        self.begin(pass_)

    def complete(self, epoch: int) -> None:
        self._completed = epoch
        self.begin(Pass(Leg(self.ranks, epoch + 1), 1))

    def legs(self) -> tuple[Leg, ...]:
        pass_ = self._active.get(True) or self._active.get(False)
        if pass_ is None:
            return self._legs or (Leg(self.ranks, self._epoch),)
        if not pass_.is_known and self._completed is not None:
            # The user's code reports the position of a loop within a graph itself.
            return (Leg(self.ranks, self._completed + 1),)
        if not pass_.is_known and not self._has_warned:
            self._has_warned = True
            log.warning(
                "a checkpoint does not know how many batches of %r were trained, since several"
                " loops, or a graph of TensorFlow, read it: if another gang continues from it, it"
                " begins at the start of the epoch. With Keras, call completed(epoch) after each"
                " epoch",
                self._name,
            )
        leg = pass_.progress()
        if not pass_.is_rest or leg.epoch != self._epoch:
            return (leg,)
        # A world without a batch leaves the rest of the epoch unchanged.
        return (*self._legs, leg) if leg.batches else self._legs
