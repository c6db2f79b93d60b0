"""The pages over a directory that stands for the lake, without a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from starlette.testclient import TestClient

from hopsgpu.cluster_managers.cluster_gpus import ClusterGpus
from hopsgpu.cluster_managers.yarn.application_state import ApplicationState
from hopsgpu.core.queue_policy import QueueSnapshot
from hopsgpu.display.run_facts import ManagerPages
from hopsgpu.storage.lake import LakePath
from hopsgpu.web.access import Secrets, Server
from hopsgpu.web.page_sources import Sources
from hopsgpu.web.routes import application

KNOWN = Secrets("the-token", "the-session", "the-form")
HOST = "http://127.0.0.1:8420"
NOTHING = ClusterGpus(0.0, "alice", (), 0, (), (), 0, None, "", ())


Queues = tuple[Mapping[str, tuple[QueueSnapshot, int]], Sequence[str]]


RESOURCE_MANAGER = "http://rm.example.com:8088"


def no_queues() -> Queues:
    return {}, ()


def sources_of(
    root: Path,
    cluster: Callable[[], ClusterGpus] = lambda: NOTHING,
    queues: Callable[[], Queues] = no_queues,
    clock: Callable[[], float] = time.time,
    others: Sequence[Path] = (),
    application: Callable[[str], ApplicationState] | None = None,
) -> Sources:
    lakes = [LakePath(f"file://{path}") for path in (root, *others)]
    pages = ManagerPages(
        lambda application_id: f"{RESOURCE_MANAGER}/cluster/app/{application_id}",
        f"{RESOURCE_MANAGER}/cluster/scheduler",
    )
    return Sources(cluster, queues, lambda: (lakes, ()), application, pages, clock)


def browser(
    sources: Sources,
    server: Server | None = None,
    *,
    known: bool = True,
    # No page comes without what was read, however slow the machine is at the moment.
    patience: float = 120.0,
) -> TestClient:
    """A client that has opened the URL with the token, unless it is not to."""
    app = application(sources, KNOWN, server or Server(8420), patience)
    client = TestClient(app, base_url=HOST, follow_redirects=False)
    if known:
        assert client.get(f"/?token={KNOWN.token}").status_code == 303
    return client
