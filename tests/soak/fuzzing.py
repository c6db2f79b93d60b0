"""Random and mutated inputs with a fixed seed, and what an input may cost."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SEED = 20261130
COUNT = 4000
# An input may take this much of the process's CPU time, whatever else the machine does.
MAX_SECONDS = 1.0
MAX_GROWTH_BYTES = 200 * 2**20
# The kernel's name for "forget the peak" in /proc/self/clear_refs, see proc(5).
_FORGET_PEAK = "5"
_TOKENS = (
    *(b"\0", b"\xff", b"\xed\xa0\x80", b"\r\n", b"\r\n\r\n", b"%00", b"../", b"//", b"\\"),
    *(b"-1", b"9" * 15, b"9" * 400, b"1e999", b"NaN", b"1.5", b"[" * 2000, b'{"a":' * 500),
    *(b'"', b"null", b"true", b"\xe2\x80\xae", b"A" * 20_000, b"-", b"x", b"\x1b[2J"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**63, 10**30, 1e308, -0.5, float("nan"), float("inf")),
    *("", "x", "\0", "\ud800", "A" * 10_000, "../../etc/passwd", "\u202e", "2026-01-01T00:00:00Z"),
    *([], {}, [[]] * 100, {"a": {"b": []}}, [1, "a", None]),
)


class Fuzzer:
    """Makes inputs from valid ones; the same ones in each process."""

    def __init__(self) -> None:
        self.random = random.Random(SEED)  # noqa: S311

    def mutate(self, content: bytes) -> bytes:
        """Return other bytes: mostly with a few changes, at times with nothing of the old ones."""
        if self.random.random() < 0.05:
            return self.random.randbytes(self.random.randrange(300))
        mutable = bytearray(content)
        for _ in range(self.random.choice((1, 1, 1, 2, 3, 8))):
            at = self.random.randrange(len(mutable) + 1)
            end = min(len(mutable), at + self.random.choice((0, 1, 1, 4, 30)))
            match self.random.randrange(4):
                case 0:
                    mutable[at:end] = self.random.choice(_TOKENS)
                case 1:
                    mutable[at:end] = self.random.randbytes(self.random.randrange(5))
                case 2:
                    mutable[at:at] = mutable[at:end] * self.random.choice((1, 3, 50))
                case _:
                    del mutable[at:]
        return bytes(mutable)

    def mutate_json(self, content: bytes) -> bytes:
        """Return the JSON with other values, without fields or with more of them."""
        if self.random.random() < 0.3:
            return self.mutate(content)
        value = json.loads(content)
        for _ in range(self.random.choice((1, 1, 2, 5))):
            self._change(value)
        return json.dumps(value).encode()

    def _value(self) -> Any:
        # A copy: later changes may be within the value.
        return copy.deepcopy(self.random.choice(_VALUES))

    def _change(self, value: Any) -> None:
        """Change one place in nested objects and lists."""
        while isinstance(value, (dict, list)) and value:
            keys = [*value] if isinstance(value, dict) else range(len(value))
            key = self.random.choice(keys)
            if isinstance(value[key], (dict, list)) and value[key] and self.random.random() < 0.8:
                value = value[key]
                continue
            match self.random.randrange(4):
                case 0:
                    del value[key]
                case 1 if isinstance(value, dict):
                    value[str(self.random.choice(_VALUES))] = self._value()
                case 2 if isinstance(value, list):
                    value.extend(copy.deepcopy(value * self.random.choice((1, 20))))
                case _:
                    value[key] = self._value()
            return


@contextmanager
def bounded_growth(pid: int | str = "self") -> Iterator[None]:
    """Assert that a process's memory has grown by less than the bound, also in between."""
    process = Path("/proc", str(pid))
    (process / "clear_refs").write_text(_FORGET_PEAK)
    before = _memory(process, "VmRSS")
    yield
    growth = _memory(process, "VmHWM") - before
    assert growth < MAX_GROWTH_BYTES, f"{growth / 2**20:.0f} MiB more memory"


def _memory(process: Path, field: str) -> int:
    lines = (process / "status").read_text().splitlines()
    (kibibytes,) = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(kibibytes) * 1024


def each_in_time(inputs: Iterator[Any], take: Callable[[Any], object]) -> None:
    """Give each input to a function; assert the bounds of time and memory."""
    with bounded_growth():
        for one in inputs:
            before = time.process_time()
            take(one)
            seconds = time.process_time() - before
            assert seconds < MAX_SECONDS, f"{seconds:.1f} s of CPU time for {one!r:.300}"
