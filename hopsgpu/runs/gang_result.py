"""The result that `launch` returns: frozen, with a readable repr, and HTML in notebooks."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hopsgpu.core.gpu_losses import time_not_training
from hopsgpu.core.run_values import RunOutcome
from hopsgpu.display.cards import result_card
from hopsgpu.units import count_of

if TYPE_CHECKING:
    from hopsgpu.artifacts.models import ModelVersion


@dataclass(frozen=True)
class GangResult(RunOutcome):
    """The result of a run.

    Attributes:
        values: the function's return values, one per rank, in order.
        run_id: id of the run, and name of its directory on the lake.
        metrics: for each rank the values that it reported last, by name, with "step"; and for its
            n-th GPU "gpu.n.utilisation", "gpu.n.memory_peak" and the other values that NVML
            provides.
        warnings: warnings for people.
        ranks: a report for each rank that has ended, in order; none for a rank whose executor was
            lost.
        model: the published version, or None.
        timeline: when the run passed each point.
        gpu_seconds: how the GPU time was spent.
        worlds: the worlds of an elastic gang, in order; none for a gang of one size.
        application: ID of the Spark application.
        queue: its YARN queue; "" without YARN.
        failed_rank: the rank that failed first and ended the run; or None.
    """

    __module__ = "hopsgpu"

    model: ModelVersion | None = None

    @property
    def value(self) -> Any:
        """Rank 0's value; None if there is none."""
        return self.values[0] if self.values else None

    @property
    def time_not_training(self) -> str:
        """Most of the GPU time that was not spent training, and how to reduce it.

        The text is "" if little was lost, or if the run held GPUs for less than a minute of GPU
        time.
        """
        return time_not_training(self.gpu_seconds)

    def __repr__(self) -> str:
        # Values can be of any size; they must not hide the other fields.
        parts = [f"run_id={self.run_id!r}", f"values={reprlib.repr(self.values)}"]
        if self.model is not None:
            parts.append(f"model={self.model.url!r}")
        parts += [f"warnings={self.warnings!r}"] if self.warnings else []
        if self.worlds:
            sizes = reprlib.repr([world.ranks for world in self.worlds])
            parts.append(f"{count_of(len(self.worlds), 'world')} of {sizes} ranks")
        parts += [count_of(len(self.ranks), "rank"), str(self.timeline), str(self.gpu_seconds)]
        return f"GangResult({', '.join(parts)})"

    def _repr_html_(self) -> str:
        return result_card(self)
