"""Accounts for the GPU seconds that a run held, and says what most of them were lost to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from hopsgpu.core.run_values import GpuSeconds

# Advice on a shorter run, in GPU seconds held, is of no use: starting takes most of its time.
_MIN_HELD = 60.0
# Smaller losses, in GPU seconds or as a share of those held, are not reported.
_MIN_SECONDS = 5.0
_MIN_SHARE = 0.05
# Up to these bounds, amounts are shown in seconds and in minutes.
_MAX_SECONDS_IN_SECONDS = 120.0
_MAX_SECONDS_IN_MINUTES = 120.0 * 60.0

_REMEDIES = {
    "waiting for data": (
        "waited for data",
        "read fewer columns (columns=), prepare batches in other processes"
        " (torch(...).loader(num_workers)), or give ranks more cores (cores_per_worker=)",
    ),
    "checkpointing": (
        "went into checkpoint calls",
        "save less often, or fewer bytes: a save waits while two earlier ones are being uploaded",
    ),
    "unused": (
        "had GPUs that idled while the function ran (utilisation under 5 %)",
        "put the model and the batches on the GPU, and load data with data= or in DataLoader"
        " workers",
    ),
    "publishing": (
        "went into publishing the model",
        "leave fewer files in context().model_dir, on one rank: executors of the other ranks are"
        " released first",
    ),
    "starting": (
        "went into starting the ranks",
        "hold() a gang for several launches, and import only what the function needs",
    ),
    "idle": (
        "were held while no rank ran",
        "executors wait for others or for trials: request fewer (workers=, max_concurrent=), or"
        " let an elastic gang start with the first ones (workers=(2, 8))",
    ),
}


@dataclass(frozen=True)
class RankLosses:
    """Time of ranks that was not spent on training: seconds of a rank, or GPU seconds of several.

    Attributes:
        data: waiting for data.
        checkpoints: in checkpoint calls.
        unused: with GPUs whose utilisation was under 5 %.
    """

    data: float = 0.0
    checkpoints: float = 0.0
    unused: float = 0.0

    def __add__(self, other: RankLosses) -> RankLosses:
        return RankLosses(
            self.data + other.data,
            self.checkpoints + other.checkpoints,
            self.unused + other.unused,
        )

    def since(self, before: RankLosses) -> RankLosses:
        return RankLosses(
            self.data - before.data,
            self.checkpoints - before.checkpoints,
            self.unused - before.unused,
        )

    def without_overlap(self) -> RankLosses:
        """Return the losses without double counting: a blocked rank does not use its GPUs."""
        unused = max(self.unused - self.data - self.checkpoints, 0.0)
        return RankLosses(self.data, self.checkpoints, unused)

    def of_gpus(self, gpus: float) -> RankLosses:
        """Return the GPU seconds of a rank with this number of GPUs."""
        return RankLosses(self.data * gpus, self.checkpoints * gpus, self.unused * gpus)


def split_gpu_seconds(
    held: float,
    training: float,
    publishing: float = 0.0,
    starting: float = 0.0,
    losses: RankLosses = RankLosses(),  # noqa: B008 - frozen
) -> GpuSeconds:
    """Return the GPU seconds of a run, with parts that add up. All arguments are GPU seconds.

    Args:
        starting: time of starting ranks, a part of the idle time.
        losses: losses during training. A rank may have waited before the function ran in all
            ranks, so losses are limited to `training`.
    """
    idle = max(held - training - publishing, 0.0)
    data = min(losses.data, training)
    checkpoints = min(losses.checkpoints, training - data)
    return GpuSeconds(
        held=held,
        training=training,
        publishing=publishing,
        idle=idle,
        waiting_for_data=data,
        checkpointing=checkpoints,
        unused=min(losses.unused, training - data - checkpoints),
        starting=min(max(starting, 0.0), idle),
    )


def sum_gpu_seconds(parts: Iterable[GpuSeconds]) -> GpuSeconds:
    terms = list(parts)
    return GpuSeconds(
        **{f.name: sum(getattr(term, f.name) for term in terms) for f in fields(GpuSeconds)}
    )


def time_not_training(seconds: GpuSeconds) -> str:
    """Return what most GPU time was lost to, in one line, with advice how to reduce it.

    The line is "" if the run held GPUs for less than a minute of GPU time. It is also "" if no kind
    reaches 5 GPU seconds and 5 % of those held.
    """
    if seconds.held < _MIN_HELD:
        return ""
    lost = {kind: value for kind, value in seconds.kinds().items() if kind in _REMEDIES}
    kind = max(lost, key=lambda name: lost[name])
    if lost[kind] < max(_MIN_SECONDS, _MIN_SHARE * seconds.held):
        return ""
    how, remedy = _REMEDIES[kind]
    return f"{_amount(lost[kind], seconds.held)} {how}: {remedy}"


def _amount(lost: float, held: float) -> str:
    """Return GPU seconds of those held, as "12 of 40 GPU minutes"."""
    unit, size = "seconds", 1.0
    if held > _MAX_SECONDS_IN_MINUTES:
        unit, size = "hours", 3600.0
    elif held > _MAX_SECONDS_IN_SECONDS:
        unit, size = "minutes", 60.0
    return f"{lost / size:.3g} of {held / size:.3g} GPU {unit}"
