"""Logging of runs to MLflow, in addition to the lake, by a separate process."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.packaging.provenance import Provenance

_log = logging.getLogger(__name__)

EXPERIMENT = "hopsgpu"
_SECONDS = 300.0
# By default, MLflow retries an unreachable server for many minutes, and sends telemetry.
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


@dataclass(frozen=True)
class Tracking:
    """The URI of an MLflow server, and an experiment, which is created if missing."""

    uri: str
    experiment: str = EXPERIMENT

    @property
    def display_uri(self) -> str:
        """The URI without user and password."""
        parts = urllib.parse.urlsplit(self.uri)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def tracking_to(uri: str | None, experiment: str | None) -> Tracking | None:
    """Return where to log runs, given `spark.hopsgpu.mlflow` and its experiment, or None.

    Raises:
        ConfigError: MLflow is not installed at the driver.
    """
    if not uri or not uri.strip():
        return None
    tracking = Tracking(uri.strip(), (experiment or "").strip() or EXPERIMENT)
    spec = importlib.util.find_spec("mlflow")
    # The spec of a directory with this name has no origin.
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"spark.hopsgpu.mlflow={tracking.display_uri!r} asks for runs to be logged to MLflow,"
            f" which is not installed at the driver ({sys.executable}): pip install mlflow-skinny,"
            " or hopsgpu[mlflow]; or leave spark.hopsgpu.mlflow and HOPSGPU_MLFLOW unset"
        )
    return tracking


def log(
    tracking: Tracking, run_url: str, code: Provenance | None, seconds: float = _SECONDS
) -> None:
    """Log a run that has ended, given its directory, to MLflow, and wait for the result.

    A separate process (`mlflow_logger`) does it, because the import of MLflow takes seconds, and
    environment variables set its timeouts.

    Raises:
        HopsGpuError: the log in MLflow is incomplete after `seconds`.
    """
    began = time.monotonic()
    request = {
        "uri": tracking.uri,
        "experiment": tracking.experiment,
        "run_url": run_url,
        "parameters": code.parameters if code is not None else {},
        "code_digest": code.code_digest if code is not None else "",
        "seconds": seconds,
    }
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", "hopsgpu.tracking.mlflow_logger"],
            # Not as arguments: the URI may contain a password.
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=seconds,
            env=_environment(os.environ),
            # Ctrl-C must not stop this process, which logs the run as cancelled.
            start_new_session=True,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        is_late = isinstance(error, subprocess.TimeoutExpired)
        reason = f"the process that logs the run did not end in {seconds:g} s" if is_late else error
        raise HopsGpuError(_error_text(tracking, run_url, str(reason))) from None
    problems = _reported_problems(process.stdout)
    if problems is None:
        last = process.stderr.decode(errors="replace").strip().splitlines()[-1:]
        problems = last or [f"the process that logs the run exited with code {process.returncode}"]
    if problems:
        raise HopsGpuError(_error_text(tracking, run_url, "; ".join(problems)))
    took = time.monotonic() - began
    _log.info("logged %s to MLflow at %s in %.1f s", run_url, tracking.display_uri, took)


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    return {**_DEFAULTS, **ours, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}


def _reported_problems(output: bytes) -> list[str] | None:
    """Return the problems that `mlflow_logger` wrote; None if it did not finish."""
    try:
        return [str(problem) for problem in json.loads(output)]
    except (ValueError, TypeError):
        return None


def _error_text(tracking: Tracking, run_url: str, reason: str) -> str:
    # MLflow's messages contain the server's URI with user and password.
    user = urllib.parse.urlsplit(tracking.uri).netloc.rpartition("@")[0]
    reason = reason.replace(f"{user}@", "") if user else reason
    return f"{run_url} is logged incompletely to MLflow at {tracking.display_uri}: {reason}"
