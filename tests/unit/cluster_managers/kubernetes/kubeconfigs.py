"""Kubeconfig files of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.unit.cluster_managers.kubernetes.api_server import TOKEN


def write_kubeconfig(directory: Path, url: str, user: dict[str, Any] | None = None) -> Path:
    """Write a kubeconfig with the contexts "here" (current), "plain" and "elsewhere"."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [
            {"name": "own", "cluster": {"server": url}},
            {"name": "other", "cluster": {"server": "https://10.0.0.9:6443"}},
        ],
        "contexts": [
            {"name": "here", "context": {"cluster": "own", "user": "u", "namespace": "team"}},
            {"name": "plain", "context": {"cluster": "own", "user": "u"}},
            {"name": "elsewhere", "context": {"cluster": "other", "user": "u"}},
        ],
        "users": [{"name": "u", "user": user or {"token": TOKEN}}],
    }
    file = directory / "kubeconfig"
    file.write_text(yaml.safe_dump(content))
    return file
