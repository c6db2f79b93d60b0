"""Imports between packages point down only, and nothing heavy is imported where it must not be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.bounds import HANG_SECONDS

PACKAGE = Path(__file__).resolve().parents[2] / "hopsgpu"

# From the bottom. A package imports from rows above its own here, never from its own row or below.
LAYERS = (
    ("lazy_names", "linux", "terminal_text", "tracebacks"),
    ("errors",),
    ("units",),
    ("core",),
    ("storage", "gpu", "frameworks"),
    ("serving",),
    ("artifacts",),
    ("data", "packaging", "display"),
    ("rank", "tracking"),
    ("control",),
    ("agent", "cluster_managers"),
    ("backends",),
    ("attempts", "spark", "monitoring"),
    ("runs",),
    ("executors",),
    ("launcher",),
    ("tuning", "scoring"),
    ("devcluster",),
    ("doctor", "web"),
    ("cli",),
)
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}
# What users import is above everything.
TOP = {PACKAGE / "__init__.py", PACKAGE / "types.py"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path not in TOP)
# At most these lie beside the packages.
AT_THE_ROOT = {"__init__", "errors", "lazy_names", "linux", "types", "units"}
AT_THE_ROOT |= {"terminal_text", "tracebacks"}


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Full names of what a module imports anywhere, also late and for annotations alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_packages() -> Mapping[str, Mapping[str, list[str]]]:
    """For each package the packages that it imports, with the modules that do so."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in MODULES:
        for name in imports(path):
            first, *rest = name.split(".")
            if first != "hopsgpu":
                continue
            # `import hopsgpu` and `from hopsgpu import launch` count as the public names, which
            # are above everything.
            other = rest[0] if rest and rest[0] in LEVEL else "hopsgpu"
            if other != package_of(path):
                found[package_of(path)][other].append(str(path.relative_to(PACKAGE)))
    return found


def test_every_package_has_its_layer() -> None:
    assert {package_of(path) for path in MODULES} == set(LEVEL)
    assert {path.stem for path in PACKAGE.glob("*.py")} == AT_THE_ROOT


def test_imports_point_down() -> None:
    wrong = [
        f"{module} imports hopsgpu.{other}"
        for package, others in imported_packages().items()
        for other, modules in others.items()
        for module in modules
        if other == "hopsgpu" or LEVEL[other] >= LEVEL[package]
    ]
    assert not wrong


def test_no_two_modules_have_one_name_but_for_one_interface() -> None:
    """Backends implement one, and cluster managers another one.

    Left out: commands, and `spark` with its names for administrators.
    """
    named: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        if path.stem != "__init__" and package_of(path) not in ("cli", "spark"):
            named[path.stem].append(str(path.relative_to(PACKAGE)))
    twice = {name: found for name, found in named.items() if len(found) > 1}
    places = ("backends/", "cluster_managers/")
    wrong = {
        name: paths
        for name, paths in twice.items()
        if not any(all(path.startswith(place) for path in paths) for place in places)
    }
    assert not wrong


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_spark_stays_in_its_place(path: Path) -> None:
    firsts = {name.split(".")[0] for name in imports(path)}
    inner = str(path.relative_to(PACKAGE))
    # These name Spark's classes as the types of what users pass and get.
    types = ("backends/gang_application.py", "launcher/options.py", "scoring/score_results.py")
    if not inner.startswith(("backends/spark/", "spark/")) and inner not in types:
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
        "prometheus_client",
    )
    code = (
        f"import sys; heavy = {heavy!r}\n"
        "for name in heavy: sys.modules[name] = None\n"  # any import of it fails
        "import hopsgpu; hopsgpu.ConfigError; hopsgpu.context"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_SECONDS)
