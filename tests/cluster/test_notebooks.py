"""The notebooks under examples/, run whole by a real kernel on the real cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from hopsgpu.cluster_managers.manager import ClusterManager
from tests.bounds import HANG_SECONDS

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"

# What the last outputs of each must say.
TOLD = {
    "search": ["SearchResult", "accuracy", "(whole)"],
    "tour": ["GangResult", "(0, 100)", "ZeroDivisionError"],
    "pytorch_on_the_lake": ["GangResult", "hdfs://", "accuracy"],
    "tensorflow_digits": ["GangResult", "'replicas': 2"],
}


def outputs(notebook: nbformat.NotebookNode) -> str:
    """All texts and pages of a notebook."""
    said = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            said.append(str(output.get("text", "")))
            said += [str(content) for content in output.get("data", {}).values()]
    return "\n".join(said)


def test_all_notebooks_are_run_here_and_kept_without_outputs() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(TOLD)
    for path in NOTEBOOKS.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert all(not cell.outputs and cell.execution_count is None for cell in cells), path.name


# Each of these are run by one kernel, one after the other. The first ones are run by
# `make also-secure` too.
TOGETHER = (("pytorch_on_the_lake", "tour"), ("search", "tensorflow_digits"))


# Ranks on the gangs that are held want no framework.
FIRST = """\
from hopsgpu.launcher import arguments
arguments.likely_imports = tuple
"""


def as_one(notebooks: Sequence[nbformat.NotebookNode]) -> nbformat.NotebookNode:
    """All their cells, which are the same objects, in one notebook, and for one application."""
    cells = [nbformat.v4.new_code_cell(FIRST), *notebooks[0].cells]
    for notebook in notebooks[1:]:
        assert cells.pop().source == "spark.stop()"
        cells += notebook.cells
    return nbformat.v4.new_notebook(cells=cells, metadata=notebooks[0].metadata)


def test_each_notebook_is_run() -> None:
    assert {name for names in TOGETHER for name in names} == set(TOLD)


@pytest.mark.soak
@pytest.mark.parametrize("names", TOGETHER, ids="-".join)
def test_notebooks(
    names: Sequence[str],
    manager: ClusterManager,
    gpus_back: Callable[[], int],
    tmp_path: Path,
) -> None:
    notebooks = {name: nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4) for name in names}
    whole = as_one([*notebooks.values()])
    for cell in whole.cells:
        # Trials on two GPUs show what those on four do, and ranks in a container those in two.
        cell.source = cell.source.replace("max_concurrent=4", "max_concurrent=2").replace(
            "workers=2", "workers=2, placement='pack'"
        )
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(whole, timeout=HANG_SECONDS, resources=resources).execute()
    for name, notebook in notebooks.items():
        # For whoever wants to look at it.
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
        said = outputs(notebook)
        for told in TOLD[name]:
            assert told in said, f"{told!r} is not in the outputs of {name}"
