"""What held GPUs were lost to: the accounting of the parts, and the largest loss in one line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from hopsgpu.core.run_values import GpuSeconds

# A loss that is smaller, in GPU seconds or as a share of those held, is not worth a line.
_LEAST_SECONDS = 5.0
_LEAST_SHARE = 0.05
# Up to here amounts are in seconds, and in minutes.
_MOST_SECONDS = 120.0
_MOST_MINUTES = 120.0 * 60.0

_REMEDIES = {
    "waiting for data": (
        "waited for data",
        "read fewer columns (columns=), have batches prepared in other processes"
        " (torch(...).loader(num_workers)), or give ranks more cores (cores_per_worker=)",
    ),
    "checkpointing": (
        "went into checkpoint calls",
        "save less often, or less: a save waits while two earlier ones are on their way to the"
        " lake",
    ),
    "unused": (
        "had GPUs that idled while the function ran (utilisation under 5 %)",
        "put the model and the batches on the GPU, and load data with data= or in DataLoader"
        " workers",
    ),
    "publishing": (
        "went into publishing the model",
        "leave fewer files in context().model_dir, on one rank: executors of the others go back"
        " first",
    ),
    "starting": (
        "went into starting the ranks",
        "hold() a gang for several launches, and import only what the function needs",
    ),
    "idle": (
        "were held while no rank ran",
        "executors wait for others or for trials: ask for fewer (workers=, max_concurrent=), or"
        " start with those that are there (workers=(2, 8))",
    ),
}


@dataclass(frozen=True)
class RankLosses:
    """What ranks spent their time on beside training.

    Seconds of one rank, or GPU seconds of several.

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
        """Return what was added to earlier losses of the same rank."""
        return RankLosses(
            self.data - before.data,
            self.checkpoints - before.checkpoints,
            self.unused - before.unused,
        )

    def apart(self) -> RankLosses:
        """Return the same without what counts twice: GPUs are not used while a rank is blocked."""
        unused = max(self.unused - self.data - self.checkpoints, 0.0)
        return RankLosses(self.data, self.checkpoints, unused)

    def of_gpus(self, gpus: float) -> RankLosses:
        """Return the GPU seconds of a rank that has so many GPUs."""
        return RankLosses(self.data * gpus, self.checkpoints * gpus, self.unused * gpus)


def spent(
    held: float,
    training: float,
    publishing: float = 0.0,
    starting: float = 0.0,
    losses: RankLosses = RankLosses(),  # noqa: B008 - frozen
) -> GpuSeconds:
    """Return GPU seconds whose parts add up.

    Args:
        held: GPU seconds held.
        training: those of training.
        publishing: those of publishing.
        starting: those of starting ranks, a part of what is left.
        losses: what ranks lost of training; parts that exceed it, because a rank waited before the
            function ran in all ranks, are cut off.
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


def added(parts: Iterable[GpuSeconds]) -> GpuSeconds:
    """Return the sums of GPU seconds."""
    listed = list(parts)
    return GpuSeconds(
        **{f.name: sum(getattr(part, f.name) for part in listed) for f in fields(GpuSeconds)}
    )


def largest_loss(seconds: GpuSeconds) -> str:
    """Return in one line what most GPU seconds were lost to, and how to reduce it.

    Args:
        seconds: the GPU seconds of a run.

    Returns:
        The line; "" if no loss reaches 5 GPU seconds and 5 % of those held.
    """
    lost = {kind: value for kind, value in seconds.kinds().items() if kind in _REMEDIES}
    kind = max(lost, key=lambda one: lost[one])
    if lost[kind] < max(_LEAST_SECONDS, _LEAST_SHARE * seconds.held):
        return ""
    how, remedy = _REMEDIES[kind]
    return f"{_amount(lost[kind], seconds.held)} {how}: {remedy}"


def _amount(lost: float, held: float) -> str:
    """Return GPU seconds of those held, as "12 of 40 GPU minutes"."""
    unit, size = "seconds", 1.0
    if held > _MOST_MINUTES:
        unit, size = "hours", 3600.0
    elif held > _MOST_SECONDS:
        unit, size = "minutes", 60.0
    return f"{lost / size:.3g} of {held / size:.3g} GPU {unit}"
