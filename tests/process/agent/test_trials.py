"""Trials that share an agent, each in a slot of its own: real processes, a real channel."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any, cast

import optuna
import pytest

from hopsgpu.agent.rank_group import RankGroup
from hopsgpu.control.channel import Channel, Message
from hopsgpu.rank.trial import Trial
from tests.bounds import HANG_SECONDS
from tests.conftest import until
from tests.process.agent.test_agent import Gang, gang, is_refused, reserve
from tests.unit.rank_functions import all_reduced

__all__ = ["gang"]


def waits_for(file: str) -> str:
    print("waiting")
    while not Path(file).exists():
        time.sleep(0.01)  # nobody tells
    return file


def ended_of(gang: Gang, run_id: str) -> Message:
    while (ended := gang.wait_for("ended"))["run_id"] != run_id:
        pass
    return ended


def test_slots_do_not_affect_each_other(gang: Gang, tmp_path: Path) -> None:
    go = str(tmp_path / "go")
    gang.run(waits_for, go, run_id="a", slot=0)
    gang.run(waits_for, go, run_id="b", slot=1)
    for _ in range(2):
        gang.wait_for("output")
    gang.stop("b")
    assert ended_of(gang, "b")["stopped"]
    gang.run(os.getpid, run_id="c", slot=1)
    assert pickle.loads(ended_of(gang, "c").payload) > 0
    # Of a run that is not here any more.
    gang.stop("b")
    Path(go).touch()
    ended = ended_of(gang, "a")
    assert (pickle.loads(ended.payload), ended["stopped"]) == (go, False)


def test_a_run_ends_what_still_runs_in_its_slot(gang: Gang, tmp_path: Path) -> None:
    gang.run(waits_for, str(tmp_path / "go"), run_id="a", slot=1)
    gang.wait_for("output")
    gang.run(os.getpid, run_id="b", slot=1)
    assert gang.wait_for("ended")["run_id"] == "a"
    assert pickle.loads(ended_of(gang, "b").payload) > 0


def test_a_lost_connection_ends_all_slots(gang: Gang, tmp_path: Path) -> None:
    for slot in range(3):
        gang.run(waits_for, str(tmp_path / "go"), run_id=str(slot), slot=slot)
        gang.wait_for("output")
    pids = [message["pid"] for message in gang.seen if message.kind == "started"]
    gang.server.disconnect_all()
    assert gang.process.wait(HANG_SECONDS) == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_store_ends_with_its_own_slot_only(gang: Gang) -> None:
    stores = [reserve(gang, store=1, frameworks=("torch",), slot=slot)["store"] for slot in (0, 1)]
    reserve(gang, slot=1)
    assert until(lambda: is_refused(stores[1])) and not is_refused(stores[0])


def test_models_of_each_slot_are_its_own(gang: Gang) -> None:
    def train() -> None:
        import hopsgpu

        context = hopsgpu.context()
        (context.model_dir / context.run_id).write_text("weights")

    for slot, run_id in enumerate("ab"):
        gang.run(train, run_id=run_id, slot=slot)
        ended_of(gang, run_id)
    for run_id in "ab":
        staging = f"file://{gang.lake}/models/{run_id}/_staging/id"
        gang.server.send(0, "publish", ranks=[0], staging_url=staging, run_id=run_id)
        gang.wait_for("uploaded")
        (file,) = (p for p in (gang.lake / "models" / run_id).rglob("*") if p.is_file())
        assert file.name == run_id


def steps_until_pruned() -> tuple[bool, bool, int, dict[str, Any]]:
    import hopsgpu

    context = hopsgpu.context()
    before = context.should_prune()
    print("training")
    while not context.should_prune():
        time.sleep(0.01)  # a step
    assert context.trial is not None
    return before, context.should_prune(), context.trial.number, dict(context.trial.params)


def test_pruned_trial_knows_and_reports_it(gang: Gang, tmp_path: Path) -> None:
    go = tmp_path / "go"
    gang.run(steps_until_pruned, run_id="a", slot=0, trial=Trial(7, {"lr": 0.1}))
    gang.run(waits_for, str(go), run_id="b", slot=1, trial=Trial(8, {}))
    for _ in range(2):
        gang.wait_for("output")
    gang.server.send(0, "prune", run_id="a")
    ended = gang.wait_for("ended")
    assert (ended["run_id"], ended["pruned"], ended["exit_code"]) == ("a", True, 0)
    assert ended["outcome"] == {"status": "returned"}
    assert pickle.loads(ended.payload) == (False, True, 7, {"lr": 0.1})
    gang.server.send(0, "prune", run_id="b")
    go.touch()
    # It did not ask.
    assert not ended_of(gang, "b")["pruned"]


def raises_pruned() -> None:
    raise optuna.TrialPruned("a bad one")


def test_optunas_trial_pruned_is_no_failure_of_a_trial(gang: Gang) -> None:
    gang.run(raises_pruned, trial=Trial(0, {}))
    ended = gang.wait_for("ended")
    assert (ended["pruned"], ended["outcome"], ended["exit_code"]) == (
        True,
        {"status": "pruned"},
        0,
    )
    assert pickle.loads(ended.payload) is None
    assert not gang.output()


def test_optunas_trial_pruned_outside_a_trial_is_an_exception(gang: Gang) -> None:
    gang.run(raises_pruned)
    ended = gang.wait_for("ended")
    assert not ended["pruned"]
    assert ended["outcome"]["error"] == "TrialPruned: a bad one"


def fails_though_pruned() -> None:
    steps_until_pruned()
    raise LookupError("a mistake")


def test_a_trial_that_fails_when_it_is_pruned_has_failed(gang: Gang) -> None:
    gang.run(fails_though_pruned, trial=Trial(0, {}))
    gang.wait_for("output")
    gang.server.send(0, "prune", run_id="r")
    ended = gang.wait_for("ended")
    assert (ended["pruned"], ended["outcome"]["status"]) == (False, "raised")


def test_a_launch_is_no_trial(gang: Gang) -> None:
    def look() -> tuple[object, bool]:
        import hopsgpu

        return hopsgpu.context().trial, hopsgpu.context().should_prune()

    gang.run(look)
    ended = gang.wait_for("ended")
    assert (pickle.loads(ended.payload), ended["pruned"]) == ((None, False), False)


def test_a_rank_alone_serves_its_own_store_at_a_held_port(gang: Gang) -> None:
    reserved = reserve(gang, ports=3, frameworks=("torch",))
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": reserved["address"]}
    port = str(reserved["ports"][1])
    gang.run(all_reduced, frameworks=("torch",), MASTER_PORT=port, **variables)
    ended = gang.wait_for("ended")
    assert ended["outcome"] == {"status": "returned"}
    assert pickle.loads(ended.payload) == (1.0, True)


def test_a_port_that_an_earlier_rank_has_left_in_use_is_told_before_the_next_one_begins(
    gang: Gang,
) -> None:
    port = reserve(gang)["ports"][0]
    gang.run(os.getpid, trial=Trial(0, {}))
    assert gang.wait_for("ended")["outcome"] == {"status": "returned"}
    with socket.socket() as left:
        left.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        left.bind(("", port))
        left.listen()
        gang.run(os.getpid, trial=Trial(1, {}))
        outcome = gang.wait_for("ended")["outcome"]
    assert outcome["status"] == "not started" and f"port {port}" in outcome["error"]
    gang.run(os.getpid, trial=Trial(2, {}))
    assert gang.wait_for("ended")["outcome"] == {"status": "returned"}


@pytest.mark.parametrize("is_over", [True, False])
def test_only_an_attempt_that_is_over_is_removed_behind_the_next_ones_back(
    is_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removing, go = threading.Event(), threading.Event()
    remove = shutil.rmtree

    def rmtree(directory: Path, **options: Any) -> None:
        removing.set()
        assert go.wait(HANG_SECONDS)
        remove(directory, **options)

    async def act() -> bool:
        async with asyncio.TaskGroup() as tasks:
            fields = {"run_id": "r", "attempt": 0, "run_url": "file:///nowhere", "ranks": [{}]}
            attempt = RankGroup(cast("Channel", Silent()), tasks, Message("run", fields, b""))
            attempt._directory.mkdir(parents=True)
            if is_over:
                attempt._ended.add(0)
            begun = asyncio.Event()
            giving_way = tasks.create_task(attempt.end_in_background(begun))
            if is_over:
                await giving_way
                assert len(list((tmp_path / "hopsgpu").iterdir())) == 1, "removed too early"
            begun.set()
            assert await asyncio.to_thread(removing.wait, HANG_SECONDS)
            # The next attempt may have the same name.
            is_free = giving_way.done() and not attempt._directory.exists()
            go.set()
            return is_free

    class Silent:
        async def notify(self, *_: object, **__: object) -> None:
            """Nobody is there."""

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert asyncio.run(act()) is is_over
    assert not list((tmp_path / "hopsgpu").iterdir())


@pytest.mark.parametrize("frameworks", [("torch",), pytest.param((), marks=pytest.mark.soak)])
def test_torch_in_a_rank_with_a_share_is_limited(gang: Gang, frameworks: tuple[str, ...]) -> None:
    def queued() -> list[str]:
        import torch

        assert not torch.cuda.is_initialized()
        return [call.__qualname__ for call, _ in torch.cuda._queued_calls]

    gang.run(queued, frameworks=frameworks, HOPSGPU_MEMORY_SHARE="0.5")
    assert pickle.loads(gang.wait_for("ended").payload)[-1] == "_limit_torch.<locals>.limit"


def collects() -> list[str]:
    from hopsgpu.rank import inbox

    print("waiting")
    found = []
    for line in inbox.lines():
        found.append(line)
        if line == "end":
            break
    return found


def test_a_rank_reads_what_the_driver_hands_it(gang: Gang) -> None:
    gang.run(collects, run_id="a", slot=0)
    gang.run(collects, run_id="b", slot=1)
    for _ in range(2):
        gang.wait_for("output")
    for line in ("one", "zwei ü", "end"):
        gang.server.send(0, "hand", run_id="a", line=line)
    assert pickle.loads(ended_of(gang, "a").payload) == ["one", "zwei ü", "end"]
    gang.server.send(0, "hand", run_id="a", line="late")
    gang.server.send(0, "hand", run_id="b", line="end")
    assert pickle.loads(ended_of(gang, "b").payload) == ["end"]


def test_a_rank_that_does_not_read_what_it_is_handed_is_killed(gang: Gang, tmp_path: Path) -> None:
    gang.run(waits_for, str(tmp_path / "go"), run_id="a", slot=0)
    gang.wait_for("output")
    for _ in range(20):
        gang.server.send(0, "hand", run_id="a", line="x" * 10_000)
    end = ended_of(gang, "a")
    assert (end["signal"], end["stopped"]) == ("SIGKILL", False)
