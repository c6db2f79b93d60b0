"""What the options of `hopsgpu run` mean; the launch itself is replaced."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hopsgpu.cli.main import main
from hopsgpu.launcher import script_driver
from hopsgpu.launcher.script_driver import ScriptJob
from hopsgpu.packaging.script import FILE, MODULE, PROGRAM

OF_CLUSTERS = ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "HADOOP_HOME", "SPARK_CONF_DIR", "SPARK_HOME")


class Launches:
    """Stands for the launches of this machine; notes the jobs and their properties of Spark."""

    def __init__(self) -> None:
        self.jobs: list[ScriptJob] = []
        self.confs: list[Mapping[str, str]] = []
        self.exit_code = 0

    def run(self, job: ScriptJob, conf: Mapping[str, str] | None = None) -> int:
        self.jobs.append(job)
        self.confs.append(conf or {})
        return self.exit_code

    def plan(self, job: ScriptJob, conf: Mapping[str, str]) -> str:
        self.run(job, conf)
        return "a plan"


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    noted = Launches()
    monkeypatch.setattr(script_driver, "run_job", noted.run)
    monkeypatch.setattr(script_driver, "plan_job", noted.plan)
    return noted


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, which has a script; there is no cluster."""
    for name in OF_CLUSTERS:
        monkeypatch.delenv(name, raising=False)
    directory = tmp_path / "work"
    directory.mkdir()
    (directory / "train.py").touch()
    monkeypatch.chdir(directory)
    return directory


def call(*words: str) -> Result:
    return CliRunner().invoke(main, ["run", *words])


@pytest.fixture
def job_of(launches: Launches) -> Any:
    """Gives the job of some words of the command line."""

    def job_of_words(*words: str) -> ScriptJob:
        done = call(*words)
        assert (done.exit_code, done.stderr) == (0, ""), done.stderr
        return launches.jobs.pop()

    return job_of_words


def refusal(*words: str) -> str:
    """What is said of words that mean nothing, without a traceback."""
    done = call(*words)
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    (line,) = done.stderr.splitlines()
    return line


def test_a_script_alone_is_one_rank(job_of: Any, work: Path) -> None:
    job = job_of("train.py")
    assert (job.kind, job.target, job.args) == (FILE, "train.py", ())
    assert (job.nodes, job.per_node, job.workers) == ((1, 1), 1, None)
    assert job.working_dir == str(work) and job.name is None and job.ready is None
    assert job.options == {
        **{"retries": 0, "placement": None, "independent_ranks": False, "output_dirs": []},
    }
    assert job.launch_options(0)["workers"] == 1


@pytest.mark.parametrize(
    ("words", "nodes", "per_node"),
    [
        ("--nproc-per-node 4", (1, 1), 4),
        ("--nproc_per_node=4", (1, 1), 4),
        ("--nproc-per-node gpu", (1, 1), "gpu"),
        ("--nproc_per_node auto", (1, 1), "auto"),
        ("--nnodes 2", (2, 2), 1),
        ("--nnodes=2 --nproc_per_node 8", (2, 2), 8),
        ("--nnodes 1:4 --nproc-per-node=2", (1, 4), 2),
    ],
)
def test_sizes_are_those_of_torchrun(
    job_of: Any, words: str, nodes: tuple[int, int], per_node: int | str
) -> None:
    job = job_of(*words.split(), "train.py")
    assert (job.nodes, job.per_node, job.workers) == (nodes, per_node, None)


@pytest.mark.parametrize(("text", "sizes"), [("6", (6,)), ("2:6", (2, 6))])
def test_ranks_in_all(job_of: Any, text: str, sizes: tuple[int, ...]) -> None:
    job = job_of("--workers", text, "train.py")
    assert job.workers == sizes and job.options["placement"] is None


@pytest.mark.parametrize(
    ("words", "placement"),
    [
        ("--nnodes 2", None),
        ("--nproc-per-node 2", "pack"),
        ("--nproc-per-node gpu", "pack"),
        ("--nproc-per-node 2 --placement spread", "spread"),
        ("--placement pack", "pack"),
    ],
)
def test_ranks_of_one_node_are_packed(job_of: Any, words: str, placement: str | None) -> None:
    assert job_of(*words.split(), "train.py").options["placement"] == placement


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--workers 2 --nnodes 2", "--workers 2 with --nnodes or --nproc-per-node: both say"),
        ("--workers 2 --nproc_per_node 1", "--workers 2 with --nnodes or --nproc-per-node"),
        ("--nnodes 0", "--nnodes 0: must be a number ≥ 1, or MIN:MAX"),
        ("--nnodes 1:2:3", "--nnodes 1:2:3: must be a number ≥ 1, or MIN:MAX"),
        ("--nnodes many", "--nnodes many: must be"),
        ("--workers 0:2", "--workers 0:2: must be a number ≥ 1, or MIN:MAX"),
        ("--nproc-per-node 0", "--nproc-per-node 0: must be a number ≥ 1, gpu or auto"),
        ("--nproc-per-node cpu", "--nproc-per-node cpu: must be a number ≥ 1, gpu or auto"),
        ("--nproc-per-node 1:2", "--nproc-per-node 1:2: must be a number, gpu or auto"),
        ("-m --no-python", "-m with --no-python: a module is Python; give one of the two"),
        ("--env A", "--env A: must be NAME=VALUE"),
        ("--env =1", "--env =1: must be NAME=VALUE"),
        ("--gpus-per-worker many", "--gpus-per-worker many: must be a number of GPUs"),
        ("--data hdfs:///a --data b=hdfs:///b", "--data hdfs:///a: several tables need names"),
    ],
)
def test_what_means_nothing_is_refused(launches: Launches, words: str, said: str) -> None:
    assert said in refusal(*words.split(), "train.py") and launches.jobs == []


@pytest.mark.parametrize(
    ("words", "name"),
    [
        *((f"{name} 3", "--tee") for name in ("--tee", "-t")),
        *((f"{name} 3", "--redirects") for name in ("--redirects", "-r")),
        ("--tee=0:3", "--tee"),
        ("-r0:1,1:2", "--redirects"),
        ("--log-dir logs", "--log-dir"),
        ("--log_dir=logs", "--log-dir"),
    ],
)
def test_options_about_logs_are_refused_with_the_replacement(
    launches: Launches, words: str, name: str
) -> None:
    line = refusal(*words.split(), "train.py")
    assert line.startswith(f"hopsgpu: {name} ") and "leave it out" in line
    assert "`hopsgpu logs RUN --rank N`" in line and launches.jobs == []
    assert ("--output DIR" in line) == (name == "--log-dir")


def test_options_about_the_rendezvous_are_ignored_with_one_line(launches: Launches) -> None:
    words = "--rdzv_backend=c10d --rdzv-endpoint host:29400 --rdzv_id 7 --standalone"
    words += " --rdzv-conf a=1,b=2 --node_rank 0 --master_addr host --master-port 29500"
    words += " --local-addr host --monitor-interval 5 --start_method spawn --role trainer"
    words += " --local-ranks-filter 0 --logs-specs x --event-log-handler null"
    words += " --signals-to-handle SIGTERM --numa-binding node --run-path --virtual-local-rank"
    done = call(*words.split(), "--nproc-per-node", "2", "train.py", "--lr", "1")
    assert done.exit_code == 0 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("hopsgpu: ") and "ignored, because hopsgpu connects the ranks" in line
    names = [word.partition("=")[0].replace("_", "-") for word in words.split() if word[:2] == "--"]
    assert sorted(line.removeprefix("hopsgpu: ").partition(": ")[0].split(", ")) == sorted(names)
    (job,) = launches.jobs
    assert (job.per_node, job.args) == (2, ("--lr", "1"))


def test_ignored_options_are_not_in_the_help() -> None:
    text = call("--help").output
    assert "--nproc-per-node" in text and "--rdzv" not in text and "--tee" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        ("--epochs", "3"),
        ("--help",),
        ("-h",),
        ("-m", "--nproc-per-node", "7", "--nproc_per_node=7"),
        ("--", "-x", "--"),
        ("--tee", "3", "--standalone"),
        ("a b", "", "é", "--a=b c", "-"),
        ("--unknown_word", "a_b"),
    ],
)
def test_what_follows_the_script_is_the_scripts(job_of: Any, arguments: tuple[str, ...]) -> None:
    job = job_of("--nproc_per_node", "2", "train.py", *arguments)
    assert (job.target, job.args, job.per_node) == ("train.py", arguments, 2)


def test_a_double_dash_may_end_the_options(job_of: Any) -> None:
    job = job_of("--nnodes", "2", "--", "train.py", "--epochs", "3")
    assert (job.target, job.args) == ("train.py", ("--epochs", "3"))


def test_names_with_underscores_stay_as_they_are(job_of: Any) -> None:
    job = job_of("--name", "my_fit", "--env", "MY_A=b_c", "--output=my_out", "./my_script.py")
    assert (job.name, job.target) == ("my_fit", "./my_script.py")
    assert job.options["env_vars"] == {"MY_A": "b_c"}
    assert job.options["output_dirs"] == ["my_out"]


def test_a_script_is_needed() -> None:
    done = call("--nproc-per-node", "2")
    assert done.exit_code == 2 and "SCRIPT" in done.stderr
    assert call("--nproc-per-nodes", "2", "train.py").exit_code == 2


def test_variables_of_the_ranks(job_of: Any) -> None:
    job = job_of("--env", "A=1", "--env", "B=x=y", "--env", "C=", "--env", "A=2", "train.py")
    assert job.options["env_vars"] == {"A": "2", "B": "x=y", "C": ""}


@pytest.mark.parametrize(
    ("words", "data"),
    [
        ("--data hdfs:///lake/x", "hdfs:///lake/x"),
        ("--data /lake/day=1", "/lake/day=1"),
        ("--data train=/lake/day=1", {"train": "/lake/day=1"}),
        ("--data a=hdfs:///a --data b=/b", {"a": "hdfs:///a", "b": "/b"}),
    ],
)
def test_tables_of_the_ranks(job_of: Any, words: str, data: object) -> None:
    assert job_of(*words.split(), "train.py").options["data"] == data


def test_further_options_are_those_of_the_launch(job_of: Any) -> None:
    words = "--max_restarts 3 --memory-per-worker 8g --cores_per_worker 2 --gpu-type A100"
    words += " --run-timeout 2h --gpu-idle-timeout 30m --acquire-timeout 5m --gpus-per-worker 0.5"
    words += " --model digits --model-dir m --checkpoint-dir c --tensorboard_dir t"
    words += " --output a --output b --resume latest --independent-ranks --name fit"
    job = job_of(*words.split(), "train.py")
    assert job.name == "fit"
    assert job.options == {
        "retries": 3,
        "memory_per_worker": "8g",
        "cores_per_worker": 2,
        "gpu_type": "A100",
        "run_timeout": "2h",
        "gpu_idle_timeout": "30m",
        "acquire_timeout": "5m",
        "gpus_per_worker": 0.5,
        "model": "digits",
        "model_dir": "m",
        "checkpoint_dir": "c",
        "tensorboard_dir": "t",
        "output_dirs": ["a", "b"],
        "resume": "latest",
        "independent_ranks": True,
        "placement": None,
    }


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("2", 2), ("0.25", 0.25)])
def test_gpus_are_whole_where_they_can_be(job_of: Any, text: str, number: float) -> None:
    gpus = job_of("--gpus-per-worker", text, "train.py").options["gpus_per_worker"]
    assert gpus == number and type(gpus) is type(number)


def test_a_wait_may_have_no_bound(job_of: Any) -> None:
    assert job_of("--acquire-timeout", "off", "train.py").options["acquire_timeout"] is None


def test_a_module(job_of: Any, work: Path) -> None:
    (work / "own_package").mkdir()
    (work / "own_package" / "train.py").touch()
    job = job_of("-m", "own_package.train", "-m")
    assert (job.kind, job.target, job.args) == (MODULE, "own_package.train", ("-m",))
    assert job.working_dir == str(work)
    assert job_of("--module", "pytest").working_dir is None


def test_a_program(job_of: Any, work: Path) -> None:
    (work / "train.sh").touch()
    job = job_of("--no_python", "./train.sh", "x")
    assert (job.kind, job.target, job.args) == (PROGRAM, "./train.sh", ("x",))
    assert job.working_dir == str(work)
    assert job_of("--no-python", "nvidia-smi").working_dir is None


def test_the_current_directory_travels_if_the_script_is_below_it(
    job_of: Any, launches: Launches, work: Path, tmp_path: Path
) -> None:
    (work / "deep").mkdir()
    (work / "deep" / "fit.py").touch()
    (tmp_path / "other.py").touch()
    for script in ("train.py", "deep/fit.py", str(work / "train.py"), "../work/train.py"):
        assert job_of(script).working_dir == str(work)
    for script in ("../other.py", str(tmp_path / "other.py")):
        said = call(script)
        assert said.exit_code == 0 and launches.jobs.pop().working_dir is None
        assert "the current directory does not travel" in said.stderr
        assert "--working-dir . sends it" in said.stderr
        assert job_of("--working-dir", ".", script).working_dir == str(work)


def test_a_current_directory_that_is_reached_by_a_link(
    job_of: Any, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(work)
    monkeypatch.chdir(tmp_path / "link")
    assert Path(job_of(str(tmp_path / "link" / "train.py")).working_dir).samefile(work)


def test_a_named_working_directory_travels(job_of: Any, work: Path, tmp_path: Path) -> None:
    for words in (("train.py",), ("-m", "pytest"), ("--no-python", "nvidia-smi")):
        assert job_of("--working-dir", "..", *words).working_dir == str(work / "..")
        assert job_of("--working_dir", str(tmp_path), *words).working_dir == str(tmp_path)


def test_the_exit_code_is_that_of_the_script(launches: Launches) -> None:
    for code in (0, 3, 124, 137):
        launches.exit_code = code
        assert call("train.py").exit_code == code


def test_properties_of_spark_are_the_applications(launches: Launches) -> None:
    words = ("--conf", "spark.a=b=c", "--queue", "q", "--principal", "p")
    assert call(*words, "--keytab", "k", "train.py").exit_code == 0
    assert launches.confs == [
        {
            "spark.a": "b=c",
            "spark.yarn.queue": "q",
            "spark.kerberos.principal": "p",
            "spark.kerberos.keytab": "k",
        }
    ]


@pytest.mark.parametrize(
    ("words", "env"),
    [
        ("--python-env requirements.txt", "requirements.txt"),
        ("--python-env a==1 --python_env b==2", ["a==1", "b==2"]),
    ],
)
def test_an_environment_is_that_of_the_launch(job_of: Any, words: str, env: object) -> None:
    assert job_of(*words.split(), "train.py").options["python_env"] == env


def test_a_dry_run_prints_the_plan(launches: Launches) -> None:
    done = call("--dry-run", "--nproc-per-node", "2", "train.py")
    assert (done.exit_code, done.output) == (0, "a plan\n")
    assert launches.jobs[0].per_node == 2


def test_another_user_is_that_of_this_process(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADOOP_PROXY_USER", "nobody")
    assert call("--proxy-user", "alice", "train.py").exit_code == 0
    assert os.environ["HADOOP_PROXY_USER"] == "alice"
