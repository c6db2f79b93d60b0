from __future__ import annotations

import pytest

from hopsgpu.backends.spark.barrier_job import reason_of, was_cancelled

LOST = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Could not recover from a \
failed barrier ResultStage. Most recent failure reason: Stage failed because barrier task \
ResultTask(1, 0) finished unsuccessfully.
ExecutorLostFailure (executor 4 exited caused by one of the running tasks) Reason: Container \
from a bad node: container_1 on host: node2. Exit status: 137.
[2026-11-21 11:53:38.691]Killed by external signal
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:4568)
"""
PYTHON = """An error occurred while calling o1.collect.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 failed
Traceback (most recent call last):
  File "holder.py", line 3, in run_placeholder
ConnectionRefusedError: [Errno 111] Connect call failed ('10.0.0.1', 41000)

\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:581)
Driver stacktrace:
Caused by: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
"""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            LOST,
            "Container from a bad node: container_1 on host: node2. Exit status: 137."
            " [2026-11-21 11:53:38.691]Killed by external signal",
        ),
        (
            PYTHON,
            "ConnectionRefusedError: [Errno 111] Connect call failed ('10.0.0.1', 41000)",
        ),
        (
            "An error occurred while calling z:collect.\n: org.apache.spark.SparkException: Job 3"
            " cancelled because SparkContext was shut down: bye\n\tat org.apache.x(x.scala:1)\n",
            "org.apache.spark.SparkException: Job 3 cancelled because SparkContext was shut down:"
            " bye",
        ),
        ('x\n  | File "a.py"\n  +----\n  | ValueError: in a group\n', "ValueError: in a group"),
        ("[SPARK-24942] Barrier stages\nsecond line", "[SPARK-24942] Barrier stages"),
        ("", "no reason given"),
    ],
)
def test_the_reason_is_what_a_person_needs(error: str, reason: str) -> None:
    assert reason_of(error) == reason


@pytest.mark.parametrize(
    ("error", "is_ours"),
    [
        ("[SPARK_JOB_CANCELLED] Job 30 cancelled part of cancelled job tags x-agents-8", True),
        ("Job 30 cancelled part of cancelled job group x-agents-8", True),
        ("Job 3 cancelled because SparkContext was shut down: bye", False),
        (LOST, False),
    ],
)
def test_who_cancelled_a_job(error: str, is_ours: bool) -> None:
    assert was_cancelled(error) is is_ours
