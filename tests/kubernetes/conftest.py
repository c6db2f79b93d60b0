"""The administrator's view of the cluster on Kubernetes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.devcluster.kubernetes import admin_kubeconfig
from hopsgpu.devcluster.kubernetes_programs import KUBECTL, built_programs
from hopsgpu.devcluster.layout import ClusterLayout

Kubectl = Callable[..., Any]
_SECONDS = 120.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.kubernetes)


@pytest.fixture(scope="session")
def kubectl(cluster_dir: Path) -> Kubectl:
    """Run kubectl as the administrator; return its JSON answer, or its text."""
    program = built_programs(os.environ) / KUBECTL
    config = admin_kubeconfig(ClusterLayout.at(cluster_dir))

    def run(*arguments: str, stdin: object = None, is_json: bool = False) -> Any:
        output = ("-o", "json") if is_json else ()
        completed = subprocess.run(
            [str(program), "--kubeconfig", str(config), *arguments, *output],
            # JSON is YAML, too.
            input=None if stdin is None else json.dumps(stdin),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        assert completed.returncode == 0, completed.stderr
        return json.loads(completed.stdout) if is_json else completed.stdout

    return run


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
