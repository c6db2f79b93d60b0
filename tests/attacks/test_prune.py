"""Records of other users that name directories of the user who removes runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from click.testing import CliRunner

from hopsgpu.artifacts.runs import RunStore
from hopsgpu.cli.main import main
from hopsgpu.scoring.score import _ScoreRun
from hopsgpu.scoring.table_output import TableOutput
from hopsgpu.storage.lake import LakePath
from tests.attacks.users import as_other_user
from tests.unit.records import put_run

# The end of the name of a directory of somebody else, such as `.mail-2026`.
CHOSEN = "2026"
OWN = "score-20261121-120000-aaaaaa"


def _record(root: Path, run_id: str, kept: Path) -> None:
    put_run(root, run_id, ended=100.0, score={"kept_in": f"file://{kept}"})


@pytest.fixture
def victims(shared_dir: Path) -> Path:
    (shared_dir / "runs").mkdir()
    (shared_dir / "runs").chmod(0o777)
    mail = shared_dir / "home" / f".mail-{CHOSEN}"
    mail.mkdir(parents=True)
    (mail / "inbox").write_text("letters")
    return mail


def test_prune_removes_no_directory_that_another_users_record_names(
    shared_dir: Path, victims: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_other_user(lambda: _record(shared_dir, CHOSEN, victims))
    monkeypatch.setenv("HOPSGPU_ROOT", f"file://{shared_dir}")
    result = CliRunner().invoke(main, ["runs", "prune", "--keep", "0"])
    assert result.exit_code == 0, result.output
    assert not (shared_dir / "runs" / CHOSEN).exists()
    assert (victims / "inbox").read_text() == "letters"
    assert f"file://{victims} stays" in result.output and CHOSEN in result.output


def test_prune_removes_the_parts_that_the_users_own_record_names(
    shared_dir: Path, victims: Path
) -> None:
    parts = victims.parent / f".scored-{OWN}"
    parts.mkdir()
    _record(shared_dir, OWN, parts)
    assert RunStore(f"file://{shared_dir}").remove(OWN) is None
    assert not parts.exists()


def test_a_score_removes_no_directory_that_another_users_record_names(
    shared_dir: Path, victims: Path
) -> None:
    as_other_user(lambda: _record(shared_dir, CHOSEN, victims))
    parts = victims.parent / f".mail-{OWN}"
    parts.mkdir()
    _record(shared_dir, OWN, parts)
    run = SimpleNamespace(
        _active=SimpleNamespace(application=SimpleNamespace(root=f"file://{shared_dir}")),
        _output=TableOutput(LakePath(f"file://{victims.parent}/mail"), "present"),
    )
    _ScoreRun._sweep(cast(_ScoreRun, run))
    assert [path.name for path in victims.parent.iterdir()] == [victims.name]
