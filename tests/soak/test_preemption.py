"""Gangs that lose GPUs to other gangs: YARN preempts them, or an elastic gang gives way.

All four GPUs of a cluster go to a gang of the queue `default`, then another application asks for
some; YARN preempts for the queue `training`, and nothing within a queue.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hopsgpu import devcluster
from tests.bounds import HANG_SECONDS
from tests.conftest import until

# Applications start one after the other, each within a minute or two beside other tests.

# Trains until there is a file `stop`, and prints each change of the run's status as JSON. A rank
# returns how many steps there were, or False if one was skipped or repeated.
SCRIPT = """
    import json, sys, tempfile, time
    from pathlib import Path
    import hopsgpu

    def train(directory):
        context = hopsgpu.context()
        saved = context.latest_checkpoint()
        step, total = json.loads(saved.read_text()) if saved else (0, 0)
        while not Path(directory, "stop").exists():
            time.sleep(3.0 if Path(directory, "slow").exists() else 0.2)
            total += step
            asked = context.should_checkpoint(step)
            step += 1
            if context.rank == 0 and (asked or step % 25 == 0):
                file = Path(tempfile.mkdtemp(), "state.json")
                file.write_text(json.dumps([step, total]))
                context.save_checkpoint(file, step)
        return total == step * (step - 1) // 2 and step

    def told(status):
        return {
            "state": status.state,
            "attempt": status.attempt,
            "why": status.waiting_for,
            "worlds": [[w.ranks, w.started is not None, w.end, w.why] for w in status.worlds],
        }

    queue, directory, workers, options, conf = sys.argv[1:]
    workers = json.loads(workers)
    hopsgpu.session("preemption", conf={"spark.yarn.queue": queue, **json.loads(conf)})
    run = hopsgpu.submit(
        train,
        args=(directory,),
        workers=tuple(workers) if isinstance(workers, list) else workers,
        memory_per_worker="1g",
        progress="off",
        **json.loads(options),
    )
    last = None
    while not run.wait(0.3):
        if (now := told(run.status())) != last:
            last = now
            print(json.dumps(now), flush=True)
    result = run.result()
    print(
        json.dumps(
            {
                **told(run.status()),
                "values": result.values,
                "warnings": result.warnings,
            }
        ),
        flush=True,
    )
"""


class Gang:
    """A gang of an application of its own, and all that its status said.

    Args:
        cluster: directory of the cluster.
        directory: a new directory for its files.
        queue: YARN's.
        workers: as for `launch`.
        options: further arguments of `launch`.
        conf: properties of the session.
    """

    def __init__(
        self,
        cluster: Path,
        directory: Path,
        queue: str,
        workers: int | tuple[int, int],
        options: dict[str, Any] | None = None,
        conf: dict[str, str] | None = None,
    ) -> None:
        directory.mkdir()
        self._directory = directory
        self._out, self._err = directory / "out", directory / "err"
        with self._out.open("w") as out, self._err.open("w") as err:
            arguments = (workers, options or {}, conf or {})
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    textwrap.dedent(SCRIPT),
                    queue,
                    str(directory),
                    *map(json.dumps, arguments),
                ],
                cwd=directory,
                env={**os.environ, **devcluster.environment(cluster)},
                stdout=out,
                stderr=err,
            )

    @contextmanager
    def slow(self) -> Iterator[None]:
        """Have its ranks take 3 s for a step."""
        (self._directory / "slow").touch()
        try:
            yield
        finally:
            (self._directory / "slow").unlink()

    @property
    def said(self) -> list[dict[str, Any]]:
        """All statuses so far, the last one last."""
        lines = self._out.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def becomes(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until a status, also an earlier one, is as wanted; return it."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found[:] = [status for status in self.said if holds(status)][:1]
            return bool(found) or self.process.poll() is not None

        until(look, step=0.5)
        assert found, f"{self.said[-8:]}\n{self._err.read_text()[-3000:]}"
        return found[0]

    def has_world(self, size: int, after: int = 0) -> dict[str, Any]:
        """Wait until the function runs in a world of a size; `after` worlds do not count."""
        return self.becomes(
            lambda s: len(s["worlds"]) > after and s["worlds"][-1][:2] == [size, True]
        )

    def runs(self, attempt: int = 0) -> dict[str, Any]:
        """Wait until the function runs in all ranks of a gang that is not elastic."""
        return self.becomes(lambda s: s["state"] == "running" and s["attempt"] == attempt)

    def finish(self) -> dict[str, Any]:
        """Have the ranks return; return the result."""
        (self._directory / "stop").touch()
        assert self.process.wait(HANG_SECONDS) == 0, self._err.read_text()[-3000:]
        result = self.said[-1]
        assert result["state"] == "succeeded"
        assert all(steps > 0 for steps in result["values"]), result["values"]
        return result

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


Start = Callable[..., Gang]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("preemption")
    try:
        devcluster.up(directory, preemption=True)
        yield directory
    finally:
        devcluster.down(directory)


@contextmanager
def gpus_returned(cluster: Path) -> Iterator[None]:
    yield
    assert until(lambda: devcluster.status(cluster).gpus_used == 0, step=1.0)


@pytest.fixture
def start(cluster: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts gangs; at the end the ResourceManager must say that no GPU is in use."""
    gangs: list[Gang] = []

    def begin(*args: Any, **kwargs: Any) -> Gang:
        gangs.append(Gang(cluster, tmp_path / f"gang-{len(gangs)}", *args, **kwargs))
        return gangs[-1]

    with gpus_returned(cluster):
        try:
            yield begin
        finally:
            for gang in gangs:
                gang.kill()


# An interval between growths that a test can wait for.
SOON = {"spark.hopsgpu.elastic.interval": "10s"}
KEEPS = {**SOON, "spark.hopsgpu.elastic.give_way": "false"}


def test_an_elastic_gang_gives_way_to_another_queue_and_grows_again(start: Start) -> None:
    elastic = start("default", (2, 4), conf=SOON)
    large = len(elastic.has_world(4)["worlds"])
    other = start("training", 2)
    small = elastic.has_world(2, after=large)["worlds"]
    # It was quicker than YARN, which preempts for a request and not for a gang that waits in line.
    assert small[large - 1][2] == "gave way"
    other.runs()
    other.finish()
    elastic.has_world(4, after=len(small))
    result = elastic.finish()
    assert len(result["values"]) == 4
    assert [world[2] for world in result["worlds"]][-2:] == ["grew", "returned"]


def test_yarn_shrinks_an_elastic_gang_that_does_not_give_way(start: Start) -> None:
    elastic = start("default", (2, 4), conf=KEEPS)
    large = len(elastic.has_world(4)["worlds"])
    other = start("training", 2)
    other.runs()
    small = elastic.has_world(2, after=large)["worlds"]
    assert small[large - 1][2] == "lost"
    assert "preempted" in small[large - 1][3]
    other.finish()
    elastic.has_world(4, after=len(small))
    result = elastic.finish()
    assert len(result["values"]) == 4
    assert result["worlds"][-1][2] == "returned"


def test_yarn_preempts_nothing_for_a_gang_that_needs_more_than_its_share(
    start: Start, cluster: Path
) -> None:
    """Its queue has a share of two GPUs: YARN would preempt one for it, and it needs two."""
    gang = start("default", 3)
    gang.runs()
    other = start("training", 3)
    other.becomes(lambda s: s["state"] == "waiting" and "GPU" in s["why"])
    # It would ask after 30 s.
    assert not until(lambda: devcluster.status(cluster).gpus_used != 3, 50, step=1.0)
    assert len(gang.finish()["values"]) == 3
    other.runs()
    assert len(other.finish()["values"]) == 3


def test_a_gang_of_one_size_is_tried_again_when_yarn_has_gpus(start: Start) -> None:
    gang = start("default", 4, {"retries": 1})
    gang.runs()
    other = start("training", 2)
    other.runs()
    # The second attempt waits for the GPUs that the other gang has.
    gang.becomes(lambda s: s["attempt"] == 1 and s["state"] == "waiting" and "GPU" in s["why"])
    other.finish()
    gang.runs(attempt=1)
    result = gang.finish()
    assert len(result["values"]) == 4
    assert any("preempted" in text for text in result["warnings"]), result["warnings"]


def test_an_elastic_gang_gives_way_in_its_queue_and_both_say_so(start: Start) -> None:
    """YARN preempts nothing here: what it takes back is for another queue."""
    elastic = start("default", (2, 4), {"name": "giver"}, conf=SOON)
    large = len(elastic.has_world(4)["worlds"])
    # Its next checkpoint takes long enough to be waited for.
    with elastic.slow():
        other = start("default", 2)
        elastic.becomes(lambda s: "to waiting gangs at its next checkpoint" in s["why"])
        other.becomes(lambda s: "2 GPUs come from" in s["why"] and "'giver'" in s["why"])
    other.runs()
    small = elastic.has_world(2, after=large)["worlds"]
    assert small[large - 1][2] == "gave way"
    other.finish()
    elastic.has_world(4, after=len(small))
    assert len(elastic.finish()["values"]) == 4
