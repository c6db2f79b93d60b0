"""Threads in which Spark may be called."""

from __future__ import annotations

from collections.abc import Callable

from pyspark import InheritableThread


def start_daemon(name: str, body: Callable[[], None]) -> None:
    """Run something in a thread of its own, which has the caller's Spark properties.

    A daemon: a script that fails must not be kept alive, with its GPUs, by a run.
    """
    InheritableThread(target=body, name=name, daemon=True).start()
