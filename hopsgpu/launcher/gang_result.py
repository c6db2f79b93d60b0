"""What `launch` returns: frozen values with a readable repr, in notebooks as HTML."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hopsgpu.core.run_values import RunOutcome
from hopsgpu.display.cards import result_card
from hopsgpu.units import counted

if TYPE_CHECKING:
    from hopsgpu.artifacts.models import ModelVersion


@dataclass(frozen=True)
class GangResult(RunOutcome):
    """What a run left.

    Attributes:
        values: what the function returned, one per rank, in order.
        run_id: names the run's directory on the lake.
        metrics: per rank what it reported last, by name, with "step"; and of its n-th GPU
            "gpu.n.utilisation", "gpu.n.memory_peak" and what else NVML tells.
        warnings: what a person should know.
        ranks: a report for each rank that has ended, in order; none of one whose executor was
            lost.
        model: the published version, or None.
        timeline: when each point was passed.
        gpu_seconds: where the GPU time went.
    """

    __module__ = "hopsgpu"

    model: ModelVersion | None = None

    @property
    def value(self) -> Any:
        """Rank 0's value; None where there is none."""
        return self.values[0] if self.values else None

    def __repr__(self) -> str:
        # Values can be of any size; what a person looks for must be seen beside them.
        parts = [f"run_id={self.run_id!r}", f"values={reprlib.repr(self.values)}"]
        if self.model is not None:
            parts.append(f"model={self.model.url!r}")
        parts += [f"warnings={self.warnings!r}"] if self.warnings else []
        parts += [counted(len(self.ranks), "rank"), str(self.timeline), str(self.gpu_seconds)]
        return f"GangResult({', '.join(parts)})"

    def _repr_html_(self) -> str:
        return result_card(self)
