"""The administrator's view of the cluster on Kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.kubectl import Kubectl, kubectl_of


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.kubernetes)


@pytest.fixture(scope="session")
def kubectl(cluster_dir: Path) -> Kubectl:
    return kubectl_of(cluster_dir)


@pytest.fixture
def applied(kubectl: Kubectl) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Create objects in the namespace of executors, and delete them afterwards."""
    created: list[dict[str, Any]] = []

    def apply(body: dict[str, Any]) -> None:
        kubectl("apply", "--filename", "-", stdin=body)
        created.append(body)

    yield apply
    for body in reversed(created):
        kubectl("delete", "--ignore-not-found", "--filename", "-", stdin=body)
