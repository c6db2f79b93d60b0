"""What `search` and `ablate` return: frozen values with a readable repr, in notebooks as HTML."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hopsgpu.core.trials import AblationOutcome, SearchOutcome
from hopsgpu.display.ablation import card, text
from hopsgpu.display.search_cards import search_card
from hopsgpu.display.search_page import page
from hopsgpu.display.search_phrases import ends, shortened


@dataclass(frozen=True)
class SearchResult(SearchOutcome):
    """What a search left.

    Attributes:
        run_id: names the search's directory on the lake; `search(resume=run_id)` goes on with it.
        best: params, value and number of the best trial; None where none is complete.
        trials: all, in the order of their numbers, those of earlier runs of the study among them.
        study: Optuna's, for its plots and its further use.
        direction: "minimize" or "maximize".
        metric: name of what is searched for, or None.
        gpu_seconds: where the GPU time of this run went; `training` is that of trials.
        timeline: `granted` is when the first executor was ready, `started` when the function of
            the first trial ran, `returned` when the last trial had ended.
        moments: GPUs held and used over time.
        warnings: what a person should know.
    """

    __module__ = "hopsgpu"

    def plot(self, path: str | Path) -> None:
        """Writes a page with all trials and Optuna's plots, for a browser, to a local file.

        Args:
            path: of the file; one that is there is written over.
        """
        Path(path).write_text(page(self), encoding="utf-8")

    def __repr__(self) -> str:
        # Trials are thousands; what a person looks for must be seen beside them.
        parts = [f"run_id={self.run_id!r}"]
        if self.best is not None:
            best = self.best
            parts.append(f"best={best.value:.6g} (trial {best.number}: {shortened(best.params)})")
        parts.append(ends(len(self.trials), self.states))
        parts += [f"warnings={self.warnings!r}"] if self.warnings else []
        parts += [str(self.timeline), str(self.gpu_seconds)]
        return f"SearchResult({', '.join(parts)})"

    def _repr_html_(self) -> str:
        return search_card(self)


@dataclass(frozen=True)
class AblationResult(AblationOutcome):
    """What each component is worth: the metric without it, against that of the whole.

    Attributes:
        run_id: names the search's directory on the lake.
        rows: the whole first, then a row for each component.
        direction: "minimize" or "maximize".
        metric: name of what was measured, or None.
        search: its trials.
    """

    __module__ = "hopsgpu"

    search: SearchResult = field(repr=False)

    def __str__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        return card(self)
