"""What a plain script leaves on its terminal, of the real Spark on the real YARN."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyspark
import pytest

from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager
from tests.bounds import HANG_SECONDS
from tests.conftest import until

# Fails the start of Spark's user interface, once, as its own race does: in a filter, while the
# pages are attached. Spark loads and starts it anew for each.
FILTER = """
import jakarta.servlet.*;

public class Tripping implements Filter {
  public void init(FilterConfig config) {
    for (StackTraceElement frame : Thread.currentThread().getStackTrace())
      if (frame.getMethodName().contains("attachAllHandler"))
        if (new java.io.File(System.getenv("TRIPS")).delete())
          throw new java.util.ConcurrentModificationException();
  }
  public void doFilter(ServletRequest request, ServletResponse response, FilterChain chain)
      throws java.io.IOException, ServletException {
    chain.doFilter(request, response);
  }
  public void destroy() {}
}
"""
# Beside the script, and on PYTHONPATH.
MODULES = {
    "jobs/beside.py": "def double(x):\n    return 2 * x\n",
    "src/own/__init__.py": "",
    "src/own/train.py": "def same(x):\n    return x\n",
}
SCRIPT = """
import sys
import hopsgpu

class Pair:
    def __init__(self, x):
        self.x = x

def works(x):
    import own.train
    from beside import double
    print("trained")
    return Pair(own.train.same(double(x)))

def train():
    raise ValueError("no batch")

def helper():
    return hopsgpu.launch(train, workers=2, placement="pack", progress="off")

if __name__ == "__main__":
    spark = hopsgpu.session("console", conf={
        "spark.ui.filters": "Tripping",
        "spark.driver.extraClassPath": sys.argv[1],
        # In place of the 15 s after which Spark says that no executor has come.
        "spark.starvation.timeout": "500ms",
    })
    print("the session is there", file=sys.stderr)
    value = hopsgpu.launch(works, args=(21,)).value
    assert type(value) is Pair
    print("value", value.x)
    try:
        helper()
    finally:
        # Spark says so again, of other waits.
        scheduler = spark._jsc.sc().taskScheduler().getClass().getName()
        logger = spark._jvm.org.slf4j.LoggerFactory.getLogger(scheduler)
        logger.warn("Initial job has not accepted any resources; of another wait")
"""

# Two gangs are cancelled, one loses an executor, and so does Spark itself. Then the driver sends
# something to each of the executors, of which Spark complains if an executor has ended. The script
# prints the ports of the connections.
RELEASES = """
import os, signal, sys, time
from pathlib import Path
import hopsgpu
from tests.in_ranks import executor_jvm

DATA = "org$apache$spark$scheduler$cluster$CoarseGrainedSchedulerBackend$$executorDataMap"

def sleeps():
    time.sleep(3600)

def loses_its_executor(go):
    while not os.path.exists(go):
        time.sleep(0.1)
    if hopsgpu.context().rank == 0:
        os.kill(executor_jvm(), signal.SIGKILL)
    time.sleep(3600)

def parent_jvm(_):
    pid = os.getpid()
    while Path(f"/proc/{pid}/comm").read_text() != "java\\n":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid

def end_meanwhile(spark, end):
    backend = spark.sparkContext._jsc.sc().schedulerBackend()
    ids, data_by_id = backend.getExecutorIds(), getattr(backend, DATA)()
    executors = [data_by_id.get(ids.apply(n)).get() for n in range(ids.size())]
    ports = [executor.executorAddress().port() for executor in executors]
    endpoints = [executor.executorEndpoint() for executor in executors]
    end()
    jvm = spark._jvm
    tag = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("java.lang.Object"))
    for answer in [endpoint.ask("late", tag) for endpoint in endpoints]:
        while not answer.isCompleted():
            time.sleep(0.1)
    print(*ports)

def run(spark, function, *args, workers, end):
    run = hopsgpu.submit(function, args=args, workers=workers, progress="off")
    while run.status().state != "running":
        time.sleep(0.1)

    def end_run():
        end(run)
        run.wait()

    end_meanwhile(spark, end_run)

if __name__ == "__main__":
    spark = hopsgpu.session("releases")
    go = Path("go").resolve()
    for workers in (2, (1, 2)):
        run(spark, sleeps, workers=workers, end=lambda run: run.cancel())
    run(spark, loses_its_executor, str(go), workers=2, end=lambda run: go.touch())
    pid = spark.sparkContext.parallelize([0], 1).map(parent_jvm).collect()[0]
    end_meanwhile(spark, lambda: os.kill(pid, signal.SIGKILL))
"""


@pytest.fixture(scope="module")
def tripping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a filter of Spark's user interface that fails once."""
    directory = tmp_path_factory.mktemp("filter")
    source = directory / "Tripping.java"
    source.write_text(FILTER)
    jars = Path(pyspark.__file__).parent / "jars" / "*"
    subprocess.run(["javac", "-cp", str(jars), str(source)], check=True)
    return directory


@pytest.mark.soak
def test_a_script_launches_what_it_defines_and_its_failure_shows_its_own_frames_and_nothing_of_java(
    cluster_env: dict[str, str],
    tripping: Path,
    resource_manager: ResourceManager,
    gpus_back: Callable[[], int],
    tmp_path: Path,
) -> None:
    script, trips = tmp_path / "jobs" / "train.py", tripping / "trips"
    for file, source in {**MODULES, "jobs/train.py": SCRIPT}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
    trips.touch()
    ran = subprocess.run(
        [sys.executable, "jobs/train.py", tripping],
        cwd=tmp_path,
        env={**cluster_env, "PYTHONPATH": "src", "TRIPS": str(trips)},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
    )
    assert "value 42" in ran.stdout, ran.stderr
    assert "[rank 0 node" in ran.stdout and "trained" in ran.stdout
    assert "waiting: Requesting 1 executor" in ran.stderr
    assert ran.returncode == 1
    said, _, trace = ran.stderr.partition("Traceback (most recent call last):\n")
    # The race itself may come on top.
    line, *_ = [line for line in said.splitlines() if line.startswith("hopsgpu: ")]
    assert re.fullmatch(
        r"hopsgpu: Spark's user interface failed to start, .*"
        r"\(java.util.ConcurrentModificationException\); Spark is started again \(start 2 of 3\)",
        line,
    )

    def states() -> list[str]:
        """The states of the script's applications: of the start that failed, and of the other."""
        apps = resource_manager.ask("/ws/v1/cluster/apps")["apps"]["app"]
        return [app["state"] for app in apps if app["name"] == "console"]

    assert until(lambda: len(states()) > 1 and set(states()) <= {"FINISHED", "KILLED"}), states()
    start = said.partition("the session is there")[0]
    assert not re.search(r"^(\tat |java\.|org\.)", start, re.MULTILINE), start
    # The wait was explained, and not by Spark; who waits for something else is told again.
    (told,) = re.findall("Initial job has not accepted any resources(.*)", said)
    assert told == "; of another wait"
    frames, _, error = trace.partition("hopsgpu.RankFailed: ")
    assert re.findall(r'File "(.+)", line', frames) == [str(script)] * 2
    first, *rest = error.splitlines()
    assert first.endswith("raised ValueError: no batch")
    assert [line for line in rest if line.startswith("  File ")] == [
        f'  File "{script}", line 16, in train'
    ]


@pytest.mark.soak
def test_spark_logs_lost_executors_but_not_released_ones(
    cluster_env: dict[str, str], gpus_back: Callable[[], int], tmp_path: Path
) -> None:
    (tmp_path / "releases.py").write_text(RELEASES)
    ran = subprocess.run(
        [sys.executable, "releases.py"],
        cwd=tmp_path,
        env={**cluster_env, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
    )
    assert ran.returncode == 0, ran.stderr
    cancelled, elastic, lost, own = (line.split() for line in ran.stdout.splitlines())
    assert len(cancelled) == len(lost) == 2 and elastic and own
    complaint = re.compile(r"(?:Failed to send RPC .* to|connection from) \S+:(\d+)")
    ports = {*complaint.findall(ran.stderr)}
    assert ports & {*own} and ports.isdisjoint({*cancelled, *elastic}), ran.stderr
    # The other executor of this gang was released.
    assert len(ports & {*lost}) <= 1, ran.stderr
    assert re.search(r"ERROR YarnScheduler: Lost executor \d+ on ", ran.stderr), ran.stderr
    assert "TaskKilled" not in ran.stderr, ran.stderr
    assert "(already removed): Executor killed by driver" not in ran.stderr, ran.stderr
