"""A query for the modules of the executors' Python, run on an idle executor."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from pyspark import SparkContext

from hopsgpu.backends.spark.application import Application
from hopsgpu.backends.spark.jvm_threads import start_daemon

log = logging.getLogger(__name__)

# The profile of the ETL executors, which hold no GPU.
_DEFAULT_PROFILE = 0
# Time for Python to start on an executor. If the executor ends meanwhile, the task would wait for
# another one, which takes longer.
_ANSWER_SECONDS = 5.0


def _run_query(context: SparkContext, tag: str, modules: list[str]) -> list[list[str]]:
    context.setJobGroup(tag, "hopsgpu: look for modules in the executors' Python")
    context.addJobTag(tag)
    return context.parallelize([0], 1).mapPartitions(missing_modules_task(modules)).collect()


def probe(
    application: Application,
    modules: Collection[str],
    run_query: Callable[[SparkContext, str, list[str]], list[list[str]]] = _run_query,
    seconds: float = _ANSWER_SECONDS,
) -> list[str] | None:
    """Return the top-level modules that an idle executor's Python lacks.

    Return None if there is no such executor, or if it does not answer in time. A gang's first
    executor then reports the modules.

    Args:
        run_query: runs the query as a job with a tag, in a thread of its own.
    """
    jvm = application.jvm
    busy = jvm.busy_executors(_DEFAULT_PROFILE)
    if all(executor in busy for executor in jvm.registered_executors(_DEFAULT_PROFILE)):
        return None
    answered, answers = threading.Event(), list[list[str]]()
    tag = f"hopsgpu-modules-{uuid.uuid4().hex[:8]}"

    def run() -> None:
        try:
            answers.extend(run_query(application.context, tag, list(modules)))
        except Exception as error:  # noqa: BLE001 - cancelled or failed: the answer is unknown
            log.debug("%s: no answer: %s", tag, error)
            answers.clear()
        finally:
            answered.set()

    start_daemon(tag, run)
    if not answered.wait(seconds):
        jvm.cancel(tag)
        return None
    return answers[0] if answers else None


def missing_modules_task(modules: list[str]) -> Callable[[Iterable[Any]], Iterator[list[str]]]:
    def task(_: Iterable[Any]) -> Iterator[list[str]]:
        from hopsgpu.core.rank_requirements import missing_modules

        return iter([missing_modules(modules)])

    return task
