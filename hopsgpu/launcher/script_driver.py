"""The driver of `hopsgpu run`: launches a script, and ends with the script's exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from hopsgpu.backends.inventory import inventory
from hopsgpu.backends.spark.session import session
from hopsgpu.errors import ConfigError, HopsGpuError, RankFailed, RunTimeout
from hopsgpu.launcher.api import launch, plan
from hopsgpu.launcher.scripts import ReadyScript, ScriptRequest, check_exists

# As the command `timeout` ends.
TIMED_OUT = 124
_SIGNALLED = 128
_FAILED = 1
# Ranks on each node: as many as it has GPUs, or cores if no node has one.
PER_GPU, PER_DEVICE = "gpu", "auto"


@dataclass(frozen=True)
class ScriptJob:
    """The script that `hopsgpu run` launches, with the options of the launch.

    Attributes:
        name: name of the application and of the run; None for that of the script.
        nodes: the smallest and the largest number of nodes, of `--nnodes`.
        per_node: ranks on each node; PER_GPU or PER_DEVICE to count them in the cluster.
        workers: the world size of `--workers`, or two sizes; None for `nodes` and `per_node`.
        options: the options of `launch`, by name.
        ready: fields of a ReadyScript, for a driver on another machine; None to find the script.
    """

    kind: str
    target: str
    args: tuple[str, ...]
    working_dir: str | None
    name: str | None = None
    nodes: tuple[int, int] = (1, 1)
    per_node: int | str = 1
    workers: tuple[int, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    ready: Mapping[str, Any] | None = None

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> ScriptJob:
        values = json.loads(text)
        values["args"], values["nodes"] = tuple(values["args"]), tuple(values["nodes"])
        values["workers"] = None if values["workers"] is None else tuple(values["workers"])
        return cls(**values)

    @property
    def title(self) -> str:
        """The name of the application."""
        return self.name or Path(self.target).name

    @property
    def request(self) -> ScriptRequest:
        directory = None if self.working_dir is None else Path(self.working_dir)
        return ScriptRequest(self.kind, self.target, directory)

    def launch_options(self, devices: int) -> dict[str, Any]:
        """Return the arguments of `launch`.

        Args:
            devices: ranks on each node if `per_node` leaves the number to the cluster.
        """
        target: Any = self.request
        if self.ready is not None:
            target = ReadyScript.from_fields(self.ready)
        sizes = self.workers
        if sizes is None:
            ranks = self.per_node if isinstance(self.per_node, int) else devices
            sizes = tuple(dict.fromkeys(nodes * ranks for nodes in self.nodes))
        options = dict(self.options)
        if self.name is not None:
            options["name"] = self.name
        workers = sizes[0] if len(sizes) == 1 else sizes
        return {"train_fn": target, "args": self.args, "workers": workers, **options}


def run_job(job: ScriptJob, conf: Mapping[str, str] | None = None) -> int:
    """Launch a script, and return the exit code of `hopsgpu run`.

    Args:
        conf: Spark properties of the application; None if it was submitted with them.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        # As Ctrl-C, which cancels the run where no call to Spark is in progress.
        received.append(number)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # A shell that started this process in the background has it ignore Ctrl-C.
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, interrupt)
    try:
        if job.ready is None:
            # A wrong name is reported before an application starts.
            check_exists(job.request)
        spark = session(job.title, conf=conf)
        try:
            launch(**job.launch_options(_devices(job)))
        finally:
            spark.stop()
    except KeyboardInterrupt as error:
        _say(str(error) or "interrupted")
        return _SIGNALLED + (received[0] if received else signal.SIGINT)
    except HopsGpuError as error:
        _say(str(error))
        return exit_code_of(error)
    return 0


def plan_job(job: ScriptJob, conf: Mapping[str, str]) -> str:
    """Return the plan of a job; the application that reads the cluster's state ends again.

    Raises:
        HopsGpuError: as `plan`.
    """
    spark = session(job.title, conf=conf)
    try:
        return str(plan(**job.launch_options(_devices(job))))
    finally:
        spark.stop()


def _devices(job: ScriptJob) -> int:
    if job.workers is not None or isinstance(job.per_node, int):
        return 0
    gpus = max((node.total for node in inventory().nodes), default=0)
    if gpus:
        return gpus
    if job.per_node == PER_GPU:
        raise ConfigError(
            "--nproc-per-node=gpu: no node has a GPU; give a number, or --nproc-per-node=auto for"
            " the number of cores"
        )
    return os.cpu_count() or 1


def exit_code_of(error: HopsGpuError) -> int:
    """Return the exit code of `hopsgpu run` after an error.

    124 after `run_timeout`; 128 and the signal's number if a signal ended the first rank that
    failed; its exit code; else 1.
    """
    if isinstance(error, RunTimeout):
        return TIMED_OUT
    if isinstance(error, RankFailed):
        if error.signal is not None and error.signal in signal.Signals.__members__:
            return _SIGNALLED + signal.Signals[error.signal]
        return error.exit_code or _FAILED
    return _FAILED


def _say(text: str) -> None:
    print(f"hopsgpu: {text}", file=sys.stderr, flush=True)


def driver_source(job: ScriptJob) -> str:
    """Return the source of a driver that runs a job, for cluster mode."""
    return _DRIVER.format(job=job.dump())


_DRIVER = '''\
"""Runs a script on a gang; written by `hopsgpu run`."""

import sys

from hopsgpu.launcher.script_driver import ScriptJob, run_job

if __name__ == "__main__":
    sys.exit(run_job(ScriptJob.parse({job!r})))
'''


def sizes_of(text: str) -> Sequence[int]:
    """Return one number, or the smallest and the largest of MIN:MAX.

    Raises:
        ValueError: the text is neither.
    """
    numbers = [int(part) for part in text.split(":")]
    if len(numbers) > 2 or min(numbers) < 1:
        raise ValueError(text)
    return numbers
