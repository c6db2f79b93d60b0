"""How the ranks of a gang agree on a step at which all of them save a checkpoint.

The driver proposes a step that is ahead of all ranks (`attempts.checkpoint_request`). A rank sees
the proposal when it next asks about a step, and accepts unless it has asked about the proposed or a
later step before. Once it has accepted, it waits for the driver's decision when it asks about the
proposed or a later step. The driver commits only if all ranks have accepted, and otherwise aborts.
All ranks thus get the same answer at the same step, even if messages are late. The wait has no
timeout: the driver decides within seconds, and a rank whose agent has lost the driver is killed.

A rank and its agent share a file of 64-bit words in the rank's directory. Each word has one writer
and holds a step + 1, or 0. A rank writes an acceptance before the step that it asks about. For a
rank that reaches the proposed step without accepting, the agent therefore rejects the proposal.
Steps of successive proposals increase, so a step identifies its proposal. A rank that asks about a
step after an agreed one has handed over its checkpoint of the agreed step.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from hopsgpu.rank.shared_words import create_file, map_file

log = logging.getLogger(__name__)

_FILE = "checkpoint-agreement"
# Written by the rank.
_ASKED = 0
_ACCEPTED = 1
# The last step that was answered True.
_DUE = 2
# Written by the agent.
_PROPOSED = 3
_COMMITTED = 4
_ABORTED = 5
_WORDS = 6
_POLL_SECONDS = 0.001


class ProposalWords:
    """The agent's side of the file that it shares with a rank.

    Raises:
        OSError: the file cannot be created, for example because the disk is full.
    """

    def __init__(self, directory: Path) -> None:
        self._words = map_file(create_file(directory / _FILE, _WORDS), _WORDS).cast("Q")

    @property
    def last_asked_step(self) -> int | None:
        return _step(self._words[_ASKED])

    def answer(self, step: int) -> bool | None:
        """Return whether the rank accepts a proposal; None if it has not decided."""
        # Read both words, then compare: the rank writes an acceptance before the step.
        asked, accepted = self._words[_ASKED], self._words[_ACCEPTED]
        if accepted == step + 1:
            return True
        return False if asked > step else None

    def has_passed(self, step: int) -> bool:
        """Return whether the rank has asked about a step after the agreed one."""
        due = self._words[_DUE]
        return due > step and self._words[_ASKED] > due

    def propose(self, step: int) -> None:
        """Propose a step, which must be larger than those of earlier proposals."""
        self._words[_PROPOSED] = step + 1

    def commit(self, step: int) -> None:
        self._words[_COMMITTED] = step + 1

    def abort(self, step: int) -> None:
        self._words[_ABORTED] = step + 1


class RankAgreement:
    """The rank's side of the shared file. Not thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._words = map_file(directory / _FILE, _WORDS).cast("Q")
        self._asked = -1
        # The word of the proposal that was handled last.
        self._seen = 0
        # The accepted step without a known decision.
        self._accepted: int | None = None
        # Agreed steps that this rank has not reached.
        self._agreed: list[int] = []

    @property
    def last_due(self) -> int | None:
        """The last step for which `is_agreed` returned True, or None."""
        return _step(self._words[_DUE])

    def is_agreed(self, step: int) -> bool:
        """Return whether this is the first step asked about at or after an agreed step.

        The call waits for the driver's decision if this rank has accepted a proposal of this step,
        or of one since the last call. A step that is not larger than all before gives False.

        Args:
            step: 0 ≤ step < 2**63.
        """
        if step <= self._asked:
            return False
        words = self._words
        proposed = words[_PROPOSED]
        if proposed == self._seen and self._accepted is None and not self._agreed:
            words[_ASKED] = step + 1
            self._asked = step
            return False
        if proposed != self._seen:
            self._consider(proposed)
        words[_ASKED] = step + 1
        self._asked = step
        return self._is_due(step)

    def _consider(self, proposed: int) -> None:
        """Accept a new proposal unless this rank has passed its step."""
        if self._accepted is not None:
            # The driver has decided on this step, because it made another proposal.
            was_committed = self._words[_COMMITTED] == self._accepted + 1
            self._record_decision(self._accepted, is_committed=was_committed)
        self._seen = proposed
        if (step := proposed - 1) > self._asked:
            self._accepted = step
            self._words[_ACCEPTED] = proposed
            log.debug("accepts to save a checkpoint at step %d", step)

    def _is_due(self, step: int) -> bool:
        while self._accepted is not None:
            accepted = self._accepted + 1
            if self._words[_COMMITTED] == accepted:
                self._record_decision(self._accepted, is_committed=True)
            elif self._words[_ABORTED] == accepted:
                self._record_decision(self._accepted, is_committed=False)
            elif self._accepted > step:
                break
            else:
                # The decision comes from another process, which sends no signal.
                time.sleep(_POLL_SECONDS)
        due = [agreed for agreed in self._agreed if agreed <= step]
        self._agreed = [agreed for agreed in self._agreed if agreed > step]
        if due:
            self._words[_DUE] = step + 1
            log.info("all ranks save a checkpoint at step %d", step)
        return bool(due)

    def _record_decision(self, step: int, *, is_committed: bool) -> None:
        log.debug("the checkpoint at step %d is %s", step, "agreed" if is_committed else "given up")
        self._accepted = None
        if is_committed:
            self._agreed.append(step)


def _step(word: int) -> int | None:
    return word - 1 if word else None
