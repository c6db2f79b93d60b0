"""What an administrator installs: spark-conf/, spark-scripts/ and yarn-scripts/."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path

import pytest

from hopsgpu.backends.spark.package_archive import ARCHIVES, PY_FILES
from hopsgpu.backends.spark.settings import check_session, session_defaults
from hopsgpu.backends.spark.submit_arguments import (
    Shipped,
    split_options,
    submit_arguments,
)
from hopsgpu.devcluster import admin
from hopsgpu.devcluster.config import ClusterSpec, SiteConf
from hopsgpu.devcluster.config_files import write_conf, write_spark_conf
from hopsgpu.devcluster.hadoop_jars import pyspark_home
from hopsgpu.devcluster.layout import ClusterLayout
from hopsgpu.devcluster.node_gpus import plan_gpus
from hopsgpu.devcluster.ports import port_names
from hopsgpu.devcluster.state import ClusterState
from hopsgpu.errors import ConfigError
from hopsgpu.gpu.script_archive import ALIAS
from hopsgpu.storage.spark_defaults import read_properties, spark_defaults
from tests.bounds import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[3]
DEFAULTS = ROOT / "spark-conf" / "spark-defaults.conf"
YARN = ROOT / "yarn-scripts"
SUBMIT = YARN / "hopsgpu-submit"
CALCULATOR = "ResourceCalculator"
XML = sorted(path.stem for path in YARN.glob("*.xml"))
# What Hadoop's own list of properties has not: names of one script, and what its documentation
# alone has.
UNLISTED = {
    "yarn.nodemanager.health-checker.script.path",
    "yarn.nodemanager.health-checker.script.timeout-ms",
    "yarn.nodemanager.linux-container-executor.group",
}


def with_every_line(tmp_path: Path) -> dict[str, str]:
    """spark-defaults.conf with the commented-out lines too."""
    whole = tmp_path / "whole.conf"
    whole.write_text(re.sub(r"^#(?=spark\.)", "", DEFAULTS.read_text(), flags=re.MULTILINE))
    return read_properties(whole)


def test_the_file_says_what_a_session_sets(tmp_path: Path) -> None:
    said = with_every_line(tmp_path)
    assert said.pop("spark.master") == "yarn"
    assert said.pop(ARCHIVES).endswith(f"#{ALIAS}")
    assert said.pop(PY_FILES).endswith("/hopsgpu-shipped.zip")
    assert said == dict(session_defaults("yarn"))


def test_a_context_that_reads_the_whole_file_can_hold_gangs(tmp_path: Path) -> None:
    check_session(with_every_line(tmp_path))


def test_the_daemon_is_named_only_where_the_package_is_shipped() -> None:
    """Every PySpark application would fail on executors that lack the package."""
    said = read_properties(DEFAULTS)
    assert "spark.python.daemon.module" not in said
    assert PY_FILES not in said


def test_hadoop_knows_every_property_of_the_fragments() -> None:
    jar = next((pyspark_home() / "jars").glob("hadoop-client-api-*.jar"))
    with zipfile.ZipFile(jar) as archive:
        known = ET.fromstring(archive.read("yarn-default.xml"))
    names = {row.findtext("name") for row in known.iter("property")}
    for file in (name for name in XML if not name.startswith("capacity-scheduler")):
        assert set(admin.yarn_file(file)) - UNLISTED <= names, file


def test_both_ways_of_isolation_count_the_same_gpus() -> None:
    plain, isolated = map(admin.yarn_file, ("yarn-site-gpus", "yarn-site-gpus-isolated"))
    plugin = {name for name in plain if ".resource-plugins" in name}
    assert {name: isolated[name] for name in plugin} == {name: plain[name] for name in plugin}
    executor = "yarn.nodemanager.container-executor.class"
    assert plain[executor].endswith(".DefaultContainerExecutor")
    assert isolated[executor].endswith(".LinuxContainerExecutor")
    assert "UNTRIED" in (YARN / "yarn-site-gpus-isolated.xml").read_text()


@pytest.mark.parametrize(
    ("file", "parts"), [("capacity-scheduler", 1), ("capacity-scheduler-gpu-shares", 3)]
)
def test_the_queues_come_to_a_whole(file: str, parts: int) -> None:
    said = admin.yarn_file(file)
    queue = "yarn.scheduler.capacity.root"
    queues = said[f"{queue}.queues"].split(",")
    shares = [re.findall(r"(\d+)(?:%|$)", said[f"{queue}.{name}.capacity"]) for name in queues]
    assert [sum(map(int, part)) for part in zip(*shares, strict=True)] == [100] * parts
    assert said["yarn.scheduler.capacity.resource-calculator"].endswith(".Dominant" + CALCULATOR)
    named = {key.split(".")[4] for key in said if key.startswith(f"{queue}.")} - {"queues"}
    assert named == set(queues)


def test_each_file_is_told_of() -> None:
    for directory in (YARN, ROOT / "spark-conf", ROOT / "spark-scripts"):
        told = (directory / "README.md").read_text()
        for file in directory.iterdir():
            assert file.name == "README.md" or f"`{file.name}`" in told, file


def test_the_development_cluster_is_made_of_them(tmp_path: Path) -> None:
    for link in admin.HOME.iterdir():
        assert link.resolve() == ROOT / link.name
    layout = ClusterLayout(tmp_path)
    conf = SiteConf(sites={"yarn-site": {"yarn.nodemanager.health-checker.interval-ms": "7"}})
    spec = ClusterSpec(nodes=1, conf=conf)
    ports = {name: 20000 + i for i, name in enumerate(port_names(spec.daemons))}
    state = ClusterState(spec, "simulated", "/jdk", ports)
    write_conf(layout, state, plan_gpus(tmp_path, 1, 2))
    node = admin.site_properties(layout.conf("node1") / "yarn-site.xml")
    own = {
        "yarn.nodemanager.resource-plugins.gpu.path-to-discovery-executables": str(
            layout.node("node1") / "bin"
        ),
        "yarn.nodemanager.health-checker.script.path": str(admin.HEALTH_CHECK),
        # A user's own wins.
        "yarn.nodemanager.health-checker.interval-ms": "7",
    }
    for file in ("yarn-site-gpus", "yarn-site-health"):
        expected = {**admin.yarn_file(file), **own}
        assert {name: node[name] for name in expected} == expected
    for file in ("resource-types", "capacity-scheduler"):
        written = admin.site_properties(layout.client / f"{file}.xml")
        assert admin.yarn_file(file).items() <= written.items()
    spark_conf = write_spark_conf(layout, state, Path("/spark"))
    client = spark_defaults({"SPARK_CONF_DIR": str(spark_conf)})
    assert read_properties(DEFAULTS).items() <= client.items()


def test_a_standalone_cluster_is_made_of_them_too(tmp_path: Path) -> None:
    layout = ClusterLayout(tmp_path)
    spec = ClusterSpec(nodes=1, is_standalone=True)
    ports = {name: 20000 + i for i, name in enumerate(port_names(spec.daemons))}
    state = ClusterState(spec, "simulated", "/jdk", ports)
    write_conf(layout, state, plan_gpus(tmp_path, 1, 2))
    worker = read_properties(layout.spark_daemon_conf("node1"))
    script = Path(worker["spark.worker.resource.gpu.discoveryScript"])
    assert script.samefile(ROOT / "spark-scripts" / "worker-gpus")
    client = spark_defaults({"SPARK_CONF_DIR": str(write_spark_conf(layout, state, Path("/s")))})
    expected = {k: v for k, v in read_properties(DEFAULTS).items() if ".yarn." not in k}
    assert expected.pop("spark.master") == "yarn"
    assert expected.items() <= client.items()
    assert not [name for name in client if name.startswith("spark.yarn.")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("spark.a b c\n", {"spark.a": "b c"}),
        ("spark.a=b\nspark.c:d\n\n# spark.e f\n ! x\n", {"spark.a": "b", "spark.c": "d"}),
        ("spark.a   =  b  \n", {"spark.a": "b"}),
        ("spark.a b,\\\n    c\nspark.d e", {"spark.a": "b,c", "spark.d": "e"}),
        ("spark.a\n", {"spark.a": ""}),
        ("spark.a C\\:\\\\x\\u0041\\t.\n", {"spark.a": "C:\\xA\t."}),
        ("spark.a b\\\\\nspark.c d\n", {"spark.a": "b\\", "spark.c": "d"}),
    ],
)
def test_properties_are_read_as_java_reads_them(
    tmp_path: Path, text: str, found: dict[str, str]
) -> None:
    file = tmp_path / "some.conf"
    file.write_text(text)
    assert read_properties(file) == found


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_properties(tmp_path)
    assert spark_defaults({"SPARK_HOME": str(tmp_path)}) == {}
    assert spark_defaults({}) == {}


@pytest.mark.parametrize(
    ("given", "options", "rest"),
    [
        (["a.py", "--conf", "x"], [], ["a.py", "--conf", "x"]),
        (
            ["--queue", "q", "-v", "--conf=a=b", "a.py", "-x"],
            [("--queue", "q"), ("-v",), ("--conf=a=b",)],
            ["a.py", "-x"],
        ),
        (["--version"], [("--version",)], []),
        (["--queue"], [("--queue",)], []),
    ],
)
def test_the_scripts_own_arguments_are_left_alone(
    given: list[str], options: list[tuple[str, ...]], rest: list[str]
) -> None:
    assert split_options(given) == (options, rest)


def conf_of(words: list[str]) -> dict[str, str]:
    """The properties in spark-submit's arguments; a later one wins."""
    pairs = zip(words, words[1:], strict=False)
    return dict(value.split("=", 1) for name, value in pairs if name == "--conf")


def submitted(given: list[str], defaults: dict[str, str]) -> list[str]:
    return submit_arguments(given, defaults, Shipped(Path("/s/d.tar.gz"), Path("/s/h.zip")))


def test_what_a_session_sets_and_ships_is_on_the_command_line() -> None:
    words = submitted(["--queue", "q", "a.py", "1"], {})
    found = conf_of(words)
    assert session_defaults("yarn").items() <= found.items()
    assert words[:2] == ["--master", "yarn"]
    assert words[-2:] == ["a.py", "1"]
    assert found[ARCHIVES] == f"file:///s/d.tar.gz#{ALIAS}"
    assert found[PY_FILES] == "file:///s/h.zip"
    check_session({"spark.master": "yarn", **found})


def test_the_users_own_word_wins_and_is_joined_where_ours_would_replace_it(tmp_path: Path) -> None:
    mine = "spark.dynamicAllocation.maxExecutors=3"
    words = submitted(["--conf", mine, "--conf", f"{ARCHIVES}=e.tgz#e", "a.py"], {})
    assert conf_of(words)["spark.dynamicAllocation.maxExecutors"] == "3"
    assert conf_of(words)[ARCHIVES] == f"e.tgz#e,file:///s/d.tar.gz#{ALIAS}"
    # Those of spark-defaults.conf, unless another file is read in its place.
    defaults = {ARCHIVES: "d.tgz#d", PY_FILES: "p.zip"}
    found = conf_of(submitted(["a.py"], defaults))
    assert found[ARCHIVES].startswith("d.tgz#d,")
    assert found[PY_FILES] == "p.zip,file:///s/h.zip"
    own = tmp_path / "own.conf"
    own.write_text(f"{ARCHIVES} o.tgz#o\n")
    found = conf_of(submitted(["--properties-file", str(own), "a.py"], defaults))
    assert found[ARCHIVES].startswith("o.tgz#o,")
    assert found[PY_FILES] == "file:///s/h.zip"
    both = ["--load-spark-defaults", "--properties-file", str(own), "a.py"]
    assert conf_of(submitted(both, defaults))[PY_FILES].startswith("p.zip,")


FAKE = """#!/bin/sh
exec {python} -c '
import json, os, sys
print(json.dumps([sys.argv[1:], os.environ["PYSPARK_PYTHON"], sys.stdin.read()]))
sys.exit(7)
' "$@"
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A Spark whose spark-submit prints its arguments, and ends with exit code 7."""
    submit = tmp_path / "spark" / "bin" / "spark-submit"
    submit.parent.mkdir(parents=True)
    submit.write_text(FAKE.format(python=sys.executable))
    submit.chmod(0o755)
    return tmp_path / "spark"


def run_submit(home: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    base = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
    return subprocess.run(
        ["sh", str(SUBMIT), *arguments],
        env={**base, "SPARK_HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), **environ},
        input="typed",
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def test_the_wrapper_hands_over_to_spark_submit(home: Path) -> None:
    weird = ["it's", 'a "b"', "$HOME", "", "two\nlines"]
    ran = run_submit(home, "--name", "x y", "a.py", *weird, PYSPARK_PYTHON=sys.executable)
    assert ran.returncode == 7, ran.stderr
    words, python, typed = json.loads(ran.stdout)
    assert words[-len(weird) - 1 :] == ["a.py", *weird]
    assert words[words.index("--name") + 1] == "x y"
    assert (python, typed) == (sys.executable, "typed")
    found = conf_of(words)
    archive = Path(found[ARCHIVES].removeprefix("file://").removesuffix(f"#{ALIAS}"))
    assert archive.is_relative_to(home / "cache")
    with tarfile.open(archive) as scripts:
        assert "gpus-1" in scripts.getnames()
    with zipfile.ZipFile(found[PY_FILES].removeprefix("file://")) as package:
        assert "hopsgpu/spark/daemon.py" in package.namelist()
    assert {path.name for path in archive.parent.iterdir()} == {
        "hopsgpu-discovery.tar.gz",
        "hopsgpu-shipped.zip",
    }


def test_the_wrapper_has_no_shell_see_a_scripts_arguments(home: Path, tmp_path: Path) -> None:
    weird = ["{{PWD}}", "`id`", '{"a": {"b": 1}}', "--x", "a\rb"]
    script = tmp_path / "it's mine.py"
    script.write_text("import json, sys; print(json.dumps(sys.argv))\n")
    for mode in (["--deploy-mode", "cluster"], ["--conf", "spark.submit.deployMode=client"]):
        ran = run_submit(home, *mode, str(script), *weird, PYSPARK_PYTHON=sys.executable)
        words = json.loads(ran.stdout)[0]
        assert conf_of(words)["spark.app.name"] == script.name
        command = [sys.executable, words[-1].removeprefix("file://")]
        shown = subprocess.run(command, cwd=home, capture_output=True, text=True, check=True)
        here = home if "cluster" in mode else script.parent
        assert json.loads(shown.stdout) == [str(here / script.name), *weird]
    there = ("--deploy-mode=cluster", "hdfs:///a.py", "`id`")
    ran = run_submit(home, *there, PYSPARK_PYTHON=sys.executable)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "argument 1 of the script has '`', which the shell" in ran.stderr


def test_the_wrapper_reads_spark_defaults(home: Path) -> None:
    (home / "conf").mkdir()
    (home / "conf" / "spark-defaults.conf").write_text(
        f"{ARCHIVES} hdfs:///env.tar.gz#env\nspark.hopsgpu.markers A100=gpu-a100\n"
    )
    words = json.loads(run_submit(home, "a.py", PYSPARK_PYTHON=sys.executable).stdout)[0]
    own, _, shipped = conf_of(words)[ARCHIVES].partition(",")
    assert own == "hdfs:///env.tar.gz#env"
    archive = Path(shipped.removeprefix("file://").removesuffix(f"#{ALIAS}"))
    with tarfile.open(archive) as scripts:
        assert "marker-gpu-a100" in scripts.getnames()


def test_the_wrapper_passes_by_a_python_that_has_no_hopsgpu(home: Path) -> None:
    """Notebooks set such a Python: PYSPARK_DRIVER_PYTHON=jupyter."""
    other = {"PYSPARK_DRIVER_PYTHON": "/bin/false", "PYSPARK_PYTHON": sys.executable}
    assert run_submit(home, "a.py", **other).returncode == 7
    none = {**other, "PYSPARK_PYTHON": "/bin/false", "PATH": "/nowhere", "PYTHONPATH": ""}
    ran = subprocess.run(
        ["/bin/sh", str(SUBMIT), "a.py"], env=none, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "no Python here has hopsgpu" in ran.stderr


def test_the_wrapper_says_what_is_missing(home: Path) -> None:
    ran = run_submit(home / "other", "a.py", PYSPARK_PYTHON=sys.executable)
    assert ran.returncode == 1
    assert "set SPARK_HOME" in ran.stderr
    (home / "cache").write_text("no directory")
    ran = run_submit(home, "a.py", PYSPARK_PYTHON=sys.executable)
    assert ran.returncode == 1
    assert ran.stderr.startswith("hopsgpu: cannot write")
    assert "XDG_CACHE_HOME" in ran.stderr
    ran = run_submit(home, "a.py", PYSPARK_PYTHON=sys.executable, XDG_CACHE_HOME="", HOME="")
    assert ran.returncode == 1
    assert "HOME is not set" in ran.stderr
