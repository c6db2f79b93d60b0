"""Imports point down only, and nothing heavy is imported where it must not be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "hopsgpu"

# From the bottom; a module may import from its own row and from those above it here.
LAYERS = (
    ("errors", "frames"),
    ("boundary", "units", "spec", "gpu_types", "html", "screens", "outlet", "direct"),
    ("enumerations", "imports", "sources", "refusing"),
    ("mainmodule", "reducing"),
    ("pickling", "spawned", "locating", "module_files", "modules"),
    ("gang", "turns"),
    ("stores", "discovery", "frameworks"),
    ("worker", "data", "python_env"),
    ("spark", "yarn", "cluster", "local"),
    (
        "failures",
        "native",
        "retries",
        "values",
        "background",
        "call",
        "provenance",
        "tracking",
        "mlflow_log",
    ),
    (
        "results",
        "trials",
        "displays",
        "progress",
        "display",
        "output",
        "run",
        "records",
        "recording",
        "interrupts",
    ),
    ("arguments", "travelling", "planning", "meeting", "beginning", "ending", "publishing"),
    ("run_message", "feeding", "preparing", "training", "execution"),
    ("holding", "launcher"),
    ("study", "doctor"),
    ("cli",),
)
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    """Modules of hopsgpu, and the first names of others, that a module imports anywhere."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def names(path: Path, paths: list[str]) -> list[str]:
    """The parts of hopsgpu among imports; `from hopsgpu import x` counts as x."""
    return [name.split(".")[1] for name in paths if name.startswith("hopsgpu.")]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = LEVEL[part_of(path)]
    for name in names(path, imports(path)):
        assert LEVEL[name] <= own, f"{path.relative_to(PACKAGE)} imports hopsgpu.{name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_spark_stays_in_its_place(path: Path) -> None:
    firsts = {name.split(".")[0] for name in imports(path)}
    if part_of(path) not in ("spark", "arguments"):
        assert not firsts & {"pyspark", "py4j"}
    assert not firsts & {"torch", "tensorflow"}


def test_import_is_light() -> None:
    """`import hopsgpu` needs none of the packages that are slow or may be absent."""
    heavy = (
        "pyspark",
        "torch",
        "pyarrow",
        "fsspec",
        "hdfs",
        "hdfs_native",
        "requests",
        "click",
        "mlflow",
    )
    code = (
        f"import sys; heavy = {heavy!r}\n"
        "for name in heavy: sys.modules[name] = None\n"  # any import of it fails
        "import hopsgpu; hopsgpu.ConfigError; hopsgpu.context"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
