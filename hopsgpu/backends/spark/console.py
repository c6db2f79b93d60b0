"""The output of the driver's JVM, passed on so that a live display on the terminal stays intact."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hopsgpu.display.screens import is_in_terminal, is_taken
from hopsgpu.terminal_text import printable

if TYPE_CHECKING:
    from pyspark import SparkConf

_STDERR = 2


def gateway(conf: SparkConf) -> Any:
    """Start a JVM for PySpark whose stderr passes through this process; return its gateway.

    Return None if a JVM already exists, or if no live display is possible. PySpark then starts the
    JVM, and Spark's log goes to stderr directly.
    """
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway

    has_jvm = SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ
    if has_jvm or not is_in_terminal():
        return None
    launch: Any = launch_gateway
    reading, writing = os.pipe()
    # Read before the JVM starts: a JVM that fails to start writes the reason, and a JVM blocks if
    # its output is not read.
    threading.Thread(
        target=_pass_on_from, args=(reading,), name="hopsgpu-spark-log", daemon=True
    ).start()
    try:
        return launch(conf, {"stderr": writing})
    finally:
        os.close(writing)


def _pass_on_from(descriptor: int) -> None:
    with open(descriptor, "rb") as lines:  # noqa: PTH123 - not a path
        pass_on(lines)


def pass_on(lines: Iterable[bytes]) -> None:
    """Write lines to stderr, above a live display if there is one.

    Lines that cannot be written are dropped, because the JVM blocks if its output is not read.
    """
    for line in lines:
        # Spark's messages quote ranks and YARN.
        text = printable(line.decode(errors="backslashreplace"), should_keep_returns=True)
        if is_taken() and _is_shown(text):
            continue
        with contextlib.suppress(OSError):
            # Do not use sys.stderr: Python does not wait for this thread at its exit, and would
            # fail if the thread held the stream's lock.
            os.write(_STDERR, text.encode())


def _is_shown(text: str) -> bool:
    try:
        sys.stderr.write(text)
    except Exception:  # noqa: BLE001 - the line must appear, whatever error a display raises
        return False
    return True
