"""Launches that the fault matrix starts, in its own process or with a driver of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import hopsgpu
from tests.bounds import HANG_SECONDS
from tests.conftest import as_in_a_terminal, until
from tests.faults.training import GO, ORDER, PERFORMED, Note, notes_in, train, trial

MODEL = "net"
KILLED = "killed"
_COMMON: Mapping[str, Any] = {
    "memory_per_worker": "512m",
    "cores_per_worker": 1,
    "acquire_timeout": "3m",
}


class Kind(StrEnum):
    """What is launched: two ranks, an elastic gang of one or two, or two trials at a time."""

    GANG = "gang"
    ELASTIC = "elastic gang"
    SEARCH = "search"


@dataclass(frozen=True)
class Ending:
    """How a launch ended.

    Attributes:
        error: name of the error's type; "" if the launch succeeded.
        says: the error's text and, of a search, those of failed trials.
        at: when, by time.monotonic().
        warnings: of the result.
        worlds: why each world of an elastic gang ended.
        trials: state and number of tries of each trial of a search.
        version: of the published model, or None.
    """

    error: str
    says: str
    at: float
    warnings: tuple[str, ...] = ()
    worlds: tuple[str, ...] = ()
    trials: tuple[tuple[str, int], ...] = ()
    version: int | None = None


def ending_of(value: Any, error: BaseException | None) -> Ending:
    """Return how a launch ended, from its result or its error."""
    result = value if error is None else getattr(error, "result", None)
    texts = [] if error is None else [str(error), *getattr(error, "__notes__", ())]
    trials = getattr(result, "trials", ())
    model = getattr(result, "model", None)
    return Ending(
        "" if error is None else type(error).__name__,
        "\n".join([*texts, *(one.error for one in trials if one.error)]),
        time.monotonic(),
        tuple(getattr(result, "warnings", ())),
        tuple(world.end for world in getattr(result, "worlds", ())),
        tuple((one.state, one.tries) for one in trials),
        None if model is None else model.version,
    )


def begin(kind: Kind, directory: Path, options: Mapping[str, Any]) -> Callable[[], Any]:
    """Start a launch, and return what waits for its result; `run` is its Run, of gangs."""
    given = {"progress": "off", **_COMMON, **options}
    if kind is Kind.SEARCH:
        # Here, because the pages' tests read the faults where no optuna is installed.
        from optuna.distributions import FloatDistribution

        space = {"x": FloatDistribution(0.0, 1.0)}
        given = {"trials": 2, "max_concurrent": 2, "sampler": "random", "seed": 1, **given}
        timeout = given.pop("run_timeout", None)
        fn = given.pop("train_fn", trial)
        given.pop("placement", None)
        return lambda: hopsgpu.search(
            fn, space, kwargs={"directory": str(directory)}, trial_timeout=timeout, **given
        )
    given = {"workers": (1, 2) if kind is Kind.ELASTIC else 2, "model": MODEL, **given}
    fn = given.pop("train_fn", train)
    return hopsgpu.submit(fn, args=(str(directory),), **given).result


class Launch(ABC):
    """A launch in progress.

    Attributes:
        kind: what is launched.
        directory: where its ranks find the tests' word.
    """

    def __init__(self, kind: Kind, directory: Path) -> None:
        self.kind = kind
        self.directory = directory

    @abstractmethod
    def ending(self) -> Ending:
        """Wait for the end."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether it has ended."""

    @abstractmethod
    def close(self) -> None:
        """End it, whatever it does."""

    def notes(self) -> list[Note]:
        """Return what ranks or trials have said of themselves."""
        return notes_in(self.directory)

    def wait_for(self, ranks: int) -> None:
        """Wait until so many ranks of one world, or trials, run."""

        def run() -> bool:
            worlds = [note.world for note in self.notes()]
            return any(worlds.count(world) >= ranks for world in worlds)

        held = until(lambda: run() or self.has_ended, step=0.02)
        if self.has_ended:
            raise AssertionError(f"it ended before anything was injected: {self.ending()}")
        assert held, f"{len(self.notes())} of {ranks} ranks run"

    def order(self, number: int, what: str) -> None:
        """Have a rank or trial of the first world misbehave."""
        new = self.directory / "new"
        new.write_text(f"{number} {what}")
        new.rename(self.directory / ORDER)

    def wait_until_performed(self) -> None:
        """Wait until the rank or trial does what it was ordered to."""
        performed = self.directory / PERFORMED
        assert until(lambda: performed.exists(), step=0.02), "it does nothing"

    def go(self) -> None:
        """Let all ranks return."""
        (self.directory / GO).touch()

    def go_elsewhere(self, host: str) -> None:
        """Let the trials on other nodes return: theirs is the room for those of this node."""
        if self.kind is Kind.SEARCH:
            for note in self.notes():
                if note.host != host:
                    (self.directory / f"{GO}-{note.number}").touch()


class OwnLaunch(Launch):
    """One in this process.

    Attributes:
        run: the Run of a gang; None of a search, or if the launch was refused at once.
        states: those of a search so far.
        failed: trials of a search that failed so far.
    """

    def __init__(self, kind: Kind, directory: Path, options: Mapping[str, Any]) -> None:
        super().__init__(kind, directory)
        self._found: Ending | None = None
        self.run: hopsgpu.Run | None = None
        self.states: list[str] = []
        self.failed = 0
        if kind is Kind.SEARCH:
            options = {**options, "progress": self._note}
        try:
            wait = begin(kind, directory, options)
        except hopsgpu.HopsGpuError as error:
            self._found = ending_of(None, error)
            return
        self.run = getattr(wait, "__self__", None)
        self._thread = threading.Thread(target=self._await, args=(wait,), daemon=True)
        self._thread.start()

    def _note(self, status: hopsgpu.types.SearchStatus) -> None:
        self.states.append(status.state)
        self.failed = status.failed

    def _await(self, wait: Callable[[], Any]) -> None:
        try:
            self._found = ending_of(wait(), None)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self._found = ending_of(None, error)

    @property
    def state(self) -> str:
        """The state of the launch."""
        if self.run is not None:
            return self.run.status().state
        return self.states[-1] if self.states else ""

    @property
    def has_ended(self) -> bool:
        return self._found is not None

    def ending(self) -> Ending:
        assert until(lambda: self.has_ended, step=0.02), "it does not end"
        assert self._found is not None
        return self._found

    def close(self) -> None:
        self.go()
        if self.run is not None:
            self.run.cancel()
        until(lambda: self.has_ended)


class DriverLaunch(Launch):
    """One with a driver, and an application, of its own.

    Attributes:
        driver: the driver's process.
    """

    def __init__(
        self,
        kind: Kind,
        directory: Path,
        options: Mapping[str, Any],
        env: Mapping[str, str],
        conf: Mapping[str, Any],
    ) -> None:
        super().__init__(kind, directory)
        tmpdir = directory / "tmp"
        tmpdir.mkdir()
        given = json.dumps({"conf": {**conf}, "options": {**options}})
        self._found: Ending | None = None
        self.driver = subprocess.Popen(
            [sys.executable, "-m", __name__, kind.name, str(directory), given],
            cwd=Path(__file__).parents[2],
            env={**env, "TMPDIR": str(tmpdir)},
            stdout=(directory / "stdout").open("w"),
            stderr=(directory / "stderr").open("w"),
            preexec_fn=as_in_a_terminal,
        )

    @property
    def has_ended(self) -> bool:
        return self.driver.poll() is not None

    def ending(self) -> Ending:
        if self._found is None:
            self.driver.wait(HANG_SECONDS)
            at = time.monotonic()
            said = (self.directory / "stdout").read_text().splitlines()
            lines = [line for line in said if line.startswith("{")]
            fields = json.loads(lines[-1]) if lines else {"error": KILLED, "says": ""}
            fields["trials"] = tuple(map(tuple, fields.get("trials", ())))
            for name in ("warnings", "worlds"):
                fields[name] = tuple(fields.get(name, ()))
            error = (self.directory / "stderr").read_text()
            fields["says"] += "\n" + error[-3000:]
            self._found = Ending(**{**fields, "at": at})
        return self._found

    def close(self) -> None:
        self.driver.kill()
        self.driver.wait()


def main(kind: str, directory: str, given: str) -> None:
    """Launch in this process, which is a driver, and print how it ended."""
    told = json.loads(given)
    value: Any = None
    error: BaseException | None = None
    try:
        hopsgpu.session("faults", conf=told["conf"])
        value = begin(Kind[kind], Path(directory), told["options"])()
    except BaseException as raised:  # noqa: BLE001 - the test looks at it
        error = raised
    print(json.dumps(asdict(ending_of(value, error))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
