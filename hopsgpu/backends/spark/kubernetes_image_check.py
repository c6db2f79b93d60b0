"""The check of an application's image by a task without a GPU, before GPUs are requested."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
import uuid
from typing import TYPE_CHECKING

from hopsgpu.backends.spark.jvm_threads import start_daemon
from hopsgpu.backends.spark.settings import refuse_other_python
from hopsgpu.errors import ConfigError, HopsGpuError

if TYPE_CHECKING:
    from hopsgpu.backends.spark.kubernetes_application import KubernetesApplication

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
# An executor that starts needs a few seconds, and a node that pulls a large image minutes. A gang
# that does not wait longer learns the same from its first executor.
_SECONDS = 60.0
_NO_PROGRAM = re.compile(r'Cannot run program "([^"]+)"')


def check_image(application: KubernetesApplication) -> None:
    """Run a task in the image of an application, and wait for it for at most a minute.

    An executor that has run the task stays for a while, and answers which modules it has.

    Raises:
        ConfigError: no pod of this image can start, it lacks Python, or its Python has another
            minor version than the driver's.
    """
    tag = f"hopsgpu-image-{uuid.uuid4().hex[:8]}"
    ended, errors = threading.Event(), list[str]()

    def run() -> None:
        context = application.context
        context.setJobGroup(tag, "hopsgpu: check the Python of the image")
        context.addJobTag(tag)
        try:
            context.parallelize([0], 1).map(_python_version).collect()
        except Exception as error:  # noqa: BLE001 - the caller explains the error
            errors.append(str(error))
        finally:
            ended.set()

    start_daemon(tag, run)
    deadline = time.monotonic() + _SECONDS
    while not ended.wait(_POLL_SECONDS):
        try:
            _refuse_final_problem(application)
        except ConfigError:
            application.jvm.cancel(tag)
            raise
        if time.monotonic() > deadline:
            log.warning("the image was not checked within %g s", _SECONDS)
            application.jvm.cancel(tag)
            return
    if errors:
        _explain(errors[0], application.image)
        log.info("the check of the image failed: %s", errors[0].splitlines()[0])


def _python_version(_: int) -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def _refuse_final_problem(application: KubernetesApplication) -> None:
    try:
        problem = application.find_start_problem(None)
    except HopsGpuError as error:
        log.info("it is unknown whether the image can start: %s", error)
        return
    if problem is not None and problem.is_final:
        raise ConfigError(problem.text)


def _explain(error: str, image: str | None) -> None:
    """Raise ConfigError if the error of the task shows that the image cannot run ranks."""
    refuse_other_python(error)
    if (program := _NO_PROGRAM.search(error)) is not None:
        raise ConfigError(
            f"the image {image} has no {program[1]}: install Python {_python_version(0)} in it, or"
            " name its Python with spark.pyspark.python (PYSPARK_PYTHON)"
        )
