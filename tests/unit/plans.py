"""Plans, calls and requests with as little in them as a test needs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from hopsgpu.attempts.rank_call import Call, PackedFunction
from hopsgpu.backends.gang_request import Request
from hopsgpu.core.spec import ExecutorShape, GangSpec, LaunchPlan
from hopsgpu.packaging.modules import PackedModules
from hopsgpu.storage.lake import LakePath

SHAPE = ExecutorShape(1, 1, 512, 512)


def plan(executors: int = 1, paths: Mapping[str, str] | None = None, **spec: Any) -> LaunchPlan:
    """Returns a plan with one rank in each executor."""
    return LaunchPlan(GangSpec("run", **spec), executors, 1, SHAPE, "", {}, paths or {})


def function(call: bytes = b"call", modules: bytes = b"modules", **of_it: Any) -> PackedFunction:
    return PackedFunction(call, PackedModules(modules, 1, ()), **of_it)


def call(planned: LaunchPlan | None = None, attempt: int = 0, **of_call: Any) -> Call:
    """Returns a call of the run run-1."""
    of_call = {"function": function(), **of_call}
    return Call(
        planned or plan(),
        run_id="run-1",
        directory=LakePath("file:///runs/run-1"),
        attempt=attempt,
        **of_call,
    )


def request(
    watcher: Any, executors: int = 1, timeout: float | None = None, **of_request: Any
) -> Request:
    """Returns a request of the run `run` for executors."""
    of_request = {"plan": plan(executors, acquire_timeout=timeout), **of_request}
    return Request("run", watcher=watcher, **{"cancelled": threading.Event(), **of_request})
