"""The verdicts of `make gpu`, from values that were measured or that hopsgpu's own code words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hopsgpu.attempts.failures import RankExit, rank_error
from hopsgpu.core.gang import GangExecutor, RankPlacement
from hopsgpu.core.gpu_idle import IdleStep, IdleVerdict
from hopsgpu.core.gpu_usage import GpuSample
from hopsgpu.gpu.node.devices import GpuDevice
from hopsgpu.gpu.node.health import Readings
from tests.gpu_machine.results import Outcome
from tests.gpu_machine.verdicts import (
    LeaseFacts,
    Leftovers,
    judge_discovery,
    judge_health,
    judge_idle,
    judge_lease,
    judge_out_of_memory,
    judge_release,
    judge_sampling,
    judge_sums,
    judge_training,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("code", "out", "by_tool", "detail"),
    [
        (0, '{"name": "gpu", "addresses": ["GPU-2", "GPU-1"]}', ["GPU-1", "GPU-2"], ""),
        (0, '{"name": "gpu", "addresses": ["GPU-2", "GPU-1"]}', None, ""),
        (1, "", None, "the discovery script failed: why"),
        (0, "no JSON", None, "the discovery script printed no JSON: no JSON"),
        (0, "[]", None, "the discovery script printed no JSON: []"),
        (0, '{"addresses": ["GPU-1"]}', None, "the script gave ['GPU-1'], but the driver lists"),
        (0, '{"addresses": ["GPU-1", "GPU-2"]}', ["GPU-1"], "nvidia-smi lists ['GPU-1'], but NVML"),
    ],
)
def test_discovery(code: int, out: str, by_tool: list[str] | None, detail: str) -> None:
    verdict = judge_discovery(code, out, "more\nwhy\n", ["GPU-1", "GPU-2"], by_tool)
    assert (verdict.outcome is Outcome.FAILED) is bool(detail)
    assert verdict.detail.startswith(detail or "2 GPUs")


def test_health() -> None:
    good, hot = GpuDevice("GPU-1"), GpuDevice("GPU-2", readings=Readings(sw_thermal=True))
    bad = GpuDevice("GPU-1", readings=Readings("GPU is lost"))
    watched = judge_health([good, hot], None, "GPU GPU-2 is watch")
    assert watched.outcome is Outcome.OK
    assert watched.detail.startswith("1 healthy, 1 watch; the driver slows it down")
    assert judge_health([good], [bad], "1 GPU, healthy").detail == "GPU-1: GPU is lost"
    assert judge_health([good], [good], "ERROR no GPU").outcome is Outcome.FAILED
    assert judge_health([good], [good], "").outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({}, "exclusive; free 0.2 s after kill -9"),
        ({"held": []}, "0 of 1 GPUs were leased"),
        ({"second_code": 0}, "a leased GPU was given out a second time"),
        ({"second_error": "no driver"}, "the second request failed otherwise: no driver"),
        ({"seconds_until_free": None}, "the lease outlasted the process that was killed"),
    ],
)
def test_lease(fields: dict[str, Any], detail: str) -> None:
    facts = LeaseFacts(["GPU-1"], 1, "GPU-1 is leased to another executor (pid 7)", 0.2)
    verdict = judge_lease(["GPU-1"], dataclasses.replace(facts, **fields))
    assert verdict.detail == detail
    assert (verdict.outcome is Outcome.OK) is not bool(fields)


def test_sampling() -> None:
    sample = GpuSample(0.0, "GPU-1", 0.5, 2 * GIB, 40 * GIB, 100.4, 31)
    verdict = judge_sampling(["GPU-1"], [sample, sample])
    assert verdict.outcome is Outcome.OK
    assert verdict.detail == "50% busy, 2.0 of 40 GiB, 100 W, 31 °C"
    lost = GpuSample(1.0, "GPU-2", problem="GPU is lost")
    assert judge_sampling(["GPU-1"], [sample]).detail == "GPU-1: 1 sample"
    both = judge_sampling(["GPU-1", "GPU-2"], [sample, sample, lost])
    assert both.outcome is Outcome.FAILED and both.detail == "GPU-2: 0 samples GPU is lost"


def test_sums() -> None:
    values = [{"sum": 3.0, "gpus": ["GPU-1"]}, {"sum": 3.0, "gpus": ["GPU-2"]}]
    assert judge_sums(values, "nccl").detail == "2 ranks, nccl, one GPU each"
    assert judge_sums(values[:1], "nccl").outcome is Outcome.FAILED
    shared = [{**value, "gpus": ["GPU-1"]} for value in values]
    assert judge_sums(shared, "nccl").detail == "2 ranks had the GPUs ['GPU-1', 'GPU-1']"


def out_of_memory(error: str) -> Any:
    container = GangExecutor(0, "container_1", "node1", "10.0.0.1", ("GPU-1",))
    place = RankPlacement(0, 0, 0, container, container.gpus)
    outcome = {"status": "raised", "error": error, "traceback": f"Traceback\n{error}"}
    return rank_error(RankExit(place, 0.0, 1, None, outcome, (), False), "file:///log")


def test_an_error_of_memory_names_the_gpu() -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 280.00 GiB. GPU 0 has"
    error = out_of_memory(text)
    assert judge_out_of_memory(str(error), error.summary, error.gpus).outcome is Outcome.OK
    assert judge_out_of_memory(str(error), error.summary, ("GPU-2",)).outcome is Outcome.FAILED
    other = out_of_memory("RuntimeError: no NVIDIA driver")
    verdict = judge_out_of_memory(str(other), other.summary, other.gpus)
    assert verdict.detail == "another error than PyTorch's: RuntimeError: no NVIDIA driver"


@pytest.mark.parametrize(
    ("fields", "utilisation", "detail"),
    [
        ({}, 0.3, "2 ranks, loss 2.000 to 1.000, GPUs 30% busy"),
        ({}, None, "2 ranks, loss 2.000 to 1.000, GPUs utilisation unknown"),
        ({}, 0.0, "the GPUs were never busy, by their samples"),
        ({"device": "cpu"}, 0.3, "ranks trained on ['cpu', 'cpu']"),
        ({"losses": [1.0, 1.0]}, 0.3, "the loss did not fall: 1.0000 to 1.0000"),
        ({"losses": [1.0, float("nan")]}, 0.3, "the loss did not fall: 1.0000 to nan"),
    ],
)
def test_training(fields: dict[str, Any], utilisation: float | None, detail: str) -> None:
    value = {"device": "cuda", "losses": [2.0, 1.0], "weights": 5.0, **fields}
    assert judge_training([value, value], [utilisation] * 2, "cuda").detail == detail


def test_ranks_must_end_with_the_same_weights() -> None:
    values = [{"device": "cpu", "losses": [2.0, 1.0], "weights": w} for w in (5.0, 5.1)]
    verdict = judge_training(values, [None, None], "cpu")
    assert verdict.detail == "the ranks ended with different weights"


def test_idle() -> None:
    part = str(IdleVerdict(IdleStep.WARN, 3.0, 1, 2, (0,)))
    both = str(IdleVerdict(IdleStep.WARN, 3.0, 2, 2, (0, 1)))
    alone = str(IdleVerdict(IdleStep.WARN, 3.0, 1, 1, (0,)))
    assert judge_idle([part, both], 3.0).detail == "all 2 GPUs have idled for 3 s"
    assert judge_idle([alone], 3.0).detail == "the gang's GPU has idled for 3 s"
    assert judge_idle([part], 3.0).outcome is Outcome.FAILED
    assert judge_idle([], 3.0).outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("leftovers", "is_confirmed", "detail"),
    [
        (Leftovers(), True, "no process, lease or memory left 0.4 s after the return"),
        (Leftovers(memory={"GPU-1": GIB // 8}), True, "no process, lease or memory left"),
        (Leftovers(), False, "the result does not say when the GPUs were released"),
        (Leftovers(rank_pids=[7, 8]), True, "ranks still run: 7, 8; 0.4 s after the return"),
        (Leftovers(gpu_pids=[7]), True, "processes on the GPU: 7"),
        (Leftovers(leased=["GPU-1"]), True, "still leased: GPU-1"),
        (Leftovers(memory={"GPU-1": GIB}), True, "GPU-1 has 1.0 GiB more in use"),
    ],
)
def test_release(leftovers: Leftovers, is_confirmed: bool, detail: str) -> None:
    assert judge_release(leftovers, is_confirmed, 0.4).detail.startswith(detail)
