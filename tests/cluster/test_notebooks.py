"""The notebooks under examples/, run whole by a real kernel on the real cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from hopsgpu.yarn.resource_manager import ResourceManager

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
CELL_SECONDS = 200

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


# Of searches and TensorFlow others tell here: tests/cluster/test_docs.py and test_frameworks.py.
SOAK = ("search", "tensorflow_digits")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak if name in SOAK else ()) for name in sorted(TOLD)],
)
def test_a_notebook(
    name: str,
    manager: ResourceManager,
    gpus_back: Callable[[], int],
    tmp_path: Path,
) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=CELL_SECONDS, resources=resources).execute()
    # For whoever wants to look at it.
    nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    said = outputs(notebook)
    for told in TOLD[name]:
        assert told in said, f"{told!r} is not in the outputs of {name}"
