"""Packages that the function names, on the real cluster: they travel, or are refused."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.errors import ConfigError
from tests.cluster.test_launch import quiet
from tests.conftest import until

pytestmark = pytest.mark.usefixtures("nothing_warmed")

# Beside each other in a directory on sys.path.
SOURCES = {
    "trip/__init__.py": "",
    "trip/train.py": """
        import trip_second

        class Model:
            def __init__(self, factor):
                self.factor = factor

            def __call__(self, x):
                return trip_second.add(self.factor * x)
        """,
    "trip/look.py": """
        import multiprocessing
        import subprocess
        import sys
        from importlib import resources

        from trip.train import Model

        def all_of_it():
            import trip_zip
            from trip import linked
            from trip_space.part import name

            files = resources.files("trip")
            tool = str(files / "bin" / "tool")
            code = "import trip.train; print(trip.train.Model(2)(20))"
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                spawned = pool.map(Model(1), [1])
            return {
                "spawned": spawned,
                "child": subprocess.check_output([sys.executable, "-c", code], text=True),
                "data": (files / "conf" / "base.yaml").read_text(),
                "tool": subprocess.check_output([tool], text=True),
                "zip": trip_zip.NAME,
                "linked": linked.add(0),
                "namespace": name,
                # Nobody names them in code.
                "added": [__import__(f"trip_added_{kind}").NAME for kind in ("py", "zip")],
            }

        def changed():
            return Model(1)(0)
        """,
    "trip/conf/base.yaml": "lr: 0.1",
    "trip/bin/tool": "#!/bin/sh\necho it runs",
    "trip_second.py": "def add(x):\n    return x + 1\n",
    "trip_space/part.py": "name = 'of a namespace'",
    "site-packages/trip_installed.py": "def work(x): ...",
}


def zipped(file: Path, module: str, source: str) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{module}/__init__.py", source)
    return file


@pytest.fixture
def src(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = tmp_path / "src"
    for name, source in SOURCES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(source))
    (root / "trip" / "bin" / "tool").chmod(0o755)
    (root / "trip" / "linked.py").symlink_to(root / "trip_second.py")
    Path(os.fsdecode(os.fsencode(root) + b"/trip/caf\xe9.txt")).touch()
    for entry in (
        root,
        root / "site-packages",
        zipped(tmp_path / "libs.zip", "trip_zip", "NAME = 'of a zip'"),
    ):
        monkeypatch.syspath_prepend(entry)
    before = set(sys.modules)
    yield root
    for name in set(sys.modules) - before:
        if name.startswith("trip"):
            del sys.modules[name]


def script_of(source: str) -> dict[str, Any]:
    """What a script defines, whose functions travel by value."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(textwrap.dedent(source), space)
    return space


def test_packages_that_the_function_names_travel_or_are_refused(
    spark: SparkSession, gpus_back: Callable[[], int], src: Path, tmp_path: Path
) -> None:
    added = tmp_path / "trip_added_py.py"
    added.write_text("NAME = 'a file'")
    spark.sparkContext.addPyFile(str(added))
    archive = zipped(tmp_path / "trip_added.zip", "trip_added_zip", "NAME = 'a zip'")
    spark.sparkContext.addPyFile(str(archive))
    installed = importlib.import_module("trip_installed")
    words = "refer to trip_installed, which the .* Python.* lacks: pass python_env="
    application = application_of(spark)
    application.has_module.clear()  # type: ignore[attr-defined]

    with pytest.raises(ConfigError, match=words) as refused:
        quiet(abs, args=(installed.work,))
    assert refused.value.result.timeline.granted is None

    script = script_of(
        """
        def helper():
            from trip.look import all_of_it
            return all_of_it()

        def train():
            try:
                import trip_missing
            except ImportError:
                return helper()
        """
    )
    with hopsgpu.hold(workers=1, progress="off") as gang:
        found = gang.launch(script["train"], progress="off")
        assert found.value == {
            "spawned": [2],
            "child": "41\n",
            "data": "lr: 0.1",
            "tool": "it runs\n",
            "zip": "of a zip",
            "linked": 1,
            "namespace": "of a namespace",
            "added": ["a file", "a zip"],
        }
        assert [w for w in found.warnings if "is not UTF-8" in w and "caf\\xe9.txt" in w]
        model = importlib.import_module("trip.train").Model(3)
        assert gang.launch(model, (4,), progress="off").value == 13
        changed = importlib.import_module("trip.look").changed
        (src / "trip_second.py").write_text("def add(x):\n    return 'changed'\n")
        assert gang.launch(changed, progress="off").value == "changed"
        with pytest.raises(ConfigError, match=words):
            gang.launch(abs, (installed.work,), progress="off")
        assert gang.launch(abs, (-1,), progress="off").value == 1

    # An executor that holds no GPU tells, while there is one; on a busy machine sometimes too late.
    def told() -> bool:
        assert spark.range(1000).repartition(2).count() == 1000
        with pytest.raises(ConfigError, match=words) as refused:
            quiet(abs, args=(installed.work,))
        known = dict(application.has_module)  # type: ignore[attr-defined]
        assert known in ({}, {"trip_installed": False})
        return bool(known) and refused.value.result.gpu_seconds.held == 0

    assert until(told)
