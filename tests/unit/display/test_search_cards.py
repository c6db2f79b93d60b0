"""What a search leaves to be looked at: a card, a page with Optuna's plots, an ablation's table."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from hopsgpu.core.trials import COMPLETE, FAILED, PRUNED, AblationRow
from hopsgpu.display import optuna_plots as plots
from hopsgpu.display.charts import held_image
from hopsgpu.display.search_cards import best_trials
from hopsgpu.display.search_page import page
from hopsgpu.tuning.search_results import AblationResult, SearchResult
from tests.bounds import HANG_SECONDS
from tests.unit.searches import result, trial

NASTY = "<script>alert(1)</script>"
STATES = (COMPLETE, PRUNED, COMPLETE, FAILED)


def searched(trials: int = 40) -> SearchResult:
    return result([trial(n, STATES[n % 4]) for n in range(trials)])


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna's plots, which take seconds, are left out."""
    monkeypatch.setattr(plots, "_draw_in_process", lambda given, seconds: [(b"", "left out")] * 3)


def test_a_result_is_short_however_many_trials_it_has() -> None:
    shown = repr(searched(1000))
    assert shown.startswith(
        "SearchResult(run_id='s-1', best=0.001001 (trial 998: lr=0.0001, optimizer=adam), "
        "1,000 trials: 500 complete, 250 pruned, 250 failed, Timeline("
    )
    assert len(shown) < 400


def test_a_card_has_the_best_trials_and_the_gpus_over_time() -> None:
    shown = searched()._repr_html_()
    for word in (
        "loss 0.025641 (trial 38)",
        "40 trials: 20 complete, 10 pruned, 10 failed",
        "trial 3 failed: ValueError: &lt;lr&gt; is too large",
        "waited 1.0 s",
        "held 40.0",
        "GPUs held and in use by trials",
        "data:image/svg+xml",
    ):
        assert word in shown, shown
    assert shown.count("<tr>") < 30


@pytest.mark.parametrize(("direction", "first"), [("minimize", 38), ("maximize", 0)])
def test_the_best_trials_are_those_of_the_direction(direction: str, first: int) -> None:
    best = best_trials(replace(searched(), direction=direction))
    assert len(best) == 10 and best[0].number == first
    assert all(one.state == COMPLETE for one in best)


def test_a_search_that_found_nothing_has_a_card_and_a_page() -> None:
    nothing = result([trial(0, FAILED)], moments=())
    assert "1 trial: 1 failed" in repr(nothing) and "1 failed" in nothing._repr_html_()
    said = "0 of the trials are complete; a plot needs at least 2"
    assert page(nothing).count(f"not drawn: {said}") == 3


@pytest.mark.usefixtures("undrawn")
def test_all_that_users_named_is_escaped() -> None:
    nasty = trial(0, params={NASTY: NASTY}, host=NASTY, gpu=NASTY)
    failed = trial(1, FAILED, params={NASTY: NASTY}, error=NASTY)
    given = replace(
        searched(), run_id=NASTY, metric=NASTY, trials=(nasty, failed), warnings=(NASTY,)
    )
    for shown in (given._repr_html_(), page(given)):
        assert shown.count("&lt;script&gt;") > 5 and "<script" not in shown


@pytest.mark.usefixtures("undrawn")
def test_a_page_has_all_trials_and_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "search.html"
    searched(3000).plot(path)
    shown = path.read_text(encoding="utf-8")
    assert shown.count("<tr><td>") == 3000
    assert not re.search(r"(src|href)=.(?!data:)", shown) and "@import" not in shown


def test_a_page_has_optunas_plots_without_a_display_and_nothing_is_left_here() -> None:
    """In a process of its own, for other tests may have imported pyplot."""
    code = """
        import sys
        from hopsgpu.display.search_page import page
        from tests.unit.display.test_search_cards import searched
        print(page(searched()))
        assert not {"matplotlib", "sklearn"} & set(sys.modules)
    """
    env = {name: value for name, value in os.environ.items() if name != "DISPLAY"}
    shown = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**env, "MPLBACKEND": "tkagg", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=HANG_SECONDS,
    ).stdout
    assert "not drawn" not in shown, re.findall("not drawn[^<]*", shown)
    pictures = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]*)" alt="([^"]*)"', shown)
    assert [title for _, title in pictures][1:] == list(plots.PLOTS.values())
    drawn = [base64.b64decode(content) for content, _ in pictures]
    assert all(b"<svg" in svg for svg in drawn)
    # Powers of ten are formulas of matplotlib's: no "$" is seen of them.
    assert b"mathdefault" in drawn[-1] and b'DejaVuSans-24"' not in drawn[-1]


@pytest.mark.usefixtures("undrawn")
def test_of_many_trials_the_best_are_lines() -> None:
    assert "Parallel coordinates<" in page(searched())
    assert "Parallel coordinates of the 1,000 best trials<" in page(searched(2004))


def test_a_name_that_is_no_formula_is_drawn_as_it_is() -> None:
    drawn = plots.optuna_plots(replace(searched(), metric=r"$\frac$"))
    assert [plot.missing for plot in drawn] == [""] * 3


LACKS = """
    import runpy, sys
    sys.modules["matplotlib"] = None  # any import of it fails
    runpy.run_module("hopsgpu.display.optuna_plots", run_name="__main__")
"""


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    program = tmp_path / "lacks.py"
    program.write_text(textwrap.dedent(LACKS))
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {program}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    drawn = plots.optuna_plots(searched())
    said = [plot.missing for plot in drawn if not plot.svg]
    assert len(said) == 3
    assert all("matplotlib" in missing and "pip install" in missing for missing in said)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo one >&2; echo last words >&2; exit 3", "exit code 3: last words"),
        ("kill -9 $$", "exit code -9"),
        ("exec sleep 60", "not draw it within 0.5 s"),
        ("echo no pickle", "UnpicklingError"),
    ],
)
def test_a_drawing_that_fails_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, said: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    drawn = plots.optuna_plots(searched(), seconds=0.5)
    assert [said in plot.missing for plot in drawn] == [True] * 3, drawn


def test_the_picture_of_held_gpus_has_an_area_for_each() -> None:
    address = held_image(((0.0, 4.0), (10.0, 4.0)), ((0.0, 2.0), (10.0, 2.0)), 138, 130)
    svg = base64.b64decode(address.partition(",")[2]).decode()
    held, used = re.findall(r'<polygon points="([^"]*)"', svg)
    assert held.split()[1] == "34.0,12.0" and used.split()[1] == "34.0,62.0"
    assert ">4<" in svg and ">10 s<" in svg


# --- ablation ----------------------------------------------------------------------------

ROWS = (
    AblationRow("", 0.9, 0.01, None, (0.89, 0.91)),
    AblationRow("little", 0.89, 0.02, -0.01, (0.87, 0.91)),
    AblationRow("nothing", None, None, None, (), 2),
    AblationRow("much", 0.5, None, -0.4, (0.5,), 1),
    AblationRow(NASTY, 0.95, 0.0, 0.05, (0.95, 0.95)),
)


def ablated(direction: str) -> AblationResult:
    return AblationResult("a-1", ROWS, direction, "accuracy", searched(4))


@pytest.mark.parametrize(
    ("direction", "order"),
    [
        ("maximize", ["(whole)", "much", "little", NASTY, "nothing"]),
        ("minimize", ["(whole)", NASTY, "little", "much", "nothing"]),
    ],
)
def test_an_ablation_is_sorted_by_what_components_are_worth(
    direction: str, order: list[str]
) -> None:
    header, *lines = str(ablated(direction)).splitlines()
    assert [line.split()[0] for line in lines] == order
    columns = "without accuracy spread difference worth trials failed"
    assert " ".join(header.split()) == columns
    assert len({len(line.rstrip()) for line in [header, *lines[-1:]]}) == 1


def test_an_ablations_table_says_what_each_component_is_worth() -> None:
    lines = {line.split()[0]: line.split()[1:] for line in str(ablated("maximize")).splitlines()}
    assert lines["(whole)"] == ["0.9", "±0.01", "2"]
    assert lines["much"] == ["0.5", "-0.4", "+0.4", "1", "1"]
    assert lines["nothing"] == ["0", "2"]
    shown = ablated("maximize")._repr_html_()
    assert "&lt;script&gt;" in shown and "<script" not in shown
    assert shown.index("much") < shown.index("little") < shown.index("nothing")


def test_an_ablation_without_rows_has_a_table() -> None:
    assert str(replace(ablated("maximize"), rows=())).startswith("without")
