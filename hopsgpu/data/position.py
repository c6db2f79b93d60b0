"""The position in an epoch: which rows a gang was handed, in the worlds that trained the epoch.

A world is a gang of a fixed number of ranks. The next one may have another number of ranks, and
continues at a checkpoint. All ranks of a world read in step: after the same number of batches. A
rank therefore knows the position of all of them, and the rows follow from the plan of the shards.
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
    """What one world trained of an epoch, up to its last checkpoint.

    Attributes:
        ranks: number of ranks of the world.
        epoch: number of the epoch.
        batches: number of batches that each rank was handed.
        size: number of rows of a batch.
        drop_remainder: whether an epoch's last batch was left out if it was smaller.
        seed: seed of the shuffle; None for the shard's order.
        readers: number of processes that read a rank's shard, in turn.
        numbered: whether the loop gave the epoch a number. Without one, the next pass over the
            data is the same epoch again.
        ended: whether the rank that saved was handed all batches of the epoch.
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
    """The position in each dataset of a launch, as a checkpoint's record has it.

    Attributes:
        legs: by the dataset's name, what each world trained of the present epoch, in order.
        digests: by the dataset's name, the digest of what determines the order of its rows
            (`source.order_digest`). With other data, the legs mean other rows.
    """

    legs: Mapping[str, tuple[Leg, ...]]
    digests: Mapping[str, str] = field(default_factory=dict)

    def of_data(self, digests: Mapping[str, str]) -> tuple[Position, tuple[str, ...]]:
        """Return the position in these datasets, and the names of those that are other data.

        Args:
            digests: digests of the present datasets, by name.
        """
        others = tuple(
            name
            for name, digest in digests.items()
            if name in self.legs and self.digests.get(name) != digest
        )
        legs = {name: () if name in others else legs for name, legs in self.legs.items()}
        return Position(legs, digests), others

    def as_fields(self) -> dict[str, Any]:
        """Return the position as JSON has it."""
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
            found = {name: tuple(Leg(**leg) for leg in legs) for name, legs in datasets}
            return cls(found, dict(fields["digests"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(
                f"the position in the data that a checkpoint has is damaged, or of another version"
                f" of hopsgpu ({error!r}): resume with the version that saved it"
            ) from error


def common_position(positions: Sequence[Position]) -> Position:
    """Return the position of a gang from those that its ranks saved at the same step.

    Ranks that read in step were handed equally many batches, except that a rank with fewer rows may
    be at the end of the epoch already. If they were not in step, the least position counts: rows
    after it are trained again, and none is left out. A warning is logged.

    Args:
        positions: at least one position, the lowest rank's first.
    """
    first, *others = positions
    return Position(
        {
            name: _agreed(name, [legs, *(other.legs.get(name, ()) for other in others)])
            for name, legs in first.legs.items()
        },
        first.digests,
    )


def _agreed(name: str, found: Sequence[tuple[Leg, ...]]) -> tuple[Leg, ...]:
    last = [legs[-1] for legs in found if legs]
    if not last:
        return ()
    open_ones = [leg for leg in last if not leg.ended]
    furthest = max(last, key=lambda leg: (leg.epoch, leg.batches))
    if in_step(last):
        return found[last.index(furthest)] if len(last) == len(found) else found[0]
    least = min(open_ones or last, key=lambda leg: (leg.epoch, leg.batches))
    log.warning(
        "the ranks that saved had not read %r in step (epochs and batches: %s): continues after"
        " batch %d of epoch %d, the least",
        name,
        sorted({(leg.epoch, leg.batches) for leg in last}),
        least.batches,
        least.epoch,
    )
    return next(legs for legs in found if legs and legs[-1] == least)


def in_step(legs: Collection[Leg]) -> bool:
    """Return whether ranks of one world have read in step, as far as their last legs show."""
    at = {(leg.epoch, leg.batches) for leg in legs if not leg.ended}
    furthest = max((leg.epoch, leg.batches) for leg in legs)
    like = {replace(leg, batches=0, ended=False) for leg in legs}
    return len(like) == 1 and (not at or at == {furthest})


@dataclass
class Pass:
    """One pass over a rank's shard, and how many batches of it the rank was handed.

    Attributes:
        leg: description of the pass; its `batches` and `ended` do not count.
        total: number of batches of the pass.
        is_rest: whether the pass reads the rest of an epoch that earlier worlds have begun.
        handed: number of batches that the user's code has received.
        is_known: whether `handed` is known.
        fallback: number of the epoch with which to begin if it is not; None for the pass's own.
        is_open: whether a loop over it is under way, as far as is known.
    """

    leg: Leg
    total: int
    is_rest: bool = False
    handed: int = 0
    is_known: bool = True
    fallback: int | None = None
    is_open: bool = False

    @property
    def is_interrupted(self) -> bool:
        """Return whether a loop over it is under way, and more batches are to come."""
        return self.is_open and 0 < self.handed < self.total

    def progress(self) -> Leg:
        """Return the description of the pass with the position in it."""
        if not self.is_known:
            epoch = self.leg.epoch if self.fallback is None else self.fallback
            return replace(self.leg, epoch=epoch, batches=0)
        return replace(self.leg, batches=self.handed, ended=self.handed >= self.total)


class Tracker:
    """The passes over one rank's dataset, of which the last one that yielded a batch counts.

    Passes that have numbers are those that train. Others count only if there are none.

    Args:
        name: name of the dataset in messages.
        legs: what earlier worlds trained of the present epoch.
        epoch: number of the present epoch.
        ranks: number of ranks of the gang.
    """

    def __init__(self, name: str, legs: tuple[Leg, ...], epoch: int, ranks: int) -> None:
        self.ranks = ranks
        self._name = name
        self._legs = legs
        self._epoch = epoch
        self._active: dict[bool, Pass] = {}
        self._completed: int | None = None
        self._warned = False

    def handed(self, one: Pass) -> None:
        """Count a batch of a pass, just before the user's code receives it."""
        if self._active.get(one.leg.numbered) is not one:
            self._switch(one)
        one.handed += 1

    def counted(self, batches: Generator[T, None, None], begun: deque[Pass]) -> Iterator[T]:
        """Yield the batches of some passes, counted as `handed` does; close them at the end.

        Args:
            batches: the batches of one pass after the other.
            begun: the passes, each of which is added before its first batch comes.
        """
        one: Pass | None = None
        left, active = 0, self._active
        try:
            with contextlib.closing(batches):
                for batch in batches:
                    if one is None or not left:
                        one = begun.popleft()
                        one.is_open, numbered = True, one.leg.numbered
                        left = one.total - one.handed
                    left -= 1
                    # Not with `handed`: a call takes as long as the rest that a batch of views
                    # needs.
                    if active.get(numbered) is not one:
                        self._switch(one)
                    one.handed += 1
                    yield batch
                    del batch  # the reader has it now, and may be done with it
        finally:
            if one is not None:
                one.is_open = False

    def begin(self, one: Pass) -> None:
        """Make a pass the one that counts."""
        self._active[one.leg.numbered] = one

    def _switch(self, one: Pass) -> None:
        other = self._active.get(one.leg.numbered)
        if other is not None and (one.handed or other.is_interrupted):
            # Two loops take turns, or one begins within the other, as an evaluation within an
            # epoch does: nobody knows which of them trains.
            one.is_known = other.is_known = False
            one.fallback = other.fallback = min(one.leg.epoch, other.leg.epoch)
            one.is_rest = other.is_rest = one.is_rest or other.is_rest
        self.begin(one)

    def complete(self, epoch: int) -> None:
        """Record that an epoch is trained."""
        self._completed = epoch
        self.begin(Pass(Leg(self.ranks, epoch + 1), 1))

    def legs(self) -> tuple[Leg, ...]:
        """Return what all worlds up to now trained of the present epoch."""
        one = self._active.get(True) or self._active.get(False)
        if one is None:
            return self._legs or (Leg(self.ranks, self._epoch),)
        if not one.is_known and self._completed is not None:
            # The loop that reads out of sight says itself how far it is.
            return (Leg(self.ranks, self._completed + 1),)
        if not one.is_known and not self._warned:
            self._warned = True
            log.warning(
                "a checkpoint does not know how many batches of %r were trained, since several"
                " loops, or a graph of TensorFlow, read it: if another gang continues from it, it"
                " begins at the start of the epoch. With Keras, call completed(epoch) after each"
                " epoch",
                self._name,
            )
        leg = one.progress()
        if not one.is_rest or leg.epoch != self._epoch:
            return (leg,)
        # Without a batch of its own, this world changes nothing about the rest.
        return (*self._legs, leg) if leg.batches else self._legs
