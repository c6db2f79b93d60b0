"""The results of `search` and `ablate`: frozen values with a readable repr, HTML in notebooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hopsgpu.core.gpu_losses import time_not_training
from hopsgpu.core.trials import AblationOutcome, SearchOutcome
from hopsgpu.display.ablation import card, text
from hopsgpu.display.search_cards import search_card
from hopsgpu.display.search_page import page
from hopsgpu.display.search_phrases import count_phrase, shorten_params


@dataclass(frozen=True)
class SearchResult(SearchOutcome):
    """The result of a search.

    Attributes:
        run_id: names the search's directory on the lake; `search(resume=run_id)` resumes it.
        best: params, value and number of the best trial; None if no trial is complete.
        trials: all trials in order of their numbers, including those of earlier runs of the study.
        study: Optuna's study, for its plots and for further use.
        direction: "minimize" or "maximize".
        metric: name of the metric that is optimized, or None.
        gpu_seconds: how the GPU time of this run was spent; `training` is that of the trials.
        timeline: `granted` is when the first executor was ready, `started` when the function of
            the first trial ran, `returned` when the last trial had ended.
        moments: GPUs held and used over time.
        warnings: warnings for the user.
        application: ID of the Spark application.
        queue: its YARN queue; "" without YARN.
    """

    __module__ = "hopsgpu.types"

    @property
    def time_not_training(self) -> str:
        """Most of the GPU time that was not spent training, and how to reduce it.

        The text is "" if little was lost, or if the run held GPUs for less than a minute of GPU
        time.
        """
        return time_not_training(self.gpu_seconds)

    def plot(self, path: str | Path) -> None:
        """Write a page with all trials and Optuna's plots, for a browser, to a local file.

        Args:
            path: path of the file; an existing file is overwritten.
        """
        Path(path).write_text(page(self), encoding="utf-8")

    def __repr__(self) -> str:
        # There may be thousands of trials; listed, they would hide what a person looks for.
        parts = [f"run_id={self.run_id!r}"]
        if self.best is not None:
            best = self.best
            parts.append(
                f"best={best.value:.6g} (trial {best.number}: {shorten_params(best.params)})"
            )
        parts.append(count_phrase(len(self.trials), self.states))
        parts += [f"warnings={self.warnings!r}"] if self.warnings else []
        parts += [str(self.timeline), str(self.gpu_seconds)]
        return f"SearchResult({', '.join(parts)})"

    def _repr_html_(self) -> str:
        return search_card(self)


@dataclass(frozen=True)
class AblationResult(AblationOutcome):
    """What each component is worth: the metric without it, compared with that of the whole.

    Attributes:
        run_id: names the search's directory on the lake.
        rows: the whole first, then one row per component.
        direction: "minimize" or "maximize".
        metric: name of the metric, or None.
        search: result of the search that ran the trials.
    """

    __module__ = "hopsgpu.types"

    search: SearchResult = field(repr=False)

    def __str__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        return card(self)
