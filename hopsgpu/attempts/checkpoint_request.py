"""A request that all ranks of an attempt save a checkpoint at the same step.

It is pure: events and the clock's readings go in, orders to the agents come out, and
`attempts.attempt` sends them. `rank.checkpoint_agreement` describes why the ranks cannot differ.

The request asks twice for the last steps of all ranks, which also gives their speed, and proposes a
step ahead of all. If all ranks accept, it commits. If one has passed the step meanwhile, it aborts,
and tries a step that is farther ahead. A rank that has accepted may wait at the proposed step, so
the others have only some seconds to answer from the first acceptance on. Before that, no rank
waits, and a rank whose steps are slow has more time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)

_MOST_STEP = 2**63 - 1
# A shorter round trip was luck.
_LEAST_TRIP_SECONDS = 0.02
# The ranks get as far as this many round trips take them: one for the steps to come here, one for
# the proposal to arrive, and one more.
_TRIPS_AHEAD = 3
# Each try goes twice as far ahead as the one before, up to this many times.
_MOST_DOUBLINGS = 8


@dataclass(frozen=True)
class RequestBounds:
    """How long a request waits, in seconds.

    Attributes:
        patience: for an agreement.
        unasked: for all ranks to ask about a step at all.
        blocked: for the other ranks once one rank has accepted, because it may wait.
        lost: for an answer of the agents, after which they are asked again.
        pause: between two questions to the agents.
    """

    patience: float = 120.0
    unasked: float = 10.0
    blocked: float = 10.0
    lost: float = 5.0
    pause: float = 0.2


@dataclass(frozen=True)
class Order:
    """A message for the agents of all ranks.

    Attributes:
        kind: "steps", "propose", "commit" or "abort".
        fields: its fields.
    """

    kind: str
    fields: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Agreed:
    """The outcome that all ranks save at a step, or at the first one after it that they ask about.

    Attributes:
        step: the step.
    """

    step: int


@dataclass(frozen=True)
class GivenUp:
    """The outcome that the ranks do not agree on a step; no rank saves because of the request.

    Attributes:
        reason: why.
    """

    reason: str


@dataclass
class _Proposal:
    step: int
    accepted: set[int] = field(default_factory=set)
    accepted_at: float | None = None


class AgreedCheckpoint:
    """An agreed step, until no rank can have anything left to save there.

    Args:
        step: the step.
        ranks: the ranks that agreed.
    """

    def __init__(self, step: int, ranks: Collection[int]) -> None:
        self.step = step
        self._before = set(ranks)

    def passed(self, rank: int) -> bool:
        """Record that a rank has passed the step or ended; return whether it was the last one."""
        if rank not in self._before:
            return False
        self._before.discard(rank)
        return not self._before


class CheckpointRequest:
    """A request; call `tick` at once, and then from time to time.

    Args:
        ranks: the ranks that must agree.
        now: the clock's reading, in seconds.
        above: proposes only steps above this one: the last one of earlier requests of the attempt.
        bounds: how long it waits.

    Attributes:
        outcome: None until the request has ended; then no more orders follow.
        last: the last proposed step, or `above`.
    """

    def __init__(
        self,
        ranks: Collection[int],
        now: float,
        above: int = -1,
        bounds: RequestBounds = RequestBounds(),  # noqa: B008 - frozen
    ) -> None:
        self.outcome: Agreed | GivenUp | None = None
        self.last = above
        self._ranks = frozenset(ranks)
        self._bounds = bounds
        self._begun = now
        self._tries = 0
        self._proposal: _Proposal | None = None
        # The present question to the agents: its number, when it was asked, and the answers.
        self._round = 0
        self._asked_at: float | None = None
        self._steps: dict[int, int | None] = {}
        self._next_at = now
        # When the ranks were seen before, and the largest of their steps.
        self._before: tuple[float, int] | None = None

    def tick(self, now: float) -> list[Order]:
        """Return what to send as time has passed."""
        if self.outcome is not None:
            return []
        if now >= self._begun + self._bounds.patience:
            return self._give_up(f"the ranks did not agree within {self._bounds.patience:g} s")
        proposal = self._proposal
        if proposal is None:
            since = self._asked_at
            due = now >= (self._next_at if since is None else since + self._bounds.lost)
            return [self._ask(now)] if due else []
        accepted_at = proposal.accepted_at
        if accepted_at is not None and now >= accepted_at + self._bounds.blocked:
            missing = _listed(self._ranks - proposal.accepted)
            log.info("step %d: no answer of ranks %s", proposal.step, missing)
            return self._again(now)
        return []

    def steps(self, number: int, asked: Mapping[int, int | None], now: float) -> list[Order]:
        """Handle an agent's answer.

        Args:
            number: number of the question.
            asked: for each rank of the agent the last step that it has asked about, or None.
            now: the clock's reading.
        """
        if self.outcome is not None or self._asked_at is None or number != self._round:
            return []
        self._steps |= {rank: step for rank, step in asked.items() if rank in self._ranks}
        if self._steps.keys() < self._ranks:
            return []
        trip = max(now - self._asked_at, _LEAST_TRIP_SECONDS)
        self._asked_at, self._next_at = None, now + self._bounds.pause
        known = [step for step in self._steps.values() if step is not None]
        if len(known) < len(self._ranks):
            if now < self._begun + self._bounds.unasked:
                return []
            silent = _listed({rank for rank, step in self._steps.items() if step is None})
            return self._give_up(f"ranks {silent} have not called should_checkpoint")
        farthest, before = max(known), self._before
        self._before = now, farthest
        if before is None:
            return []
        rate = max(farthest - before[1], 0) / max(now - before[0], 1e-6)
        return self._propose(farthest, rate * trip)

    def answered(self, rank: int, step: int, now: float, *, accepted: bool) -> list[Order]:
        """Handle a rank's answer to a proposal; one to an earlier proposal does not count.

        Args:
            rank: the rank.
            step: the proposed step.
            now: the clock's reading.
            accepted: whether the rank accepts it; otherwise it has passed the step.
        """
        proposal = self._proposal
        if self.outcome is not None or proposal is None or step != proposal.step:
            return []
        if rank not in self._ranks:
            return []
        if not accepted:
            log.debug("step %d: rank %d has passed it", step, rank)
            return self._again(now)
        proposal.accepted.add(rank)
        if proposal.accepted_at is None:
            proposal.accepted_at = now
        if proposal.accepted < self._ranks:
            return []
        log.info("all ranks save a checkpoint at step %d", step)
        self.outcome = Agreed(step)
        return [Order("commit", {"step": step})]

    def ended(self, rank: int) -> list[Order]:
        """Handle the end of a rank, which ends the request."""
        if self.outcome is not None or rank not in self._ranks:
            return []
        return self._give_up(f"rank {rank} has ended")

    def _ask(self, now: float) -> Order:
        self._round += 1
        self._asked_at, self._steps = now, {}
        return Order("steps", {"number": self._round})

    def _propose(self, farthest: int, per_trip: float) -> list[Order]:
        margin = max(1, math.ceil(per_trip * _TRIPS_AHEAD * 2 ** min(self._tries, _MOST_DOUBLINGS)))
        step = max(farthest + margin, self.last + 1)
        if step > _MOST_STEP:
            return self._give_up(f"there is no step after {farthest}")
        log.debug("proposes step %d: the ranks have come to step %d", step, farthest)
        self._tries += 1
        self.last = step
        self._proposal = _Proposal(step)
        return [Order("propose", {"step": step})]

    def _abort(self) -> list[Order]:
        proposal, self._proposal = self._proposal, None
        return [] if proposal is None else [Order("abort", {"step": proposal.step})]

    def _again(self, now: float) -> list[Order]:
        """Abort the proposal, and begin anew."""
        self._before = None
        return [*self._abort(), self._ask(now)]

    def _give_up(self, reason: str) -> list[Order]:
        log.info("no checkpoint is agreed: %s", reason)
        self.outcome = GivenUp(reason)
        return self._abort()


def _listed(ranks: Collection[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
