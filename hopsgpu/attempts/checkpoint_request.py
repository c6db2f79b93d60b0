"""A request that all ranks of an attempt save a checkpoint at the same step.

The module is pure: it takes events and clock readings, and returns messages, which
`attempts.attempt` sends. `rank.checkpoint_agreement` describes why the ranks cannot differ.

The request asks twice for the last steps of all ranks, which also gives their speed, and proposes a
step ahead of all ranks. If all ranks accept, the request commits. If a rank has passed the step,
the request aborts and proposes a step that is farther ahead. A rank that has accepted may wait at
the proposed step, so the other ranks have only some seconds after the first acceptance. Before
that, no rank waits, and slow ranks have more time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)

_MAX_STEP = 2**63 - 1
# Measured round trips may be shorter by chance.
_MIN_TRIP_SECONDS = 0.02
# Round trips during which ranks continue: the answer with their steps, the proposal, and a reserve.
_TRIPS_AHEAD = 3
# Each retry doubles the distance, at most this many times.
_MAX_DOUBLINGS = 8


@dataclass(frozen=True)
class RequestBounds:
    """How long a request waits, in seconds.

    Attributes:
        unasked: for all ranks to ask about a step at all.
        blocked: for the other ranks once one rank has accepted, because it may wait.
        lost: for an answer of the agents, after which they are asked again.
    """

    agreement: float = 120.0
    unasked: float = 10.0
    blocked: float = 10.0
    lost: float = 5.0
    pause: float = 0.2


@dataclass(frozen=True)
class AgentMessage:
    """A message for the agents of all ranks.

    Attributes:
        kind: "steps", "propose", "commit" or "abort".
    """

    kind: str
    fields: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Agreed:
    """All ranks save at this step, or at the next step that they ask about."""

    step: int


@dataclass(frozen=True)
class NotAgreed:
    """The ranks do not agree on a step; no rank saves because of the request."""

    reason: str


@dataclass
class _Proposal:
    step: int
    accepted: set[int] = field(default_factory=set)
    accepted_at: float | None = None


class AgreedCheckpoint:
    """An agreed step, until all ranks have passed it."""

    def __init__(self, step: int, ranks: Collection[int]) -> None:
        self.step = step
        self._pending = set(ranks)

    def record_pass(self, rank: int) -> bool:
        """Record that a rank has passed the step or ended; return whether it was the last rank."""
        if rank not in self._pending:
            return False
        self._pending.discard(rank)
        return not self._pending


class CheckpointRequest:
    """A request; call `tick` at once, and then from time to time.

    Args:
        above: the last step of earlier requests of the attempt; only later steps are proposed.

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
        self.outcome: Agreed | NotAgreed | None = None
        self.last = above
        self._ranks = frozenset(ranks)
        self._bounds = bounds
        self._begun = now
        self._tries = 0
        self._proposal: _Proposal | None = None
        # The current question to the agents: its number, when it was asked, and the answers.
        self._round = 0
        self._asked_at: float | None = None
        self._steps: dict[int, int | None] = {}
        self._next_at = now
        # Time of the previous answers, and their largest step.
        self._previous: tuple[float, int] | None = None

    def tick(self, now: float) -> list[AgentMessage]:
        if self.outcome is not None:
            return []
        if now >= self._begun + self._bounds.agreement:
            return self._give_up(f"the ranks did not agree within {self._bounds.agreement:g} s")
        proposal = self._proposal
        if proposal is None:
            since = self._asked_at
            is_due = now >= (self._next_at if since is None else since + self._bounds.lost)
            return [self._ask(now)] if is_due else []
        accepted_at = proposal.accepted_at
        if accepted_at is not None and now >= accepted_at + self._bounds.blocked:
            missing = _join(self._ranks - proposal.accepted)
            log.info("step %d: no answer of ranks %s", proposal.step, missing)
            return self._retry(now)
        return []

    def handle_steps(
        self, number: int, asked: Mapping[int, int | None], now: float
    ) -> list[AgentMessage]:
        """Handle an agent's answer.

        Args:
            asked: for each rank of the agent the last step that it has asked about, or None.
        """
        if self.outcome is not None or self._asked_at is None or number != self._round:
            return []
        self._steps |= {rank: step for rank, step in asked.items() if rank in self._ranks}
        if self._steps.keys() < self._ranks:
            return []
        trip = max(now - self._asked_at, _MIN_TRIP_SECONDS)
        self._asked_at, self._next_at = None, now + self._bounds.pause
        asked_steps = [step for step in self._steps.values() if step is not None]
        if len(asked_steps) < len(self._ranks):
            if now < self._begun + self._bounds.unasked:
                return []
            silent = _join({rank for rank, step in self._steps.items() if step is None})
            return self._give_up(f"ranks {silent} have not called should_checkpoint")
        farthest, before = max(asked_steps), self._previous
        self._previous = now, farthest
        if before is None:
            return []
        rate = max(farthest - before[1], 0) / max(now - before[0], 1e-6)
        return self._propose(farthest, rate * trip)

    def handle_answer(
        self, rank: int, step: int, now: float, *, is_accepted: bool
    ) -> list[AgentMessage]:
        """Handle a rank's answer; answers to earlier proposals do not count.

        Args:
            is_accepted: whether the rank accepts the step; otherwise it has passed the step.
        """
        proposal = self._proposal
        if self.outcome is not None or proposal is None or step != proposal.step:
            return []
        if rank not in self._ranks:
            return []
        if not is_accepted:
            log.debug("step %d: rank %d has passed it", step, rank)
            return self._retry(now)
        proposal.accepted.add(rank)
        if proposal.accepted_at is None:
            proposal.accepted_at = now
        if proposal.accepted < self._ranks:
            return []
        log.info("all ranks save a checkpoint at step %d", step)
        self.outcome = Agreed(step)
        return [AgentMessage("commit", {"step": step})]

    def handle_end(self, rank: int) -> list[AgentMessage]:
        """Handle the end of a rank, which ends the request."""
        if self.outcome is not None or rank not in self._ranks:
            return []
        return self._give_up(f"rank {rank} has ended")

    def _ask(self, now: float) -> AgentMessage:
        self._round += 1
        self._asked_at, self._steps = now, {}
        return AgentMessage("steps", {"number": self._round})

    def _propose(self, farthest: int, per_trip: float) -> list[AgentMessage]:
        margin = max(1, math.ceil(per_trip * _TRIPS_AHEAD * 2 ** min(self._tries, _MAX_DOUBLINGS)))
        step = max(farthest + margin, self.last + 1)
        if step > _MAX_STEP:
            return self._give_up(f"there is no step after {farthest}")
        log.debug("proposes step %d: the ranks have come to step %d", step, farthest)
        self._tries += 1
        self.last = step
        self._proposal = _Proposal(step)
        return [AgentMessage("propose", {"step": step})]

    def _abort(self) -> list[AgentMessage]:
        proposal, self._proposal = self._proposal, None
        return [] if proposal is None else [AgentMessage("abort", {"step": proposal.step})]

    def _retry(self, now: float) -> list[AgentMessage]:
        """Abort the proposal, and ask again."""
        self._previous = None
        return [*self._abort(), self._ask(now)]

    def _give_up(self, reason: str) -> list[AgentMessage]:
        log.info("no checkpoint is agreed: %s", reason)
        self.outcome = NotAgreed(reason)
        return self._abort()


def _join(ranks: Collection[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
