"""What a rank and its agent write and read in the file that they share."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import hopsgpu
from hopsgpu.attempts.checkpoint_request import AgentMessage, Agreed, CheckpointRequest
from hopsgpu.errors import ConfigError
from hopsgpu.rank.checkpoint_agreement import ProposalWords, RankAgreement
from hopsgpu.rank.context import VARIABLE, Context
from tests.bounds import HANG_SECONDS
from tests.conftest import until


@pytest.fixture
def agent(tmp_path: Path) -> ProposalWords:
    return ProposalWords(tmp_path)


@pytest.fixture
def rank(agent: ProposalWords, tmp_path: Path) -> RankAgreement:
    return RankAgreement(tmp_path)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def test_the_agent_sees_the_last_step(agent: ProposalWords, rank: RankAgreement) -> None:
    assert agent.last_asked_step is None
    for step in (0, 5, 2**63 - 1):
        assert not rank.is_agreed(step)
        assert agent.last_asked_step == step
    # One that is not larger than all before.
    assert not rank.is_agreed(4) and agent.last_asked_step == 2**63 - 1


def test_a_committed_step_is_due_once(agent: ProposalWords, rank: RankAgreement) -> None:
    agent.propose(7)
    assert agent.answer(7) is None
    assert not rank.is_agreed(5)
    assert agent.answer(7) is True
    agent.commit(7)
    asked = (6, 7, 7, 8)
    assert [rank.is_agreed(step) for step in asked] == [False, True, False, False]


def test_a_rank_has_passed_an_agreed_step_once_it_asks_about_another_one(
    agent: ProposalWords, rank: RankAgreement
) -> None:
    passed = []
    for step, committed in ((7, True), (19, True), (29, False)):
        agent.propose(step)
        for asked in (step - 1, step + 1, step + 2):
            rank.is_agreed(asked)
            passed.append(agent.has_passed(step))
            if asked < step:
                (agent.commit if committed else agent.abort)(step)
    assert passed == [False, False, True] * 2 + [False] * 3


def test_the_first_step_after_it_counts(agent: ProposalWords, rank: RankAgreement) -> None:
    rank.is_agreed(10)
    agent.propose(21)
    rank.is_agreed(20)
    agent.commit(21)
    assert [rank.is_agreed(step) for step in (30, 40)] == [True, False]


def test_a_step_that_was_passed_is_rejected(agent: ProposalWords, rank: RankAgreement) -> None:
    rank.is_agreed(7)
    agent.propose(7)
    assert agent.answer(7) is False
    assert not rank.is_agreed(8)
    assert agent.answer(7) is False
    agent.abort(7)
    agent.propose(9)
    assert agent.answer(9) is None


def test_a_rank_at_the_step_waits_for_the_decision(
    agent: ProposalWords, rank: RankAgreement, pool: ThreadPoolExecutor
) -> None:
    for step, committed in ((10, True), (20, False), (30, True)):
        rank.is_agreed(step - 5)
        agent.propose(step)
        # It accepts at the first step that it asks about, though that is a later one.
        answer = pool.submit(rank.is_agreed, step + 1)
        assert until(lambda step=step: agent.answer(step) is not None)
        assert agent.answer(step) is True and not answer.done()
        (agent.commit if committed else agent.abort)(step)
        assert answer.result(HANG_SECONDS) is committed
        assert not rank.is_agreed(step + 2)


def test_a_slow_rank_keeps_an_agreed_step_when_another_one_is_proposed(
    agent: ProposalWords, rank: RankAgreement
) -> None:
    agent.propose(100)
    rank.is_agreed(1)
    agent.commit(100)
    agent.propose(200)
    rank.is_agreed(2)
    assert agent.answer(200) is True
    agent.abort(200)
    agent.propose(300)
    rank.is_agreed(3)
    agent.commit(300)
    asked = (99, 101, 200, 299, 300, 301)
    assert [rank.is_agreed(step) for step in asked] == [False, True, False, False, True, False]


class SimulatedDriver:
    """Sends what a request orders to agents; each message to and from an agent takes its time."""

    def __init__(self, agents: Sequence[ProposalWords]) -> None:
        self._agents = agents
        self._chance = random.Random(99)
        self.last = -1

    def request(self) -> int:
        """Makes a request; gives the step that was agreed."""
        request = CheckpointRequest(range(len(self._agents)), time.monotonic(), self.last)
        while request.outcome is None:
            self._send(request, request.tick(time.monotonic()))
            for number, agent in enumerate(self._agents):
                if (accepted := agent.answer(request.last)) is not None:
                    now = time.monotonic()
                    answer = request.handle_answer(number, request.last, now, is_accepted=accepted)
                    self._send(request, answer)
            self._travel()
        assert isinstance(request.outcome, Agreed)
        self.last = request.last
        return request.outcome.step

    def _send(self, request: CheckpointRequest, orders: Sequence[AgentMessage]) -> None:
        for order in orders:
            if order.kind == "steps":
                asked = {number: agent.last_asked_step for number, agent in enumerate(self._agents)}
                self._travel()
                number = order.fields["number"]
                self._send(request, request.handle_steps(number, asked, time.monotonic()))
                continue
            for agent in self._agents:
                self._travel()
                getattr(agent, order.kind)(order.fields["step"])

    def _travel(self) -> None:
        time.sleep(self._chance.random() * 0.003)


def due_steps(directory: Path, number: int, pause: float, over: threading.Event) -> list[int]:
    """Asks about every third step, each after a random pause; gives the ones that were due."""
    agreement, chance, due = RankAgreement(directory), random.Random(number), []
    for step in itertools.count(step=3):
        if agreement.is_agreed(step):
            due.append(step)
        if over.is_set():
            break
        time.sleep(chance.random() * pause)
    return due


def test_ranks_that_are_not_in_step_answer_alike(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    pauses = (0.001, 0.002, 0.003, 0.002)
    homes = [tmp_path / str(number) for number in range(len(pauses))]
    for home in homes:
        home.mkdir()
    agents, over = [ProposalWords(home) for home in homes], threading.Event()
    ranks = [
        pool.submit(due_steps, home, number, pause, over)
        for number, (home, pause) in enumerate(zip(homes, pauses, strict=True))
    ]
    try:
        driver = SimulatedDriver(agents)
        agreed = [driver.request() for _ in range(4)]
        for agent in agents:
            assert until(lambda agent=agent: (agent.last_asked_step or 0) > agreed[-1] + 3)
    finally:
        over.set()
    first_asked = [-(-step // 3) * 3 for step in agreed]
    assert [one.result(HANG_SECONDS) for one in ranks] == [first_asked] * len(pauses)


def test_a_context_asks_by_its_ranks_file(
    agent: ProposalWords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = (f"file://{tmp_path}/checkpoints", f"file://{tmp_path}/logs")
    Context(0, 0, 1, "here", (), "worker", "r", 3, tmp_path, *urls).dump(tmp_path / "context")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "context"))
    context = hopsgpu.context()
    assert context.generation == 3
    agent.propose(2)
    assert not context.should_checkpoint(1)
    agent.commit(2)
    assert [context.should_checkpoint(step) for step in (2, 3)] == [True, False]
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("RANK", "0")
    assert hopsgpu.context().generation == 0 and not hopsgpu.context().should_checkpoint(4)


@pytest.mark.parametrize("step", [-1, 2**63, 1.5, True, "1"])
def test_an_invalid_step_is_an_error_outside_a_gang_too(
    step: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="step="):
        hopsgpu.context().should_checkpoint(step)  # type: ignore[arg-type]
