"""The state of one application, as the ResourceManager reports it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hopsgpu.cluster_managers.resources import total
from hopsgpu.cluster_managers.yarn.amounts import amount_of

ENDED = ("FINISHED", "FAILED", "KILLED")
# Length of the part of a diagnostics text that people need; YARN appends the container's log.
_MAX_TEXT = 400


@dataclass(frozen=True)
class ApplicationState:
    """The state of one application.

    Attributes:
        state: NEW, SUBMITTED, ACCEPTED, RUNNING, FINISHED, FAILED or KILLED.
        final: UNDEFINED until its end; then SUCCEEDED, FAILED or KILLED.
        diagnostics: why it waits, or the reason of its end; on one line.
        web: host:port of the NodeManager of its application master; "" before there is one.
        log: URL of the log of its application master; "" before there is one.
    """

    id: str
    name: str
    user: str
    queue: str
    state: str
    final: str
    diagnostics: str
    gpus: int
    web: str
    log: str

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def has_succeeded(self) -> bool:
        return self.final == "SUCCEEDED"

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of its Python driver; None if its diagnostics do not say it."""
        match = re.search(r"User application exited with status (\d{1,3})\b", self.diagnostics)
        return int(match[1]) if match else None

    @property
    def master(self) -> str:
        """Return the container id of its application master; "" before there is one."""
        match = re.search(r"/(container_\w+)", self.log)
        return match[1] if match else ""


def application_state_of(app: Mapping[str, Any], gpu_resource: str) -> ApplicationState:
    usages = (app.get("resourceInfo") or {}).get("resourceUsagesByPartition") or []
    diagnostics = " ".join((app.get("diagnostics") or "").split())
    return ApplicationState(
        id=app["id"],
        name=app.get("name") or "",
        user=app.get("user") or "",
        queue=app.get("queue") or "",
        state=app["state"],
        final=app.get("finalStatus") or "UNDEFINED",
        diagnostics=diagnostics[:_MAX_TEXT] + ("..." if len(diagnostics) > _MAX_TEXT else ""),
        gpus=total(amount_of(usage.get("used"), gpu_resource) for usage in usages).gpus,
        web=app.get("amHostHttpAddress") or "",
        log=app.get("amContainerLogs") or "",
    )
