"""Optuna's own plots of a study, drawn by a separate process.

Optuna draws with pyplot, whose figures, style and backend are global to the process: a notebook
would show them, and a program with windows would open some.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hopsgpu.core.trials import COMPLETE, SearchOutcome

if TYPE_CHECKING:
    import optuna

_LINES_OF_TRIALS = "plot_parallel_coordinate"
_IMPORTANCES = "plot_param_importances"
PLOTS = {
    "plot_optimization_history": "Optimisation history",
    _IMPORTANCES: "Hyperparameter importances",
    _LINES_OF_TRIALS: "Parallel coordinates",
}
_SECONDS = 120.0
_LEAST = 2
# More lines are illegible, and take hundreds of megabytes.
_MAX_LINES = 1000
_INSTALL = "pip install optuna matplotlib scikit-learn"


@dataclass(frozen=True)
class OptunaPlot:
    """One of Optuna's plots.

    Attributes:
        missing: why there is no picture, in one line.
    """

    title: str
    svg: bytes = b""
    missing: str = ""


def optuna_plots(result: SearchOutcome, seconds: float = _SECONDS) -> Sequence[OptunaPlot]:
    """Return Optuna's plots of a search; a plot that cannot be drawn says why."""
    complete = result.states.get(COMPLETE, 0)
    if complete < _LEAST:
        return _none(f"{complete} of the trials are complete; a plot needs at least {_LEAST}")
    titles = dict(PLOTS)
    if complete > _MAX_LINES:
        titles[_LINES_OF_TRIALS] += f" of the {_MAX_LINES:,} best trials"
    try:
        pickled = pickle.dumps((result.direction, result.metric, result.study.get_trials(False)))
        plots = _draw_in_process(pickled, seconds)
        return [
            OptunaPlot(title, svg, missing)
            for title, (svg, missing) in zip(titles.values(), plots, strict=True)
        ]
    except subprocess.TimeoutExpired:
        return _none(f"Optuna did not draw it within {seconds:g} s")
    except Exception as error:  # noqa: BLE001 - a storage's, a pickle's; said on the page
        return _none(f"{type(error).__name__}: {error}")


def _none(missing: str) -> Sequence[OptunaPlot]:
    return [OptunaPlot(title, missing=missing) for title in PLOTS.values()]


def _draw_in_process(pickled: bytes, seconds: float) -> list[tuple[bytes, str]]:
    """Return for each plot the picture, or why there is none."""
    process = subprocess.run(
        [sys.executable, "-P", "-m", __name__],
        input=pickled,
        capture_output=True,
        timeout=seconds,
        check=False,
        # The process has the same import path; agg, because a notebook's backend draws there.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MPLBACKEND": "agg"},
    )
    if process.returncode:
        last = process.stderr.decode(errors="replace").strip().splitlines()[-1:]
        reason = f"drawing ended with exit code {process.returncode}: {''.join(last)}"
        return [(b"", reason) for _ in PLOTS]
    pictures: list[tuple[bytes, str]] = pickle.loads(process.stdout)
    return pictures


def _main() -> None:
    """Read trials from stdin and write pictures to stdout, in the drawing process."""
    direction, metric, trials = pickle.load(sys.stdin.buffer)
    out = os.fdopen(os.dup(1), "wb")
    # Other output on stdout must not mix with the pictures.
    os.dup2(2, 1)
    plots = [_draw(name, direction, metric, trials) for name in PLOTS]
    out.write(pickle.dumps(plots))
    out.close()


def _draw(name: str, direction: str, metric: str | None, trials: list[Any]) -> tuple[bytes, str]:
    try:
        import matplotlib
        import optuna
        from matplotlib import pyplot
        from optuna.visualization import matplotlib as drawing

        # Matplotlib parses text between two "$" as a formula, in the user's names, too.
        has_own = "$" in repr((metric, [trial.params for trial in trials]))
        matplotlib.rcParams["text.parse_math"] = not has_own
        if name == _LINES_OF_TRIALS:
            trials = _best(trials, direction)
        study = optuna.create_study(direction=direction)
        study.add_trials(trials)
        # The importances accept a name only together with a function of the trials.
        has_name = metric is not None and name != _IMPORTANCES
        named = {"target_name": metric} if has_name else {}
        axes = getattr(drawing, name)(study, **named)
        picture = io.BytesIO()
        axes.figure.savefig(picture, format="svg", bbox_inches="tight")
        pyplot.close("all")
        return picture.getvalue(), ""
    except ImportError as error:
        return b"", f"{error}: {_INSTALL}"
    except Exception as error:  # noqa: BLE001 - Optuna's, said on the page
        return b"", f"{type(error).__name__}: {error}"


def _best(trials: list[optuna.trial.FrozenTrial], direction: str) -> list[optuna.trial.FrozenTrial]:
    """Return the best complete trials, if there are many."""
    from optuna.trial import TrialState

    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    complete.sort(key=lambda trial: trial.value, reverse=direction == "maximize")
    return complete[:_MAX_LINES]


if __name__ == "__main__":
    _main()
