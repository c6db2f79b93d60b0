"""The start of a run, the same for launches, searches and scores."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.backends.spark.jvm_threads import start_daemon
from hopsgpu.core.spec import LaunchPlan
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.runs.run import Handle, StartThread
from hopsgpu.runs.run_end import RunBody, run_to_end
from hopsgpu.runs.status_board import StatusBoard
from hopsgpu.storage.background import Background

B = TypeVar("B", bound=StatusBoard)
H = TypeVar("H", bound=Handle[Any])


def start_run(
    handle: type[H],
    plan: LaunchPlan,
    application: GangApplication,
    board: B,
    make_body: Callable[[ActiveRun[B]], RunBody[Any]],
    *,
    background: Background | None = None,
    start_thread: StartThread | None = None,
) -> H:
    """Start a run in a thread of its own, and return a handle on it.

    Args:
        plan: the run's plan, whose warnings become those of the run.
        background: writes to the lake; None for threads of the run's own. The owner of a given one
            reports its problems, so the end of a run that succeeds does not wait for the lake.
        start_thread: starts the run's thread; None for a new daemon thread.
    """
    run_id = board.run_id
    active = ActiveRun(
        plan,
        application,
        board,
        threading.Event(),
        background or Background(f"hopsgpu-{run_id}-record"),
    )
    board.set_application(application.id, plan.queue)
    for text in plan.warnings:
        board.warn(text)
    should_flush = background is None
    work = functools.partial(run_to_end, make_body(active), active, should_flush=should_flush)
    start_thread = start_thread or functools.partial(start_daemon, f"hopsgpu-{run_id}")
    return handle(board, active.cancelled, work, start_thread)
