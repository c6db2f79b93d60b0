"""A Spark as distributions install it, as /usr/lib/spark: Python's packages have no PySpark."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.bounds import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[3]
# What a driver sees.
DRIVER = """
import importlib.util, json, os
assert importlib.util.find_spec("pyspark") is None
import hopsgpu
from hopsgpu import hold, inventory, launch, search
from hopsgpu.doctor.facts import machine_facts
machine = machine_facts(os.environ, {})
spark = hopsgpu.session("of-a-distribution", master="local[1]")
import pyspark
conf = spark.sparkContext.getConf()
rows = spark.range(3).rdd.map(lambda row: row.id + 1).collect()
print(json.dumps({
    "pyspark": pyspark.__file__,
    "seen": [machine.spark_home, machine.spark, machine.pyspark],
    "version": spark.version,
    "default": conf.get("spark.of.the.distribution"),
    "rows": rows,
}))
spark.stop()
"""
NO_SPARK = """
import hopsgpu
for name in ("session", "launch"):
    try:
        getattr(hopsgpu, name)("x")
    except hopsgpu.ConfigError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This Python's packages, without PySpark and Py4J."""
    directory = tmp_path_factory.mktemp("packages")
    found = importlib.util.find_spec("numpy")
    assert found is not None and found.origin is not None
    for entry in Path(found.origin).parents[1].iterdir():
        if not re.match(r"(pyspark|py4j|hopsgpu|__editable__|__pycache__)", entry.name):
            (directory / entry.name).symlink_to(entry)
    (directory / "hopsgpu").symlink_to(ROOT / "hopsgpu")
    return directory


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SPARK_HOME, with the parts of this Python's PySpark where Apache's archives have them."""
    home = tmp_path_factory.mktemp("usr") / "lib" / "spark"
    found = {name: importlib.util.find_spec(name) for name in ("pyspark", "py4j")}
    own = {name: Path(spec.origin).parent for name, spec in found.items() if spec and spec.origin}
    (home / "python" / "lib").mkdir(parents=True)
    for name in ("bin", "jars"):
        (home / name).symlink_to(own["pyspark"] / name)
    (home / "python" / "pyspark").mkdir()
    for entry in own["pyspark"].iterdir():
        if entry.name not in ("bin", "jars", "sbin", "__pycache__"):
            (home / "python" / "pyspark" / entry.name).symlink_to(entry)
    with zipfile.ZipFile(home / "python" / "lib" / "py4j-0.10.9-src.zip", "w") as archive:
        for module in own["py4j"].rglob("*.py"):
            archive.write(module, module.relative_to(own["py4j"].parent))
    (home / "conf").mkdir()
    (home / "conf" / "spark-defaults.conf").write_text("spark.of.the.distribution yes\n")
    return home


def run(text: str, packages: Path, tmp_path: Path, code: int = 0, **environ: str) -> str:
    gone = ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR", "PYSPARK_PYTHON", "SPARK_HOME")
    base = {name: value for name, value in os.environ.items() if name not in gone}
    done = subprocess.run(
        # Without site-packages, and so without files that add others to the path.
        [sys.executable, "-S", "-c", text],
        env={**base, "PYTHONPATH": str(packages), **environ},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout


@pytest.mark.soak
def test_a_session_runs_on_it(packages: Path, home: Path, tmp_path: Path) -> None:
    told = json.loads(run(DRIVER, packages, tmp_path, SPARK_HOME=str(home)).splitlines()[-1])
    assert told["pyspark"].startswith(str(home))
    assert told["seen"] == [str(home), told["version"], None]
    assert told["default"] == "yes"
    assert told["rows"] == [1, 2, 3]


def test_a_directory_that_is_no_spark_is_named(packages: Path, tmp_path: Path) -> None:
    told = run(NO_SPARK, packages, tmp_path, SPARK_HOME=str(tmp_path))
    assert told.count(f"no Spark was found: {tmp_path} has no python/lib/py4j-*.zip") == 2
    doctor = "from hopsgpu.cli.main import main; main(['doctor', '--no-session'])"
    told = run(doctor, packages, tmp_path, code=1, SPARK_HOME=str(tmp_path))
    assert f"no Spark was found in {tmp_path}" in told
