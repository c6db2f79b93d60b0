"""Which of Spark's messages are suppressed: lines as Spark 4.3 and 3.5 log them, by logger."""

from __future__ import annotations

import re

import pytest

from hopsgpu.backends.spark.release_messages import KilledExecutor, regexes_by_logger

TASKS = "org.apache.spark.scheduler.TaskSetManager"
SCHEDULER = "org.apache.spark.scheduler.cluster.YarnScheduler"
CLIENT = "org.apache.spark.network.client.TransportClient"
RESPONSES = "org.apache.spark.network.client.TransportResponseHandler"
CHANNEL = "org.apache.spark.network.server.TransportChannelHandler"
BLOCKS = "org.apache.spark.storage.BlockManagerMasterEndpoint"
ENDPOINT = "org.apache.spark.scheduler.cluster.YarnSchedulerBackend$YarnDriverEndpoint"
BLOCK_MASTER = "org.apache.spark.storage.BlockManagerMaster"
RPC = "RPC 8463212264467679630"
KILLED = [KilledExecutor("2", "127.0.0.1:41326"), KilledExecutor("7")]
TAG = "hopsgpu-fit-20261129-212302-1a1468-placeholders-87528e60"
TASK = "Lost task 0.0 in stage 1.0 (TID 0) (node2 executor"
CANCELLED = "TaskKilled (Stage cancelled: "


def is_suppressed(logger: str, message: str) -> bool:
    regexes = regexes_by_logger(KILLED, [TAG]).get(logger, ())
    return any(re.match(regex, message, re.DOTALL) for regex in regexes)


@pytest.mark.parametrize(
    ("logger", "message"),
    [
        (
            TASKS,
            f"{TASK} 6): {CANCELLED}[SPARK_JOB_CANCELLED] Job 1 cancelled part of cancelled job"
            f" tags {TAG} SQLSTATE: XXKDA)",
        ),
        (TASKS, f"{TASK} 6): {CANCELLED}Job 1 cancelled part of cancelled job tag {TAG})"),
        (
            TASKS,
            f"{TASK} 2): ExecutorLostFailure (executor 2 exited unrelated to the running tasks)"
            " Reason: Executor killed by driver.",
        ),
        (SCHEDULER, "Lost an executor 7 (already removed): Executor killed by driver."),
        (
            SCHEDULER,
            "Ignoring update with state KILLED for TID 18 because its task set is gone (this is"
            " likely the result of receiving duplicate task finished status updates)",
        ),
        (
            ENDPOINT,
            "Ignored task status update (18 state KILLED) from unknown executor with ID 7",
        ),
        (CLIENT, f"Failed to send {RPC} to /127.0.0.1:41326"),
        (
            CLIENT,
            f"Failed to send {RPC} to node2/127.0.0.1:41326: java.io.IOException: Broken pipe",
        ),
        (
            RESPONSES,
            "Still have 1 requests outstanding when connection from /127.0.0.1:41326 is closed",
        ),
        (CHANNEL, "Exception in connection from /127.0.0.1:41326"),
        (
            BLOCKS,
            "Error trying to remove broadcast 0 from block manager"
            " BlockManagerId(2, node2, 44575, None)",
        ),
        (
            BLOCK_MASTER,
            f"Failed to remove broadcast 3 with removeFromMaster = true - Failed to send {RPC} to"
            " /127.0.0.1:41326: java.nio.channels.ClosedChannelException",
        ),
    ],
)
def test_messages_about_what_was_ended_are_suppressed(logger: str, message: str) -> None:
    assert is_suppressed(logger, message)
    loggers = {TASKS, SCHEDULER, ENDPOINT, CLIENT, RESPONSES, CHANNEL, BLOCKS, BLOCK_MASTER}
    others = loggers - {logger}
    assert not any(is_suppressed(other, message) for other in others)


@pytest.mark.parametrize(
    ("logger", "message"),
    [
        # Of another job, and of a task that failed by itself.
        (TASKS, f"{TASK} 2): {CANCELLED}Job 1 cancelled part of cancelled job tags mine)"),
        (TASKS, f"{TASK} 2): {CANCELLED}Job 1 cancelled part of cancelled job tags {TAG}1)"),
        (TASKS, f"{TASK} 2): TaskKilled (another attempt succeeded)"),
        (TASKS, f"{TASK} 2): org.apache.spark.api.python.PythonException: ValueError: {TAG}"),
        # Executors that were lost, the second of them one that is released meanwhile.
        (SCHEDULER, "Lost executor 3 on node1: Container killed by YARN for exceeding memory"),
        (SCHEDULER, "Lost executor 2 on node2: Container exited with a non-zero exit code 137"),
        (SCHEDULER, "Lost an executor 2 (already removed): Container from a bad node"),
        (SCHEDULER, "Lost an executor 77 (already removed): Executor killed by driver."),
        (
            TASKS,
            f"{TASK} 2): ExecutorLostFailure (executor 2 exited caused by one of the running"
            " tasks) Reason: Container from a bad node: exit status 137",
        ),
        (
            SCHEDULER,
            "Ignoring update with state FAILED for TID 18 because its task set is gone",
        ),
        (
            ENDPOINT,
            "Ignored task status update (18 state KILLED) from unknown executor with ID 13",
        ),
        (ENDPOINT, "Ignored task status update (18 state FAILED) from unknown executor with ID 7"),
        # Other connections.
        (CLIENT, f"Failed to send {RPC} to /127.0.0.1:41327"),
        (CLIENT, f"Failed to send {RPC} to /127.0.0.1:413260"),
        (CLIENT, f"Failed to send {RPC} to /127.0.0.11:41326"),
        (CLIENT, f"Failed to send {RPC} to /227.0.0.1:41326"),
        (CHANNEL, "Exception in connection from /10.0.0.1:41326"),
        (
            BLOCKS,
            "Error trying to remove broadcast 0 from block manager"
            " BlockManagerId(3, node2, 44575, None)",
        ),
    ],
)
def test_messages_about_all_else_are_logged(logger: str, message: str) -> None:
    assert not is_suppressed(logger, message)


def test_without_an_address_or_a_job_no_message_about_connections_or_tasks_is_suppressed() -> None:
    found = regexes_by_logger([KilledExecutor("7")])
    assert not {CLIENT, RESPONSES, CHANNEL, BLOCK_MASTER} & found.keys()
    assert "TaskKilled" not in str(found)
    assert not regexes_by_logger()
