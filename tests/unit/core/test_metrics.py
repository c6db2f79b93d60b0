"""Ranks' reports, from the user's function to the driver, and samples of their GPUs."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hopsgpu
from hopsgpu.agent.rank_logs import follow_reports
from hopsgpu.core import metrics as measures
from hopsgpu.core.gpu_usage import GpuSample, GpuUsage, idle_warning
from hopsgpu.core.metrics import Metrics, MetricsChunk, append, report_line, sample_line
from hopsgpu.errors import ConfigError
from hopsgpu.rank.context import VARIABLE, Context, context
from tests.bounds import HANG_SECONDS

GPU = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A rank's file of reports; `context()` is the context of that rank."""
    described = tmp_path / "context.json"
    places = (tmp_path / "model", f"file://{tmp_path}/checkpoints", f"file://{tmp_path}/logs")
    Context(1, 0, 2, "node1", (GPU,), "worker", "r", 0, *places).dump(described)
    monkeypatch.setenv(VARIABLE, str(described))
    return tmp_path / measures.FILE


def records(file: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]


def folded(file: Path) -> Metrics:
    """Return what the driver makes of a file of rank 1."""
    metrics_chunk, metrics = MetricsChunk(), Metrics([0, 1])
    metrics_chunk.add(file.read_bytes())
    metrics.add_chunk(1, metrics_chunk.flush())
    return metrics


def test_a_report_reaches_the_driver_with_its_step(reports: Path) -> None:
    import torch

    context().report(3, loss=0.5, accuracy=np.float32(0.25), done=True, self=1)
    context().report(np.int64(4), loss=torch.tensor(0.125, requires_grad=True))
    assert [record["step"] for record in records(reports)] == [3, 4]
    assert folded(reports).last_values() == (
        {},
        {"step": 4, "loss": 0.125, "accuracy": 0.25, "done": 1.0, "self": 1.0},
    )


def test_metrics_of_any_name_are_accepted(reports: Path) -> None:
    names = ("step", "self", "time", "gpu", "rank", "metrics", "gpu.0.power", "*", "a b", "é")
    context().report(7, **dict.fromkeys(names, 0.5))
    assert records(reports)[0]["metrics"] == dict.fromkeys(names, 0.5)
    # The last step keeps its name.
    assert folded(reports).last_values()[1] == {**dict.fromkeys(names, 0.5), "step": 7}


def test_nan_and_the_infinities_survive_json(reports: Path) -> None:
    context().report(0, nan=math.nan, up=math.inf, down=-math.inf)
    assert records(reports)[0]["metrics"] == {"nan": "NaN", "up": "Infinity", "down": "-Infinity"}
    last = folded(reports).last_values()[1]
    assert math.isnan(last["nan"]) and (last["up"], last["down"]) == (math.inf, -math.inf)


def test_a_name_that_is_no_utf8_can_be_shown(reports: Path) -> None:
    context().report(0, **{os.fsdecode(b"caf\xe9"): 1.0})
    (name,) = folded(reports).last_values()[1].keys() - {"step"}
    assert name == r"caf\udce9"


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (-1, {}, r"step=-1.*\[0, 2\*\*63\)"),
    (2**63, {}, "step=9223372036854775808"),
    (10**5000, {}, "step=an int that is too long to show"),
    (1.5, {}, "step=1.5"),
    (True, {}, "step=True"),
    ("3", {}, "step='3'"),
    (0, {"loss": "0.5"}, "loss='0.5'"),
    (0, {"loss": b"1"}, "loss=b'1'"),
    (0, {"loss": None}, "loss=None"),
    (0, {"loss": 1j}, "loss=1j"),
    (0, {"loss": [1.0]}, r"loss=\[1.0\]"),
    (0, {"loss": 10**400}, "loss=1000"),
    (0, {"loss": np.ones(2)}, "loss=array"),
    (0, {"fine": 1.0, "": 2.0}, "named ''"),
    (0, {"x" * 201: 1.0}, "named 'xxx.*1 to 200"),
    (0, {f"m{number}": 1.0 for number in range(1001)}, "1001 metrics.*1000"),
]


@pytest.mark.parametrize(("step", "given", "said"), WRONG, ids=[said for _, _, said in WRONG])
def test_a_bad_report_is_named_and_changes_nothing(
    reports: Path, monkeypatch: pytest.MonkeyPatch, step: Any, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        context().report(step, **given)
    assert not reports.exists()
    # Outside a gang the same is refused.
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match=said):
        context().report(step, **given)


def test_a_tensor_of_several_numbers_is_no_metric(
    reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    test_a_bad_report_is_named_and_changes_nothing(
        reports, monkeypatch, 0, {"loss": torch.ones(2)}, "loss=tensor"
    )


def test_a_tensor_without_a_real_number_is_no_metric(reports: Path) -> None:
    import torch

    for value in (torch.ones((), device="meta"), torch.tensor(1j)):
        with pytest.raises(ConfigError, match="loss=tensor.*without a real number"):
            context().report(0, loss=value)


def test_an_error_of_the_gpu_is_not_called_a_bad_report(reports: Path) -> None:
    class Failing:
        """A tensor on a GPU on which an earlier kernel failed."""

        def detach(self) -> Failing:
            return self

        def numel(self) -> int:
            return 1

        def __float__(self) -> float:
            raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert"):
        context().report(0, loss=Failing())
    assert not reports.exists()


def test_a_loss_with_a_gradient_is_reported_without_a_warning(reports: Path) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        context().report(0, loss=torch.ones(1, requires_grad=True).sum())
    assert folded(reports).last_values()[1] == {"step": 0, "loss": 1.0}


def test_outside_a_gang_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("RANK", "0")
    hopsgpu.context().report(0, loss=1.0)
    assert list(tmp_path.iterdir()) == []


def test_threads_and_forked_children_report_whole_lines(reports: Path) -> None:
    def report(thread: int) -> None:
        for step in range(300):
            context().report(step, **{f"t{thread}": step, "long" * 40: 1.0})

    code = (
        "import hopsgpu\n"
        "for step in range(300): hopsgpu.context().report(step, child=step, filler=1.0)"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    threads = [threading.Thread(target=report, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert child.wait(HANG_SECONDS) == 0
    assert len(records(reports)) == 1500
    last = folded(reports).last_values()[1]
    assert all(last[name] == 299 for name in ("t0", "t1", "t2", "t3", "child"))


def follow_while(file: Path, work: Callable[[], None]) -> tuple[Metrics, int]:
    """Return what is read from a file while a thread runs, and in how many messages."""
    metrics = Metrics([0])
    sent = 0

    async def go() -> None:
        nonlocal sent
        ended = asyncio.Event()

        async def send(content: bytes) -> None:
            nonlocal sent
            sent += 1
            metrics.add_chunk(0, content)

        following = asyncio.create_task(follow_reports(file, ended, send))
        await asyncio.to_thread(work)
        ended.set()
        await following

    asyncio.run(go())
    return metrics, sent


def test_what_a_killed_rank_reported_is_kept(reports: Path) -> None:
    code = (
        "import hopsgpu, os, signal\n"
        "for step in range(2000): hopsgpu.context().report(step, loss=1 / (step + 1))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )

    def work() -> None:
        assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL

    metrics, sent = follow_while(reports, work)
    assert metrics.last_values()[0] == {"step": 1999, "loss": 1 / 2000}
    assert len(records(reports)) == 2000
    assert 0 < sent < 500


def test_many_reports_within_a_moment_are_one_message(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"".join(report_line(n, {"loss": n, "x" * 99: 0}, 0.0) for n in range(10_000)))
    metrics = Metrics([0])
    sent: list[float] = []

    async def go() -> None:
        ended = asyncio.Event()
        ended.set()

        async def send(content: bytes) -> None:
            metrics.add_chunk(0, content)
            sent.append(metrics.last_values()[0]["step"])

        await follow_reports(file, ended, send, clock=lambda: 7.0)

    asyncio.run(go())
    # The first chunk's at once, and then all others': the clock stands still.
    assert len(sent) == 2 and sent[1] == 9999


def test_a_rank_that_reports_nothing_sends_nothing(tmp_path: Path) -> None:
    metrics, sent = follow_while(tmp_path / "metrics.jsonl", lambda: None)
    assert (metrics.last_values(), sent) == (({},), 0)


def test_a_line_that_a_full_disk_cut_off_harms_no_other(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    append(file, report_line(1, {"loss": 1.0}, 0.0))
    append(file, b'{"time": 1, "st\n')
    append(file, report_line(2, {"accuracy": 2.0}, 0.0))
    append(file, b'{"time": 1, "step": 3, "metr')
    assert folded(file).last_values()[1] == {"step": 2, "loss": 1.0, "accuracy": 2.0}


def test_names_without_end_do_not_fill_the_drivers_memory() -> None:
    metrics = Metrics([0])
    for step in range(3000):
        metrics_chunk = MetricsChunk()
        metrics_chunk.add(report_line(step, {f"loss{step}": 1.0, "loss": step}, 0.0))
        metrics.add_chunk(0, metrics_chunk.flush())
    last = metrics.last_values()[0]
    assert len(last) == 1001 and last["loss"] == last["step"] == 2999
    assert "more than 1000 different metrics" in metrics.warnings(0, "node1")[0]


def test_samples_come_to_a_mean_a_peak_and_an_idle_share() -> None:
    use = functools.reduce(
        GpuUsage.with_sample,
        [
            GpuSample(10.0, GPU, utilisation=0.0, memory_used=5),
            GpuSample(11.0, GPU, utilisation=0.5, memory_used=9),
            GpuSample(12.0, GPU, problem="GPU is lost"),
            GpuSample(14.0, GPU, utilisation=1.0, memory_used=7),
            GpuSample(15.0, GPU, utilisation=0.0),
        ],
        GpuUsage(),
    )
    assert (use.utilisation, use.idle_share) == (0.375, 0.5)
    assert (use.peak_memory, use.seconds, use.problem) == (9, 5.0, "GPU is lost")
    assert (GpuUsage().utilisation, GpuUsage().idle_share, GpuUsage().seconds) == (None, None, 0.0)


@pytest.mark.parametrize(
    ("share", "seconds", "said"),
    [(0.97, 10.0, "97%"), (0.95, 3600.0, "95%"), (0.94, 60.0, ""), (1.0, 9.9, ""), (None, 60, "")],
)
def test_an_idle_gpu_is_said_so_with_the_share(
    share: float | None, seconds: float, said: str
) -> None:
    warning = idle_warning(3, "node2", GPU, share, seconds)
    if not said:
        assert warning is None
    else:
        assert warning is not None
        assert warning.startswith(f"rank 3 on node2: {GPU} idled for {said} of {seconds:.0f} s")


def test_samples_travel_with_the_reports(reports: Path) -> None:
    context().report(7, loss=1.0)
    for second in range(31):
        utilisation = 0.9 if second == 5 else 0.0
        used = 70 if second == 5 else second
        sample = GpuSample(100.0 + second, GPU, utilisation, used, 80, 250.5, 60)
        append(reports, sample_line(sample))
        append(reports, sample_line(GpuSample(100.0 + second, "GPU-2", 0.5)))
    append(reports, sample_line(GpuSample(100.0, "GPU-sim", problem="NVML does not know the GPU")))
    metrics = folded(reports)
    assert metrics.last_values()[1] == {
        "step": 7,
        "loss": 1.0,
        "gpu.0.utilisation": 0.0,
        "gpu.0.memory_used": 30,
        "gpu.0.memory_peak": 70,
        "gpu.0.memory_total": 80,
        "gpu.0.power": 250.5,
        "gpu.0.temperature": 60,
        "gpu.1.utilisation": 0.5,
    }
    assert metrics.utilisation(1) == pytest.approx((0.9 / 31 + 0.5) / 2)
    assert metrics.utilisation(0) is None
    (warning,) = metrics.warnings(1, "node2")
    assert f"{GPU} idled for 97% of 30 s" in warning


def test_a_report_takes_microseconds_and_waits_for_nobody(reports: Path) -> None:
    """Nobody reads the file; 20,000 reports fill no queue."""
    asked = context()
    for step in range(20_000):
        asked.report(step, loss=0.1)
    assert len(records(reports)) == 20_000
    assert reports.stat().st_mode & 0o077 == 0
