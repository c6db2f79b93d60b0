"""kubectl as the administrator of the development cluster."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hopsgpu.devcluster.kubernetes import admin_kubeconfig
from hopsgpu.devcluster.kubernetes_programs import KUBECTL, built_programs
from hopsgpu.devcluster.layout import ClusterLayout

Kubectl = Callable[..., Any]
_SECONDS = 120.0


def kubectl_of(cluster_dir: Path) -> Kubectl:
    """Return a function that runs kubectl and returns its JSON answer, or its text."""
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


def evict(kubectl: Kubectl, pod: str) -> None:
    """Evict a pod by the API, as `kubectl drain` does."""
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": "default"},
    }
    path = f"/api/v1/namespaces/default/pods/{pod}/eviction"
    kubectl("create", "--raw", path, "--filename", "-", stdin=body)
