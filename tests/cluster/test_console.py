"""What a plain script leaves on its terminal, of the real Spark on the real YARN."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyspark
import pytest

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
SCRIPT = """
import sys
import hopsgpu

def train():
    raise ValueError("no batch")

def helper():
    return hopsgpu.launch(train, workers=2, progress="off")

spark = hopsgpu.session("console", conf={
    "spark.ui.filters": "Tripping",
    "spark.driver.extraClassPath": sys.argv[1],
    # In place of the 15 s after which Spark says that no executor has come.
    "spark.starvation.timeout": "500ms",
})
if sys.argv[2] == "etl":
    print(spark.range(10).count())
helper()
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


def run(environ: dict[str, str], tripping: Path, first: str) -> subprocess.CompletedProcess[str]:
    """Runs the script, whose session has to start twice."""
    (tripping / "trips").touch()
    script = tripping / "train.py"
    script.write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, script, tripping, first],
        env={**environ, "TRIPS": str(tripping / "trips")},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )


def test_a_script_that_fails_shows_its_own_frames_and_nothing_of_java(
    cluster_env: dict[str, str], tripping: Path, gpus_back: Callable[[], int]
) -> None:
    ran = run(cluster_env, tripping, "gang")
    assert ran.returncode == 1
    said, _, trace = ran.stderr.partition("Traceback (most recent call last):\n")
    (line,) = [line for line in said.splitlines() if line.startswith("hopsgpu: ")]
    assert re.fullmatch(
        r"hopsgpu: Spark's user interface failed as it started, .*"
        r"\(java.util.ConcurrentModificationException\); Spark is started again \(start 2 of 3\)",
        line,
    )
    assert not re.search(r"^(\tat |java\.|org\.)", said, re.MULTILINE), said
    # The wait was explained, and not by Spark.
    assert "Initial job has not accepted any resources" not in said
    script = str(tripping / "train.py")
    frames, _, error = trace.partition("hopsgpu.errors.RankFailed: ")
    assert re.findall(r'File "(.+)", line', frames) == [script, script]
    first, *rest = error.splitlines()
    assert first.endswith("raised ValueError: no batch")
    assert [line for line in rest if line.startswith("  File ")] == [
        f'  File "{script}", line 6, in train'
    ]


def test_of_other_jobs_that_wait_spark_goes_on_to_say_so(
    cluster_env: dict[str, str], tripping: Path, gpus_back: Callable[[], int]
) -> None:
    ran = run({**cluster_env, "HOPSGPU_LOG": "debug"}, tripping, "etl")
    assert "Initial job has not accepted any resources" in ran.stderr
    # And with HOPSGPU_LOG=debug all frames are shown.
    assert f'File "{Path(os.fspath(tripping))}/train.py"' in ran.stderr
    assert "hopsgpu/execution.py" in ran.stderr and "hopsgpu/worker/rank.py" in ran.stderr
