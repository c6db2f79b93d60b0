"""`hopsgpu submit`: what spark-submit is told, what goes along, how an application is followed."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hopsgpu.backends.spark.authorities import shipped_bundle
from hopsgpu.backends.spark.cluster_mode import SubmittedApplication
from hopsgpu.backends.spark.package_archive import ARCHIVES, PY_FILES, pack_package, with_entry
from hopsgpu.backends.spark.settings import check_submitted, session_defaults
from hopsgpu.backends.spark.submit_arguments import Shipped, modules_beside, pack, submit_arguments
from hopsgpu.backends.spark.submit_command import (
    SubmitJob,
    find_spark_submit,
    parse_conf,
    plan_submission,
)
from hopsgpu.backends.spark.yarn_driver import settings_inside
from hopsgpu.cli.main import main
from hopsgpu.cluster_managers.snapshot import Queue
from hopsgpu.cluster_managers.submitted_drivers import DriverState
from hopsgpu.cluster_managers.yarn.amounts import DEFAULT_GPU_RESOURCE
from hopsgpu.cluster_managers.yarn.application_state import ApplicationState, application_state_of
from hopsgpu.cluster_managers.yarn.node_manager import NodeManagers
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager
from hopsgpu.cluster_managers.yarn.submitted_drivers import YarnDrivers
from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.gpu.script_archive import ALIAS
from hopsgpu.packaging.modules import SHIPPED_MODULES_DIR, import_roots, pack_modules
from hopsgpu.packaging.python_env.builder import ensure_built, url_on_lake
from hopsgpu.packaging.python_env.kinds import recipe_for
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.process.backends.python import run_python
from tests.unit.cluster_managers.test_cluster_gpus import configuration, yarn_answers
from tests.unit.rest import serving

HERE = "/v/bin/python"
PYTHON_ENV = "spark.hopsgpu.python_env"
PYTHON, DRIVER = "spark.pyspark.python", "spark.pyspark.driver.python"
DEPLOY = "spark.submit.deployMode"


@pytest.fixture
def script(tmp_path: Path) -> str:
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "job.py").write_text(f"import helper\n{SHOWS_ARGUMENTS}")
    (directory / "helper.py").write_text("x = 1\n")
    return str(directory / "job.py")


def conf_of(words: Sequence[str]) -> dict[str, str]:
    """The properties that spark-submit would take from its arguments; a later one wins."""
    pairs = zip(words, words[1:], strict=False)
    return dict(value.split("=", 1) for name, value in pairs if name == "--conf")


SHOWS_ARGUMENTS = "import json, sys; print(json.dumps([__file__, *sys.argv[1:]]))\n"


def arguments_of(uri: str) -> list[str]:
    """What the script is started with by the file that spark-submit gets."""
    file = uri.removeprefix("file://")
    ran = subprocess.run([sys.executable, file], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(ran.stdout)
    return found


def conf_for(job: SubmitJob, defaults: Mapping[str, str] = {}, **environ: str) -> dict[str, str]:  # noqa: B006
    plan = plan_submission(job, defaults, environ, HERE)
    return {**conf_of(plan.arguments), DEPLOY: plan.mode}


def test_what_a_person_says_is_what_spark_submit_is_given(script: str) -> None:
    conf = {"spark.executor.memory": "2g", "spark.yarn.queue": "other"}
    job = SubmitJob(script, ("--conf", "a b"), "client", "gpus", "my job", conf)
    plan = plan_submission(job, {}, {}, HERE)
    assert plan.arguments[:4] == ("--deploy-mode", "client", "--name", "my job")
    assert plan.arguments[-3:] == (script, "--conf", "a b")
    found = conf_of(plan.arguments[:-3])
    # An option of the command wins over a property.
    assert (found["spark.yarn.queue"], plan.queue) == ("gpus", "gpus")
    assert found["spark.executor.memory"] == "2g"
    assert session_defaults("yarn").items() <= plan.properties.items()


def test_the_deploy_mode_is_the_nearest_word(script: str) -> None:
    assert conf_for(SubmitJob(script))[DEPLOY] == "client"
    assert conf_for(SubmitJob(script), {DEPLOY: "cluster"})[DEPLOY] == "cluster"
    asked = SubmitJob(script, conf={DEPLOY: "client"})
    assert conf_for(asked, {DEPLOY: "cluster"})[DEPLOY] == "client"
    mine = SubmitJob(script, deploy_mode="cluster", conf={DEPLOY: "client"})
    assert conf_for(mine)[DEPLOY] == "cluster"
    # What runs on without the command has no driver here, whatever the site's file says.
    assert conf_for(SubmitJob(script, is_detached=True), {DEPLOY: "client"})[DEPLOY] == "cluster"


def test_the_command_waits_itself_only_where_the_driver_is_elsewhere(script: str) -> None:
    wait, tags = "spark.yarn.submit.waitAppCompletion", "spark.yarn.tags"
    assert not {wait, tags} & conf_for(SubmitJob(script, tag="t")).keys()
    assert wait not in conf_for(SubmitJob(script, deploy_mode="cluster"))
    there = conf_for(SubmitJob(script, deploy_mode="cluster", tag="t", conf={tags: "mine"}))
    assert (there[wait], there[tags]) == ("false", "mine,t")


def test_each_python_is_this_one_unless_somebody_said_otherwise(script: str) -> None:
    found = conf_for(SubmitJob(script), PYSPARK_DRIVER_PYTHON="jupyter")
    assert (found[PYTHON], found[DRIVER]) == (HERE, HERE)
    assert conf_for(SubmitJob(script), PYSPARK_PYTHON="/e/python")[PYTHON] == "/e/python"
    # Of the site, or of the person.
    assert PYTHON not in conf_for(SubmitJob(script), {PYTHON: "/site/python"})
    own = conf_for(SubmitJob(script, conf={PYTHON: "./env/bin/python"}))
    assert (own[PYTHON], own[DRIVER]) == ("./env/bin/python", HERE)
    # In YARN the driver has the executors'.
    assert DRIVER not in conf_for(SubmitJob(script, deploy_mode="cluster"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"script": "nowhere.py"}, "nowhere.py is not a Python file on this machine"),
        ({"script": "/etc/passwd"}, "/etc/passwd is not a Python file"),
        ({"deploy_mode": "client", "is_detached": True}, "--detach needs --deploy-mode cluster"),
        ({"conf": {DEPLOY: "x"}}, "deploy mode 'x'"),
        ({"conf": {"spark.executor.instances": "2"}}, "executor.instances=2.*set it to 0"),
        ({"conf": {"spark.master": "local"}}, "spark.master=local runs on this machine only"),
        (
            {"conf": {"spark.master": "mesos://h:5050"}},
            "mesos://h:5050 cannot hold gangs; it must be yarn",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything(
    script: str, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_submission(replace(SubmitJob(script), **changed), {}, {}, HERE)


def test_properties_have_a_form() -> None:
    assert parse_conf(["spark.a=b=c", "spark.a=d", "spark.e="]) == {"spark.a": "d", "spark.e": ""}
    for wrong in ("spark.a", "a=b", "=b"):
        with pytest.raises(ConfigError, match="must be a Spark property"):
            parse_conf([wrong])


def test_spark_submit_is_looked_for_in_order(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    binary = tmp_path / "bin" / "spark-submit"
    with pytest.raises(ConfigError, match=f"there is no {binary}"):
        find_spark_submit({"SPARK_HOME": str(tmp_path)})
    binary.touch()
    assert find_spark_submit({"SPARK_HOME": str(tmp_path)}) == binary
    assert find_spark_submit({}).parts[-3:] == ("pyspark", "bin", "spark-submit")


# What goes along.


def test_one_of_a_name_is_shipped() -> None:
    admins = f"hdfs:///apps/d.tar.gz#{ALIAS},x.zip#x"
    ours = f"file:///t/d2.tar.gz#{ALIAS}"
    assert with_entry(admins, ours) == f"x.zip#x,{ours}"
    assert with_entry("hdfs:///a/h.zip", "file:///t/h.zip") == "file:///t/h.zip"
    assert with_entry(None, "file:///t/h.zip") == "file:///t/h.zip"


def test_modules_go_first_on_the_python_path_of_driver_and_executors() -> None:
    shipped = Shipped(Path("/s/d.tar.gz"), Path("/s/h.zip"), Path("/s/m.zip"))
    mine = "spark.executorEnv.PYTHONPATH=/mine"
    found = conf_of(submit_arguments(["--conf", mine, "a.py"], {}, shipped))
    assert found[ARCHIVES].split(",")[-1] == f"file:///s/m.zip#{SHIPPED_MODULES_DIR}"
    ours = f"{{{{PWD}}}}/{SHIPPED_MODULES_DIR}/0"
    assert found["spark.executorEnv.PYTHONPATH"] == f"{ours}:/mine"
    assert found["spark.yarn.appMasterEnv.PYTHONPATH"] == ours
    without = conf_of(submit_arguments(["a.py"], {}, replace(shipped, modules=None)))
    assert SHIPPED_MODULES_DIR not in without[ARCHIVES]
    assert "spark.executorEnv.PYTHONPATH" not in without


def test_modules_are_packed_for_their_owner_and_go_after_a_week(
    tmp_path: Path, script: str
) -> None:
    packed = modules_beside(script)
    assert packed.roots == 1
    first = pack(tmp_path / "cache", modules=packed.archive)
    assert first.modules is not None
    with zipfile.ZipFile(first.modules) as archive:
        assert sorted(archive.namelist()) == ["0/helper.py", "0/job.py"]
    assert stat.S_IMODE(first.modules.stat().st_mode) == 0o600
    other = pack(tmp_path / "cache", modules=b"of another project")
    assert other.modules != first.modules
    assert first.modules.exists()
    os.utime(first.modules, (0, 0))
    assert pack(tmp_path / "cache").modules is None
    assert not first.modules.exists()
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {
        *(path.name for path in (first.scripts, first.package, other.modules) if path)
    }


def test_a_script_elsewhere_or_in_the_environment_brings_no_modules() -> None:
    assert modules_beside("hdfs:///a.py").roots == 0
    assert modules_beside(str(Path(sys.executable).parent / "pip")).roots == 0


def test_what_a_script_imports_from_elsewhere_goes_along_with_it(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, source in {
        "src/own_pkg/__init__.py": "import own_second",
        "src/own_pkg/table.json": "{}",
        "src/own_second.py": "",
        "src/unnamed.py": "",
        "src/helper.py": "the one beside the script comes first",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
    monkeypatch.syspath_prepend(tmp_path / "src")
    Path(script).write_text("import helper\ndef train():\n    import own_pkg\n")
    with zipfile.ZipFile(io.BytesIO(modules_beside(script).archive)) as archive:
        assert sorted(archive.namelist()) == [
            *("0/helper.py", "0/job.py", "0/own_pkg/__init__.py", "0/own_pkg/table.json"),
            "0/own_second.py",
        ]
        assert archive.read("0/helper.py") == Path(script).with_name("helper.py").read_bytes()


def test_a_driver_in_yarn_packs_what_it_was_shipped(tmp_path: Path) -> None:
    """It has hopsgpu in the zip that it is to ship on, and the modules beside its script."""
    package = pack_package(tmp_path / "hopsgpu-shipped.zip")
    modules = tmp_path / "unpacked" / SHIPPED_MODULES_DIR / "0"
    modules.mkdir(parents=True)
    code = (
        "import sys; from pathlib import Path;"
        "from hopsgpu.backends.spark.package_archive import pack_package;"
        "from hopsgpu.packaging.modules import import_roots; import hopsgpu;"
        "print(hopsgpu.__file__);"
        "pack_package(Path(sys.argv[1])); print(*[r.path for r in import_roots(pack_package)])"
    )
    where, roots = run_python(code, [modules, package], tmp_path / "again.zip")
    assert where.startswith(str(package))
    assert str(modules) in roots.split()
    names = [zipfile.ZipFile(tmp_path / n).namelist() for n in ("again.zip", package.name)]
    assert names[0] == names[1]
    assert "hopsgpu/spark/daemon.py" in names[0]
    assert "cloudpickle/cloudpickle.py" in names[0]
    assert all(name.endswith((".py", ".pyc")) for name in names[0])


def test_what_was_shipped_is_packed_again_from_a_directory(tmp_path: Path) -> None:
    """Bytecode lies beside the sources there."""
    package = pack_package(tmp_path / "hopsgpu-shipped.zip")
    with zipfile.ZipFile(package) as archive:
        archive.extractall(tmp_path / "there")
    code = (
        "import sys; from hopsgpu.backends.spark.package_archive import *\n"
        "pack_package(Path(sys.argv[1]))"
    )
    run_python(code, [tmp_path / "there"], tmp_path / "again.zip")
    names = [zipfile.ZipFile(tmp_path / n).namelist() for n in ("again.zip", package.name)]
    assert names[0] == names[1] and len(set(names[0])) == len(names[0])


def test_what_is_shipped_is_imported_as_bytecode(tmp_path: Path) -> None:
    """And what fails in it is shown with its source, by its name in the zip."""
    package = pack_package(tmp_path / "hopsgpu-shipped.zip")
    code = (
        "import sys, traceback, hopsgpu.rank.entry\n"
        "import hopsgpu.agent.process_daemon, hopsgpu.agent.agent\n"
        "ours = [m for n, m in sys.modules.items() if n.partition('.')[0] == 'hopsgpu']\n"
        "print(*(m.__file__ for m in ours))\n"
        "try:\n  hopsgpu.rank.entry.run(None)\n"
        "except TypeError:\n  print(traceback.format_exc())\n"
    )
    files, *told = run_python(code, [package])
    assert len(files.split()) > 20
    assert all(file.startswith(str(package)) for file in files.split())
    assert all(file.endswith(".pyc") for file in files.split())
    (at,) = [n for n, line in enumerate(told) if 'File "hopsgpu/rank/entry.py"' in line]
    assert "(directory / CALL).rename" in told[at + 1]


def test_modules_are_those_of_the_script_where_nothing_was_shipped() -> None:
    roots = [root.path for root in import_roots(conf_of) if root.path is not None]
    assert roots and not any(root.parent.name == SHIPPED_MODULES_DIR for root in roots)
    assert pack_modules([]).roots == 0


# A driver in YARN.

SUBMITTED = {
    "spark.master": "yarn",
    DEPLOY: "cluster",
    "spark.yarn.maxAppAttempts": "1",
    ARCHIVES: f"hdfs:///d.tar.gz#{ALIAS}",
    "spark.executor.memory": "3g",
}


def test_a_driver_in_yarn_sets_what_is_not_too_late() -> None:
    given = {"spark.sql.shuffle.partitions": "4", "spark.executor.memory": "2g"}
    found = settings_inside({**session_defaults("yarn"), **given}, SUBMITTED, given)
    assert found["spark.executor.memory"] == "2g"
    assert found["spark.dynamicAllocation.minExecutors"] == "0"
    assert found[ARCHIVES] == SUBMITTED[ARCHIVES]
    # What it was submitted with wins over ours.
    other = {**SUBMITTED, "spark.executor.heartbeat.maxFailures": "7"}
    found = settings_inside(session_defaults("yarn"), other, {})
    assert found["spark.executor.heartbeat.maxFailures"] == "7"


@pytest.mark.parametrize(
    ("submitted", "given", "words"),
    [
        (
            {},
            {"spark.yarn.queue": "gpus"},
            r"spark.yarn.queue=gpus \(it has None\).*too late|too late.*queue=gpus",
        ),
        ({}, {"spark.driver.memory": "8g"}, "spark.driver.memory=8g"),
        ({}, {"spark.pyspark.python": "x"}, "hopsgpu submit --deploy-mode cluster"),
        ({"spark.yarn.maxAppAttempts": None}, {}, "maxAppAttempts=1.*--conf NAME=VALUE"),
        ({ARCHIVES: None}, {}, "start it with `hopsgpu submit --deploy-mode cluster`"),
    ],
)
def test_what_a_driver_in_yarn_can_no_longer_have_is_refused(
    submitted: dict[str, str | None], given: dict[str, str], words: str
) -> None:
    facts = {k: v for k, v in {**SUBMITTED, **submitted}.items() if v is not None}
    with pytest.raises(ConfigError, match=words):
        settings_inside({**session_defaults("yarn"), **given}, facts, given)


def test_what_was_submitted_so_may_be_said_again() -> None:
    check_submitted(SUBMITTED.get, {"spark.master": "yarn", "spark.driver.maxResultSize": "2g"})
    # A person's own word: who wants a second attempt has one.
    check_submitted({**SUBMITTED, "spark.yarn.maxAppAttempts": "2"}.get, {})


# The command.

SHOWS = """#!/bin/sh
exec {python} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Spark whose spark-submit shows what it is given, and nothing of a cluster."""
    home = tmp_path / "a spark"
    (home / "bin").mkdir(parents=True)
    fake(home, SHOWS.format(python=sys.executable))
    monkeypatch.setenv("SPARK_HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR", "PYSPARK_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    return home


def fake(home: Path, text: str) -> Path:
    binary = home / "bin" / "spark-submit"
    binary.write_text(text)
    binary.chmod(0o755)
    return binary


def test_the_line_of_a_dry_run_can_be_pasted(home: Path, script: str) -> None:
    weird = ["it's", 'a "b"', "$HOME", "", "--conf", "two\nlines"]
    asked = ["submit", "--dry-run", "--conf", "spark.x=a 'b' $HOME", script, *weird]
    ran = CliRunner().invoke(main, asked)
    assert ran.exit_code == 0, ran.output
    pasted = subprocess.run(
        ["sh", "-c", ran.stdout], capture_output=True, text=True, check=True, timeout=HANG_SECONDS
    )
    words = json.loads(pasted.stdout)
    assert arguments_of(words[-1]) == [script, *weird]
    found = conf_of(words[:-1])
    assert found["spark.x"] == "a 'b' $HOME"
    assert session_defaults("yarn").items() <= found.items()
    shipped = [entry.partition("#")[0] for entry in found[ARCHIVES].split(",")]
    for uri in (*shipped, found[PY_FILES]):
        assert Path(uri.removeprefix("file://")).is_file()
    assert shlex.split(ran.stdout)[0] == str(home / "bin" / "spark-submit")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "HADOOP_CONF_DIR is not set"),
        (["--detach", "--deploy-mode", "client"], "--detach needs --deploy-mode cluster"),
        (["--conf", "x"], "must be a Spark property"),
        (["--dry-run", "--python-env", "no.txt"], "python_env='no.txt': there is no such file"),
        (["--python-env", "no.txt"], "python_env='no.txt': there is no such file"),
        (["--python-env", ""], "python_env='': "),
        (["--idle-timeout", "0s"], "--idle-timeout='0s': must be a duration above zero"),
    ],
)
def test_the_command_says_what_is_wrong_in_a_line(
    home: Path, script: str, given: list[str], words: str
) -> None:
    ran = CliRunner().invoke(main, ["submit", *given, script])
    assert (ran.exit_code, len(ran.stderr.splitlines())) == (1, 1)
    assert words in ran.stderr


@pytest.mark.parametrize("value", ["30m", "off"])
def test_idle_gpus_of_all_launches_are_bounded_by_an_option(
    home: Path, script: str, value: str
) -> None:
    ran = CliRunner().invoke(main, ["submit", "--dry-run", "--idle-timeout", value, script])
    assert ran.exit_code == 0, ran.output
    words = shlex.split(ran.stdout)
    assert f"spark.hopsgpu.idle_timeout={value}" in words


def test_who_detaches_is_told_what_to_do_next(
    home: Path, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(home, "#!/bin/sh\nexit 0\n")
    app = {**APP, "id": "application_1_0007", "queue": "x"}
    answers = {**yarn_answers("capacity_half"), "/ws/v1/cluster/apps": {"apps": {"app": [app]}}}
    with serving(answers) as daemon:
        (tmp_path / "core-site.xml").write_text("<configuration/>")
        site = {"yarn.resourcemanager.webapp.address": daemon.address}
        monkeypatch.setenv("HADOOP_CONF_DIR", str(configuration(tmp_path, **site)))
        words = ["submit", "--detach", "--queue", "x"]
        plain = CliRunner().invoke(main, [*words, script])
        team = [*words, "--conf", "spark.hopsgpu.root=hdfs:///team", script]
        elsewhere = CliRunner().invoke(main, team)
    assert (plain.exit_code, plain.stdout) == (0, "application_1_0007\n"), plain.output
    assert plain.stderr.splitlines() == [
        "hopsgpu: application_1_0007 'job' is in queue root.p.x",
        "hopsgpu: its runs:       hopsgpu runs",
        "hopsgpu: its output:     hopsgpu logs -f application_1_0007",
        "hopsgpu: cancel its run: hopsgpu runs cancel application_1_0007",
        "hopsgpu: end it:         yarn application -kill application_1_0007",
    ]
    assert "hopsgpu runs --root hdfs:///team cancel application_1_0007\n" in elsewhere.stderr
    assert "hopsgpu logs --root hdfs:///team -f application_1_0007\n" in elsewhere.stderr


def test_the_line_of_a_dry_run_holds_from_elsewhere(
    home: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(script).parent)
    monkeypatch.setenv("SPARK_HOME", os.path.relpath(home))
    ran = CliRunner().invoke(main, ["submit", "--dry-run", "job.py", "data.csv"])
    words = shlex.split(ran.stdout)
    # What the script gets is the script's to read.
    assert arguments_of(words[-1]) == [script, "data.csv"]
    assert Path(words[0]).is_absolute() and Path(words[0]).samefile(home / "bin" / "spark-submit")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["humanize==4.9"], "humanize==4.9"),
        (["humanize,numpy"], "humanize, numpy"),
        (["humanize", "numpy>=2"], "humanize, numpy>=2"),
    ],
)
def test_packages_are_named_by_the_option(
    home: Path, script: str, tmp_path: Path, options: list[str], name: str
) -> None:
    lake = f"file://{tmp_path}/lake"
    given = [word for option in options for word in ("--python-env", option)]
    given += ["--conf", f"spark.hopsgpu.root={lake}", script]
    ran = CliRunner().invoke(main, ["submit", "--dry-run", *given])
    assert ran.exit_code == 0, ran.output
    url = conf_of(shlex.split(ran.stdout))[PYTHON_ENV]
    assert url == url_on_lake(name.split(", "), LakePath(lake), threading.Event())
    assert f"--dry-run does not create the Python environment ({name})" in ran.stderr
    assert url in ran.stderr


def test_a_python_environment_needs_a_lake_to_have_a_url(home: Path, script: str) -> None:
    ran = CliRunner().invoke(main, ["submit", "--dry-run", "--python-env", "a==1", script])
    assert (ran.exit_code, ran.stdout) == (1, "") and "HADOOP_CONF_DIR is not set" in ran.stderr


def test_an_environment_of_the_lake_is_named_as_it_is(home: Path, script: str) -> None:
    url = "hdfs:///user/me/hopsgpu/environments/12ab"
    given = ["--python-env", url, "--conf", "spark.hopsgpu.root=hdfs:///mine", script]
    ran = CliRunner().invoke(main, ["submit", "--dry-run", *given])
    assert conf_of(shlex.split(ran.stdout))[PYTHON_ENV] == url and not ran.stderr


def test_a_python_environment_is_on_the_lake_before_there_is_a_driver(
    home: Path, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "mine.py").write_text("A = 1\n")
    (tmp_path / "yarn-site.xml").write_text("<configuration/>")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    monkeypatch.setattr(ResourceManager, "queues", lambda manager: ())
    monkeypatch.setattr(
        "hopsgpu.cluster_managers.yarn.queues.check_queue", lambda name, queues: None
    )
    started: list[list[str]] = []
    environs: list[Mapping[str, str]] = []

    def start(_: Path, command: list[str], environ: Mapping[str, str]) -> None:
        started.append(command)
        environs.append(environ)

    monkeypatch.setattr(os, "execve", start)
    (home / "python" / "lib").mkdir(parents=True)
    for name in ("pyspark.zip", "py4j-1-src.zip"):
        with zipfile.ZipFile(home / "python" / "lib" / name, "w") as archive:
            archive.writestr("pyspark/daemon.py", "")
    monkeypatch.delenv("PYSPARK_ARCHIVES_PATH", raising=False)
    lake = f"file://{tmp_path}/lake"
    given = ["--python-env", str(tmp_path / "given"), "--conf", f"spark.hopsgpu.root={lake}"]
    given += ["--conf", "spark.hopsgpu.python_env=other", script]
    ran = CliRunner().invoke(main, ["submit", "--dry-run", *given])
    said = conf_of(shlex.split(ran.stdout))[PYTHON_ENV]
    assert not (tmp_path / "lake").exists() and not started
    ran = CliRunner().invoke(main, ["submit", *given])
    assert ran.exit_code == 0 and "to create it if missing" in ran.stderr, ran.output
    (command,), (environ,) = started, environs
    assert environ["PYSPARK_ARCHIVES_PATH"].startswith(f"file://{tmp_path}/cache/hopsgpu/pyspark/")
    url = conf_of(command)[PYTHON_ENV]
    assert url.startswith(f"{lake}/environments/") and url == said
    env = ensure_built(recipe_for(url), LakePath("file:///elsewhere"), threading.Event())
    assert LakePath(env.url).stat().size == env.bytes


# Following.

APP = {
    "id": "application_1_7",
    "name": "job",
    "user": "alice",
    "queue": "root.gpus",
    "state": "ACCEPTED",
    "finalStatus": "UNDEFINED",
    "diagnostics": "waiting\nfor resources",
}


def state_of(app: Mapping[str, Any]) -> ApplicationState:
    return application_state_of(app, DEFAULT_GPU_RESOURCE)


class Manager:
    """A ResourceManager that tells one thing after the other."""

    def __init__(self, *told: Mapping[str, Any] | HopsGpuError) -> None:
        self.told = list(told)
        self.killed: list[tuple[str, str]] = []

    def application_state(self, application_id: str) -> ApplicationState:
        told = self.told.pop(0) if len(self.told) > 1 else self.told[0]
        if isinstance(told, HopsGpuError):
            raise told
        return state_of({**APP, **told})

    def find_by_tag(self, tag: str) -> ApplicationState | None:
        return self.application_state("") if self.told else None

    def kill(self, application_id: str, user: str) -> None:
        self.killed.append((application_id, user))

    def queues(self) -> list[Queue]:
        return []


def driver_of(app: Mapping[str, Any]) -> DriverState:
    given: Any = Manager(app)
    return YarnDrivers(given, NodeManagers({}.get)).state("application_1_7")


def attended(
    manager: Manager, nodes: NodeManagers | None = None, clock: Callable[[], float] = lambda: 0.0
) -> tuple[SubmittedApplication, list[str]]:
    said: list[str] = []
    given: Any = manager
    drivers = YarnDrivers(given, nodes or NodeManagers({}.get))
    return SubmittedApplication(drivers, "t", said.append, clock, pass_time), said


def pass_time(seconds: float) -> None:
    """Do not wait."""


def test_who_waits_is_told_each_change_once() -> None:
    gpus = {"name": DEFAULT_GPU_RESOURCE, "value": 4}
    used = {"resourceInformations": {"resourceInformation": [gpus]}}
    usages = {"resourceUsagesByPartition": [{"used": used}]}
    log = "http://n1:8042/node/containerlogs/container_1_7_01_000001/alice"
    running = {"state": "RUNNING", "amContainerLogs": log, "amHostHttpAddress": "n1:8042"}
    ended = {**running, "state": "FINISHED", "finalStatus": "SUCCEEDED"}
    silent = HopsGpuError("the ResourceManager does not answer")
    manager = Manager({}, {}, silent, {}, running, {**running, "resourceInfo": usages}, ended)
    follower, said = attended(manager)
    end = follower.follow(driver_of(APP))
    assert end.has_succeeded
    assert [re.sub(r"^ *0.0 s: ", "", line) for line in said] == [
        "ACCEPTED: waiting for resources",
        "the ResourceManager does not answer",
        "ACCEPTED: waiting for resources",
        f"log of the driver: {log}",
        "RUNNING, GPUs held: 0",
        "RUNNING, GPUs held: 4",
    ]


def test_what_yarn_writes_anew_with_each_heartbeat_is_told_once() -> None:

    def waiting(second: int, why: str) -> dict[str, str]:
        details = f"Details : AM Partition = <DEFAULT_PARTITION>; Queue's used capacity = {second}"
        return {"diagnostics": f"[Mon Nov 23 04:00:0{second} +0000 2026] {why} {details} %"}

    activated = "Application is Activated, waiting for resources to be assigned for AM. "
    last = " Last Node which was processed for the application : n{}:1 ( Partition : [] )"
    limit = "Queue's AM resource limit exceeded. "
    ended = {"state": "FINISHED", "finalStatus": "SUCCEEDED"}
    manager = Manager(
        waiting(1, limit),
        waiting(2, limit),
        waiting(3, activated),
        *({"diagnostics": f"[Mon Nov 23] {activated}{last.format(node)}"} for node in (1, 2)),
        waiting(4, limit),
        ended,
    )
    follower, said = attended(manager)
    follower.follow(driver_of(APP))
    # The whole text, of the first of its kind.
    assert ["04:00:01" in said[0], "04:00:03" in said[1], "04:00:04" in said[2]] == [True] * 3
    assert "used capacity = 1 %" in said[0] and len(said) == 3


def test_of_a_failure_the_drivers_last_words_are_told() -> None:
    stderr = (
        "26/11/22 10:00:00 INFO SparkContext: x\n"
        "the script's own\n"
        "26/11/22 10:00:00 INFO ApplicationMaster: \n"
        f"{'=' * 79}\nDefault YARN executor launch context:\n  env:\n\n  command:\n"
        f"      '-Dspark.driver.port=1' \\ \n\n  resources:\n    x -> resource {{ }}\n\n"
        f"{'=' * 79}\n"
        "Traceback (most recent call last):\nValueError: no\n"
        "26/11/22 10:00:01 ERROR ApplicationMaster: User application exited with status 1\n"
        f"26/11/22 10:00:01 INFO ApplicationMaster: \n{'=' * 79}\nwhose end did not come\n"
    )
    path = "/ws/v1/node/containers/container_1_7_01_000001/logs/"
    told = f"Container: x\nLogContents:\n{stderr}\nEnd of LogType:stderr.\n***\n"
    with serving({f"{path}stderr": (200, told)}) as node:
        failed = driver_of(
            {
                **APP,
                "state": "FINISHED",
                "finalStatus": "FAILED",
                "amContainerLogs": f"http://{node.address}/node/containerlogs/container_1_7_01_000001/a",
                "amHostHttpAddress": node.address,
            }
        )
        follower, said = attended(Manager())
        follower.report_end(failed)
    assert said[0].startswith("the end of the driver's stdout:\n  (its node does not return it")
    assert said[1].splitlines()[1:] == [
        "  the script's own",
        "  Traceback (most recent call last):",
        "  ValueError: no",
        "  26/11/22 10:00:01 ERROR ApplicationMaster: User application exited with status 1",
    ]
    assert said[2].startswith("application_1_7 has ended: FAILED: waiting for resources. Log of")
    assert said[2].endswith("yarn logs -applicationId application_1_7")


@pytest.mark.parametrize(
    ("stdout", "last"),
    [("".join(f"{i}\n" for i in range(12)), [f"  {i}" for i in range(2, 12)]), ("", [])],
)
def test_of_a_success_the_last_of_what_it_printed_is_told(stdout: str, last: list[str]) -> None:
    told = f"Container: x\nLogContents:\n{stdout}\nEnd of LogType:stdout.\n***\n"
    path = "/ws/v1/node/containers/container_1_7_01_000001/logs/stdout"
    with serving({path: (200, told)}) as node:
        log = f"http://{node.address}/node/containerlogs/container_1_7_01_000001/a"
        ended = {"state": "FINISHED", "finalStatus": "SUCCEEDED", "amContainerLogs": log}
        follower, said = attended(Manager())
        follower.report_end(driver_of({**APP, **ended, "amHostHttpAddress": node.address}))
    assert said[-1] == "   0.0 s: application_1_7 has ended: SUCCEEDED"
    assert said[:-1] == (["\n".join(["the end of the driver's stdout:", *last])] if last else [])


@pytest.mark.parametrize(
    ("told", "log"),
    [
        ("Container: x\nLogContents:\na\nb\n\nEnd of LogType:stdout.\n***\n", "a\nb\n"),
        ("Container: x\nLogContents:\n\nEnd of LogType:stdout.\n***\n", ""),
        ("Container: x\nLogContents:\nEnd of LogType:stdout.\n***\n", ""),
        ("as it is\n", "as it is\n"),
    ],
)
def test_a_log_is_what_is_between_its_head_and_its_end(told: str, log: str) -> None:
    with serving({"/ws/v1/node/containers/c/logs/stdout": (200, told)}) as node:
        assert NodeManagers({}.get).log(node.address, "c", "stdout", 100) == log


def test_of_one_that_was_killed_only_that_is_told() -> None:
    follower, said = attended(Manager())
    log = "http://127.0.0.1:1/node/containerlogs/container_1_7_01_000001/a"
    killed = {"state": "KILLED", "finalStatus": "KILLED", "amContainerLogs": log}
    follower.report_end(driver_of({**APP, **killed}))
    assert len(said) == 1
    assert said[0].startswith("application_1_7 has ended: KILLED: waiting for resources.")


def test_what_ends_the_command_ends_the_application() -> None:
    killed = {"state": "KILLED", "finalStatus": "KILLED"}
    manager = Manager({}, killed)
    follower, said = attended(manager)
    with pytest.raises(SystemExit), follower.end_on_error():
        raise SystemExit(143)
    assert manager.killed == [("application_1_7", "alice")]
    assert said == ["ending application_1_7"]
    # One that has ended, and one that never was.
    for manager in (Manager(killed), Manager()):
        with pytest.raises(SystemExit), attended(manager)[0].end_on_error():
            raise SystemExit(143)
        assert manager.killed == []
    follower, said = attended(Manager(HopsGpuError("no answer")), clock=itertools.count().__next__)
    with pytest.raises(SystemExit), follower.end_on_error():
        raise SystemExit(143)
    assert len(said) == 1 and "may still be running (no answer)" in said[0]


def test_an_application_is_ended_though_nobody_hears_of_it_and_yarn_is_away_at_first() -> None:
    killed = {"state": "KILLED", "finalStatus": "KILLED"}
    manager = Manager(HopsGpuError("standby"), {}, killed)

    def unheard(text: str) -> None:
        raise BrokenPipeError(text)

    given: Any = manager
    drivers = YarnDrivers(given, NodeManagers({}.get))
    follower = SubmittedApplication(drivers, "t", unheard, lambda: 0.0, pass_time)
    with pytest.raises(SystemExit), follower.end_on_error():
        raise SystemExit(129)
    assert manager.killed == [("application_1_7", "alice")]


def test_a_submission_that_fails_says_what_spark_submit_said(home: Path) -> None:
    binary = fake(home, "#!/bin/sh\necho out; echo 'no such queue' >&2; exit 4\n")
    with pytest.raises(HopsGpuError, match=r"exit code 4.*\n  out\n  no such queue$"):
        attended(Manager())[0].submit([str(binary)], os.environ)
    rejected = {"state": "FAILED", "diagnostics": "too many"}
    with pytest.raises(HopsGpuError, match=r"application_1_7 is FAILED: too many"):
        attended(Manager(rejected))[0].submit([str(binary)], os.environ)
    binary = fake(home, "#!/bin/sh\nexit 0\n")
    follower, said = attended(Manager({}))
    assert follower.submit([str(binary)], os.environ).id == "application_1_7"
    assert said == ["application_1_7 'job' is in queue root.gpus"]


def hadoop_conf(directory: Path, policy: str) -> str:
    """A HADOOP_CONF_DIR whose YARN has that yarn.http.policy."""
    directory.mkdir()
    (directory / "yarn-site.xml").write_text(
        "<configuration><property><name>yarn.http.policy</name>"
        f"<value>{policy}</value></property></configuration>"
    )
    return str(directory)


def test_certificates_of_a_private_authority_go_along(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = tmp_path / "authorities.pem"
    bundle.touch()
    secure = {"HADOOP_CONF_DIR": hadoop_conf(tmp_path / "secure", "HTTPS_ONLY")}
    plain = {"HADOOP_CONF_DIR": hadoop_conf(tmp_path / "plain", "HTTP_ONLY")}
    named = {"REQUESTS_CA_BUNDLE": str(bundle)}
    files, name = {"spark.yarn.dist.files": "hdfs:///mine.txt"}, "hopsgpu-authorities.pem"
    ships = {
        "spark.yarn.dist.files": f"hdfs:///mine.txt,{bundle.as_uri()}#{name}",
        "spark.yarn.appMasterEnv.REQUESTS_CA_BUNDLE": f"{{{{PWD}}}}/{name}",
    }
    assert shipped_bundle(files, {**secure, **named}) == ships
    # What an administrator has put on the nodes is theirs.
    on_nodes = {"spark.yarn.appMasterEnv.REQUESTS_CA_BUNDLE": "/etc/ca.pem"}
    assert shipped_bundle(on_nodes, {**secure, **named}) == {}
    # Nothing is asked by HTTPS, but for a root that is.
    assert shipped_bundle(files, {**plain, **named}) == shipped_bundle(files, named) == {}
    by_web = {"HOPSGPU_ROOT": "swebhdfs://nn:9871/user/a"}
    assert shipped_bundle(files, {**plain, **named, **by_web}) == ships
    # A directory, which requests takes too, is none of ours to ship.
    assert shipped_bundle(files, secure) == {} and not caplog.records
    assert shipped_bundle(files, {**secure, "REQUESTS_CA_BUNDLE": str(tmp_path)}) == {}
    assert f"REQUESTS_CA_BUNDLE={tmp_path} is not a file" in caplog.text
