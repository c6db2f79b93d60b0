"""What is said of a lost executor whose node the ResourceManager gave up."""

from __future__ import annotations

import pytest

from hopsgpu.cluster_managers.resources import NOTHING
from hopsgpu.cluster_managers.snapshot import Node
from hopsgpu.cluster_managers.yarn.lost_nodes import why_lost
from hopsgpu.errors import HopsGpuError

GIVEN_UP = "Container from a bad node: c. Diagnostics: Container released on a *lost* node"


def node(state: str, host: str = "node2", health: str = "", port: int = 45454) -> Node:
    return Node(f"{host}:{port}", host, state, NOTHING, NOTHING, health=health)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("LOST", "its NodeManager was lost: it did not report to the ResourceManager for yarn"),
        ("REBOOTED", "its NodeManager was restarted and lost its containers"),
        ("SHUTDOWN", "its NodeManager was shut down"),
        ("DECOMMISSIONED", "an administrator decommissioned its node"),
    ],
)
def test_a_node_that_was_given_up_is_told_before_what_spark_says(state: str, words: str) -> None:
    said = why_lost(GIVEN_UP, "node2", lambda: [node("RUNNING", "node1"), node(state)], str)
    assert said.startswith(words)
    assert said.endswith(f"; Spark says: {GIVEN_UP}")


def test_an_unhealthy_node_is_told_with_what_its_check_says() -> None:
    said = why_lost("", "node2", lambda: [node("UNHEALTHY", health="ERROR no GPU")], str)
    assert "UNHEALTHY" in said
    assert said.endswith("its health check says: ERROR no GPU")


def test_a_node_manager_that_is_back_had_been_lost_all_the_same() -> None:
    # One that came back at another port; the old entry stays.
    back = [node("LOST"), node("RUNNING", port=45455)]
    assert "is back: node2 is LOST and RUNNING now" in why_lost(
        GIVEN_UP, "node2", lambda: back, str
    )
    assert why_lost("its connection ended", "node2", lambda: back, str) == "its connection ended"


def test_a_node_that_runs_is_not_to_blame() -> None:
    others = [node("RUNNING"), node("LOST", "node1")]
    assert why_lost("Exit status: 137", "node2", lambda: others, str) == "Exit status: 137"
    assert why_lost("", "node2", lambda: others, str) == ""


def test_a_resource_manager_that_does_not_answer_hides_no_reason() -> None:
    def refuse() -> list[Node]:
        raise HopsGpuError("no ResourceManager answers")

    said = why_lost("Exit status: 137", "node2", refuse, str)
    assert "could not be asked" in said
    assert "no ResourceManager answers" in said
    assert said.endswith("; Spark says: Exit status: 137")


def test_an_application_that_yarn_ended_is_told_and_nothing_else() -> None:
    """Its master may have been on the node that was lost; Spark then knows no reason."""
    ended = "FAILED: AM Container exited with exitCode: -100"
    said = why_lost("An error occurred", "node1", lambda: [node("LOST")], lambda: ended)
    assert said == f"YARN ended the application, and its executors with it: {ended}"
