"""Masters that answer as real ones of PySpark 4.3.0 did, with the answers of tests/unit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hopsgpu.cluster_managers.standalone.manager import StandaloneManager
from tests.unit.rest import Daemon

DATA = Path(__file__).parents[2] / "spark_answers"
OURS = "app-20261130150338-0000"
MALLORYS = "app-20261130150708-0001"
NAME_OF_MALLORYS = '<script>alert(1)</script> Executor Limit: 9 (0 granted) &amp; "\\x1b[31m'
FIRST = "worker-20261130150227-127.0.0.1-17191"
SECOND = "worker-20261130150226-127.0.0.1-17192"
MASTER = "spark://127.0.0.1:17177"
SECONDS = (10.0, 30.0)


def page(name: str) -> str:
    return (DATA / f"{name}.html").read_text()


def state(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


def answers(name: str) -> dict[str, Any]:
    """The answers of a moment: the state and the pages of our and of another application."""
    pages = {f"/app/?appId={OURS}": (200, page(name)), "/app/": (200, page("unknown"))}
    if (DATA / f"{name}_mallory.html").exists():
        pages[f"/app/?appId={MALLORYS}"] = (200, page(f"{name}_mallory"))
    return {"/json/": state(name), **pages}


def manager_of(*daemons: Daemon, **options: Any) -> StandaloneManager:
    addresses = tuple(daemon.url for daemon in daemons)
    return StandaloneManager(MASTER, addresses, **{"seconds": SECONDS, **options})
