"""spark-submit and `hopsgpu submit` in both deploy modes, as a person runs them, on a real cluster.

Where several are started at once, that is to share what starting them takes.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from hopsgpu import ModelStore
from hopsgpu.artifacts.runs import RunStore
from hopsgpu.backends.spark.submit_arguments import pack
from hopsgpu.backends.spark.submit_command import find_spark_submit
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager, web_addresses
from hopsgpu.storage.hadoop_conf import HadoopConf
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.lake_root import default_root
from tests.bounds import HANG_SECONDS
from tests.conftest import as_in_a_terminal, gpus_become, until
from tests.proxy import refusing_proxy

ROOT = Path(__file__).resolve().parents[2]
JOB = """
    import os, sys, time
    import helper
    import hopsgpu

    def train(seconds):
        import helper
        from importlib.util import find_spec
        time.sleep(seconds)
        return hopsgpu.__file__, helper.words(), find_spec("travelled") is None

    if __name__ == "__main__":
        code, seconds, workers = map(int, sys.argv[1:])
        spark = hopsgpu.session("job")
        result = hopsgpu.launch(
            train, args=(seconds,), workers=workers, memory_per_worker="512m", progress="off",
            # One core, as drivers of several applications may all be on one node.
            cores_per_worker=1, placement="pack", acquire_timeout=None,
        )
        print("rank", *result.value)
        assert helper.words() == result.value[1] == "packed"
        if spark.sparkContext.getConf().get("spark.submit.deployMode") == "cluster":
            # Nothing of ours is on the nodes: driver and rank have it from what was shipped.
            for file in (hopsgpu.__file__, result.value[0]):
                assert "hopsgpu-shipped.zip/" in file, file
        sys.exit(code)
"""
Env = dict[str, str]


ARGUMENTS = [
    '{"a": {"b": 1}}',
    "{{PWD}} <LOG_DIR>",
    "`id` $(id) $HOME \\$HOME a\\\\b \\",
    "",
    "two\nlines\r",
    "é \udcff",
    "--conf",
    'it\'s "q"',
    "x" * 3000,
]
ARGUMENTS_JOB = """
    import dataclasses, os, pickle, sys, helper, hopsgpu

    @dataclasses.dataclass
    class Told:
        variable: str
        helper: str
        travelled: str

    def train():
        import travelled
        return Told(os.environ["TOLD"], helper.WORD, travelled.VALUE)

    if __name__ == "__main__":
        spark = hopsgpu.session("arguments")
        told = '`id` {{PWD}} "é"\\n$(id)'
        result = hopsgpu.launch(
            train, workers=2, gpus_per_worker=0, memory_per_worker="512m", placement="pack",
            env_vars={"TOLD": told}, acquire_timeout=None, progress="off",
        )
        right = pickle.loads(pickle.dumps(Told(told, "beside", "from the directory")))
        assert list(result.values) == [right] * 2
        assert result.timeline.released is not None and result.gpu_seconds.held == 0
        assert os.path.basename(__file__) == os.path.basename(sys.argv[0])
        print("found", ascii([os.path.basename(__file__), *sys.argv[1:]]))
        sys.exit(3 * (spark.sparkContext.getConf().get("spark.submit.deployMode") == "cluster"))
"""


@pytest.fixture(scope="module")
def manager(cluster_env: Env) -> ResourceManager:
    """Without a session of the tests' own."""
    return ResourceManager(web_addresses(HadoopConf.load(cluster_env).get))


@pytest.fixture(scope="module")
def env(cluster_env: Env) -> Env:
    """Without PYTHONPATH, which Spark would hand on to the nodes."""
    return {k: v for k, v in cluster_env.items() if k != "PYTHONPATH"}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A script with a module beside it, which reads a file beside that."""
    project = tmp_path_factory.mktemp("project")
    (project / "job.py").write_text(textwrap.dedent(JOB))
    (project / "helper.py").write_text("import package\nwords = package.words\n")
    (project / "package").mkdir()
    (project / "package" / "words.txt").write_text("packed")
    (project / "package" / "__init__.py").write_text(
        "from pathlib import Path\n"
        "def words():\n    return (Path(__file__).parent / 'words.txt').read_text()\n"
    )
    return str(project / "job.py")


@pytest.fixture(scope="module")
def site(env: Env, hdfs_url: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An administrator's spark-conf/, with the lines that ship hopsgpu from HDFS."""
    directory = tmp_path_factory.mktemp("site")
    shipped, apps = pack(directory / "apps"), LakePath(f"{hdfs_url}/apps/hopsgpu")
    apps.make()
    for file in (shipped.scripts, shipped.package):
        (apps / file.name).replace(file.read_bytes())
    text = (ROOT / "spark-conf" / "spark-defaults.conf").read_text()
    own = Path(env["SPARK_CONF_DIR"], "spark-defaults.conf").read_text()
    whole = re.sub(r"^#(?=spark\.)", "", text, flags=re.MULTILINE).replace(
        "hdfs:///", f"{hdfs_url}/"
    )
    (directory / "site.conf").write_text(f"{own}\n{whole}")
    return str(directory / "site.conf")


@dataclass
class Started:
    """A process whose output is in files: nobody reads it meanwhile."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path


def started(command: list[str], env: Mapping[str, str], cwd: Path = ROOT) -> Started:
    directory = Path(tempfile.mkdtemp(prefix="submitted-"))
    out, err = directory / "out", directory / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            preexec_fn=as_in_a_terminal,
        )
    return Started(process, out, err)


def client_env(env: Env) -> Env:
    """In client mode the driver's hopsgpu is this machine's."""
    return {**env, "PYTHONPATH": str(ROOT)}


def submitting(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hopsgpu.cli.main", "submit", *arguments]


def ends(*many: Started) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each; none is left behind."""
    try:
        codes = [one.process.wait(HANG_SECONDS) for one in many]
    finally:
        for one in many:
            one.process.kill()
    return [
        (code, o.out.read_text(), o.err.read_text()) for code, o in zip(codes, many, strict=True)
    ]


def application_in(text: str) -> str:
    found = re.search(r"application_\d+_\d+", text)
    assert found, text[-4000:]
    return found[0]


def submitted_plainly(env: Env, site: str) -> list[str]:
    """The start of a spark-submit by an administrator's configuration."""
    return [str(find_spark_submit(env)), "--properties-file", site]


# Of the client's job: the ranks lack what another submit ships in an environment of its own, in a
# test below.
LACKS_ENVIRONMENT = re.compile(r"^rank \S+ packed True$", re.MULTILINE)


def test_exit_codes_are_those_of_the_training(
    env: Env, site: str, job: str, manager: ResourceManager, gpus_back: Callable[[], int]
) -> None:
    """Two at once, of which the second wants all GPUs of the cluster."""
    plain = submitted_plainly(env, site)
    example = [str(ROOT / "examples" / "train_job.py"), "--workers", "1", "--epochs", "4"]
    good, client = ends(
        started([*plain, "--deploy-mode", "cluster", *example, "--model", "submitted"], env),
        started([*plain, job, "5", "0", "4"], client_env(env)),
    )
    assert good[0] == 0, good[2][-4000:]
    assert manager.application_state(application_in(good[2])).has_succeeded
    assert ModelStore(f"{default_root(env)}/models").get("submitted").version >= 1
    assert client[0] == 5, client[2][-4000:]
    assert LACKS_ENVIRONMENT.search(client[1]), client[1]


@pytest.mark.soak
def test_jobs_wait_for_their_turn_and_a_detached_one_is_only_accepted(
    env: Env, site: str, job: str, manager: ResourceManager, gpus_back: Callable[[], int]
) -> None:
    """Both want all GPUs of the cluster."""
    detached = ("--detach", "--name", "alone", "--conf", "spark.driver.memory=512m")
    client, accepted = ends(
        started([*submitted_plainly(env, site), job, "5", "0", "4"], client_env(env)),
        started(submitting(*detached, job, "0", "0", "4"), env),
    )
    assert client[0] == 5, client[2][-4000:]
    assert LACKS_ENVIRONMENT.search(client[1]), client[1]
    assert accepted[0] == 0, accepted[2][-4000:]
    application = accepted[1].strip()
    assert application == application_in(application)
    assert f"hopsgpu logs -f {application}\n" in accepted[2]
    assert until(lambda: manager.application_state(application).has_ended, step=1)
    standing = manager.application_state(application)
    assert standing.has_succeeded and standing.name == "alone", standing


def test_a_script_gets_its_name_arguments_and_python_environment_whole_and_its_failure_is_told(
    env: Env, tmp_path: Path, manager: ResourceManager
) -> None:
    """Neither Spark nor a shell of YARN's sees them; what goes through one is refused before.

    In cluster mode it fails.
    """
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "travelled.py").write_text("VALUE = 'from the directory'\n")
    script = tmp_path / "my project" / 'it\'s a "jöb"; $(id)`id`{{PWD}}.py'
    script.parent.mkdir()
    script.write_text(textwrap.dedent(ARGUMENTS_JOB))
    (script.parent / "helper.py").write_text("WORD = 'beside'\n")
    with refusing_proxy() as proxy:
        env = {**env, **proxy.variables}
        given = ("--python-env", str(modules), str(script), *ARGUMENTS)
        client, cluster, refused = ends(
            started(submitting("--deploy-mode", "client", *given), client_env(env)),
            started(submitting("--deploy-mode", "cluster", *given), env),
            started(submitting("--conf", "spark.executorEnv.A=`id`", str(script)), env),
        )
        # YARN and HDFS are asked directly, whatever is in the environment for the outside.
        assert proxy.asked == []
    wanted = f"found {ascii([script.name, *ARGUMENTS])}"
    assert client[0] == 0 and wanted in client[1], client[2][-4000:]
    # Until Spark has read the level it has its own.
    assert client[2].count(" INFO ") <= 5 and " WARN " in client[2], client[2][-4000:]
    assert cluster[0] == 3 and wanted in cluster[2], cluster[2][-4000:]
    standing = manager.application_state(application_in(cluster[2]))
    assert (standing.name, standing.state, standing.final) == (script.name, "FINISHED", "FAILED")
    assert f"{standing.id} has ended: FAILED: User application exited with status 3" in cluster[2]
    assert "log of the driver: http://127.0.0.1" in cluster[2]
    assert refused[0] == 1 and "spark.executorEnv.A has '`', which the shell" in refused[2]


@pytest.mark.soak
def test_sigterm_gives_the_gpus_back(
    env: Env, job: str, manager: ResourceManager, gpus_back: Callable[[], int]
) -> None:
    given = (job, "0", "600", "2")
    runs = RunStore(default_root(env))
    before = set(runs.ids())
    both = [
        started(submitting("--deploy-mode", "client", *given), client_env(env)),
        started(submitting("--deploy-mode", "cluster", *given), env),
    ]
    try:
        assert gpus_become(manager, 4, seconds=HANG_SECONDS)
    finally:
        for one in both:
            one.process.send_signal(signal.SIGTERM)
    client, cluster = ends(*both)
    assert gpus_become(manager, 0)
    assert client[0] != 0
    assert cluster[0] == 128 + signal.SIGTERM
    killed = application_in(cluster[2])
    assert until(lambda: manager.application_state(killed).state == "KILLED")
    # The JVM of client mode is gone; its Python tells the lake so before it goes too.

    def error() -> str | None:
        read = [found.record for found in runs.read([*set(runs.ids()) - before])]
        (run,) = (r for r in read if r and r.application != killed)
        return run.error if run.state == "failed" else None

    assert until(lambda: error() is not None)
    # Which of them depends on whether Spark still told of its end, and ended within 5 s.
    told = "the driver's JVM has ended|SparkContext was shut down|YARN ended the application"
    assert re.search(told, str(error())), error()
