"""Decides from measured values whether a check passed. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from statistics import mean
from typing import Any

from hopsgpu.core.gpu_usage import GpuSample
from hopsgpu.gpu.node.devices import GpuDevice
from hopsgpu.gpu.node.health import BAD
from hopsgpu.units import count_of
from tests.gpu_machine.results import Outcome, Verdict

# Less than a CUDA context takes, and more than a display changes meanwhile.
SPARE_BYTES = 256 * 2**20
_MIN_SAMPLES = 2
_GIB = 2**30


def accept(detail: str) -> Verdict:
    return Verdict(Outcome.OK, detail)


def reject(detail: str) -> Verdict:
    return Verdict(Outcome.FAILED, detail)


def judge_discovery(
    code: int, out: str, err: str, listed: Sequence[str], by_tool: Sequence[str] | None
) -> Verdict:
    """Judge the answer of the discovery script, which was asked for all GPUs.

    Args:
        code: exit code of the script.
        listed: addresses of the GPUs that hopsgpu lists, by NVML if Python has it.
        by_tool: addresses that nvidia-smi lists; None if it is not installed.
    """
    if code != 0:
        return reject(f"the discovery script failed: {_last_line(err)}")
    try:
        addresses = json.loads(out)["addresses"]
    except (ValueError, KeyError, TypeError):
        return reject(f"the discovery script printed no JSON: {_last_line(out)}")
    if sorted(addresses) != sorted(listed):
        return reject(f"the script gave {addresses}, but the driver lists {list(listed)}")
    if by_tool is None:
        return accept(f"{count_of(len(listed), 'GPU')}; nvidia-smi is not installed")
    if sorted(by_tool) != sorted(listed):
        return reject(f"nvidia-smi lists {list(by_tool)}, but NVML lists {list(listed)}")
    return accept(f"{count_of(len(listed), 'GPU')}, the same in nvidia-smi")


def judge_health(
    devices: Sequence[GpuDevice], by_tool: Sequence[GpuDevice] | None, check: str
) -> Verdict:
    """Judge the health of GPUs; a GPU to be watched is not a failure.

    Args:
        by_tool: the GPUs that nvidia-smi lists; None if it is not installed.
        check: output of yarn-scripts/gpu-health-check.
    """
    bad = [gpu for gpu in [*devices, *(by_tool or ())] if gpu.verdict.state == BAD]
    if bad:
        return reject("; ".join(dict.fromkeys(f"{g.address}: {g.verdict.reason}" for g in bad)))
    if not check.strip() or "ERROR" in check:
        return reject(f"the health check printed {check.strip()!r}")
    states = Counter(gpu.verdict.state for gpu in devices)
    reasons = [gpu.verdict.reason for gpu in devices if gpu.verdict.reason]
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    return accept("; ".join([counts, *reasons]))


@dataclass(frozen=True)
class LeaseFacts:
    """The lease of all GPUs by a process that was then killed.

    Attributes:
        held: addresses that were leased while the process ran.
        second_code: exit code of a second request for one GPU meanwhile.
        seconds_until_free: from the kill until no GPU was leased; None if some were until the end.
    """

    held: Collection[str]
    second_code: int
    second_error: str
    seconds_until_free: float | None


def judge_lease(gpus: Collection[str], facts: LeaseFacts) -> Verdict:
    if set(facts.held) != set(gpus):
        return reject(f"{len(facts.held)} of {len(gpus)} GPUs were leased")
    if facts.second_code == 0:
        return reject("a leased GPU was given out a second time")
    if "leased to another executor" not in facts.second_error:
        return reject(f"the second request failed otherwise: {_last_line(facts.second_error)}")
    if facts.seconds_until_free is None:
        return reject("the lease outlasted the process that was killed")
    return accept(f"exclusive; free {facts.seconds_until_free:.1f} s after kill -9")


def judge_sampling(gpus: Sequence[str], samples: Sequence[GpuSample]) -> Verdict:
    details = []
    for gpu in gpus:
        of_gpu = [sample for sample in samples if sample.uuid == gpu]
        good = [sample for sample in of_gpu if not sample.problem and sample.readings()]
        if len(good) < _MIN_SAMPLES:
            problem = next((sample.problem for sample in of_gpu if sample.problem), "")
            return reject(f"{gpu}: {count_of(len(good), 'sample')} {problem}".strip())
        details.append(describe_sample(good[-1]))
    return accept("; ".join(details))


def describe_sample(sample: GpuSample) -> str:
    parts = []
    if sample.utilisation is not None:
        parts.append(f"{sample.utilisation:.0%} busy")
    if sample.memory_used is not None and sample.memory_total:
        used, total = sample.memory_used / _GIB, sample.memory_total / _GIB
        parts.append(f"{used:.1f} of {total:.0f} GiB")
    if sample.power is not None:
        parts.append(f"{sample.power:.0f} W")
    if sample.temperature is not None:
        parts.append(f"{sample.temperature:.0f} °C")
    return ", ".join(parts)


def judge_sums(values: Sequence[Mapping[str, Any]], backend: str) -> Verdict:
    """Judge an all-reduce of the numbers 1 to n in n ranks, each with a GPU of its own."""
    ranks = len(values)
    expected = ranks * (ranks + 1) / 2
    sums = [value["sum"] for value in values]
    if sums != [expected] * ranks:
        return reject(f"the all-reduce returned {sums} instead of {expected:g} in each rank")
    gpus = [gpu for value in values for gpu in value["gpus"]]
    if len(set(gpus)) != ranks or len(gpus) != ranks:
        return reject(f"{ranks} ranks had the GPUs {gpus}")
    return accept(f"{count_of(ranks, 'rank')}, {backend}, one GPU each")


def judge_out_of_memory(message: str, summary: str, gpus: Sequence[str]) -> Verdict:
    """Judge the text of the RankFailed of a rank that asked for more memory than its GPU has."""
    if "CUDA out of memory" not in message:
        return reject(f"another error than PyTorch's: {summary}")
    if f"the memory of GPU {', '.join(gpus)} is full" not in message:
        return reject(f"the error does not name the full GPU: {summary}")
    return accept("RankFailed names the GPU whose memory is full")


def judge_training(
    values: Sequence[Mapping[str, Any]], utilisations: Sequence[float | None], device: str
) -> Verdict:
    """Judge a training with DDP.

    Args:
        utilisations: mean utilisation of each rank's GPU; None for those that NVML does not know.
        device: "cuda" or "cpu", on which the ranks were to train.
    """
    if [value["device"] for value in values] != [device] * len(values):
        return reject(f"ranks trained on {[value['device'] for value in values]}")
    first, last = values[0]["losses"][0], values[0]["losses"][-1]
    if not last < first:
        return reject(f"the loss did not fall: {first:.4f} to {last:.4f}")
    if not all(isclose(value["weights"], values[0]["weights"]) for value in values):
        return reject("the ranks ended with different weights")
    measured = [share for share in utilisations if share is not None]
    if device == "cuda" and measured and not max(measured):
        return reject("the GPUs were never busy, by their samples")
    busy = f"{mean(measured):.0%} busy" if measured else "utilisation unknown"
    return accept(f"{count_of(len(values), 'rank')}, loss {first:.3f} to {last:.3f}, GPUs {busy}")


def judge_idle(warnings: Sequence[str], seconds: float) -> Verdict:
    """Judge the warnings of a run whose GPUs all idled for more than `seconds`."""
    expected = f"idled for {seconds:.0f} s"
    for warning in warnings:
        if expected in warning and warning.startswith(("all ", "the gang's GPU ")):
            return accept(warning.partition(" (")[0])
    return reject(f"no warning that all GPUs {expected}: {list(warnings)}")


@dataclass(frozen=True)
class Leftovers:
    """The processes, leases and memory that a launch left after its return.

    Attributes:
        rank_pids: processes of its ranks that still run.
        gpu_pids: processes that compute on a GPU and did not before the first check.
        leased: GPUs of the launch that are still leased.
        memory: bytes by which each GPU has more memory in use than before the first check.
    """

    rank_pids: Sequence[int] = ()
    gpu_pids: Sequence[int] = ()
    leased: Sequence[str] = ()
    memory: Mapping[str, int] | None = None

    def sentences(self) -> list[str]:
        texts = []
        if self.rank_pids:
            texts.append(f"ranks still run: {', '.join(map(str, self.rank_pids))}")
        if self.gpu_pids:
            texts.append(f"processes on the GPU: {', '.join(map(str, self.gpu_pids))}")
        if self.leased:
            texts.append(f"still leased: {', '.join(self.leased)}")
        for gpu, more in (self.memory or {}).items():
            if more > SPARE_BYTES:
                texts.append(f"{gpu} has {more / _GIB:.1f} GiB more in use")
        return texts


def judge_release(leftovers: Leftovers, is_confirmed: bool, seconds: float) -> Verdict:
    """Judge what is left of a launch.

    Args:
        is_confirmed: whether the result says when the GPUs were released.
        seconds: how long after the return nothing was left, or until which the check waited.
    """
    if texts := leftovers.sentences():
        return reject("; ".join([*texts, f"{seconds:.1f} s after the return"]))
    if not is_confirmed:
        return reject("the result does not say when the GPUs were released")
    return accept(f"no process, lease or memory left {seconds:.1f} s after the return")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"
