"""Threads that may call Spark."""

from __future__ import annotations

from collections.abc import Callable

from pyspark import InheritableThread


def start_daemon(name: str, body: Callable[[], None]) -> None:
    """Run a function in its own thread, which inherits the caller's Spark properties.

    The thread is a daemon, because a run must not keep a failed script, and its GPUs, alive.
    """
    InheritableThread(target=body, name=name, daemon=True).start()
