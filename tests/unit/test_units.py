from __future__ import annotations

from datetime import timedelta

import pytest

from hopsgpu.errors import ConfigError
from hopsgpu.units import count_of, parse_duration, parse_duration_or_off, parse_memory


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("90s", 90.0),
        ("10m", 600.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        ("2d", 172800.0),
        (7, 7.0),
        (0.5, 0.5),
        (timedelta(minutes=1), 60.0),
        (None, None),
    ],
)
def test_durations(given: object, seconds: float | None) -> None:
    assert parse_duration(given, "acquire_timeout") == seconds


@pytest.mark.parametrize(
    "given", ["soon", "10", "10 parsecs", "-1s", 0, -3, True, float("nan"), float("inf"), [], b"1s"]
)
def test_wrong_durations_are_named(given: object) -> None:
    with pytest.raises(ConfigError) as error:
        parse_duration(given, "acquire_timeout")
    assert f"acquire_timeout={given!r}" in str(error.value)
    assert "'10m'" in str(error.value)


@pytest.mark.parametrize(("given", "seconds"), [("off", None), (None, None), ("10m", 600.0)])
def test_a_duration_may_be_off(given: object, seconds: float | None) -> None:
    assert parse_duration_or_off(given, "gpu_idle_timeout") == seconds


@pytest.mark.parametrize("given", ["Off", "never", 0, False, "0s"])
def test_what_is_neither_a_duration_nor_off(given: object) -> None:
    with pytest.raises(ConfigError) as error:
        parse_duration_or_off(given, "gpu_idle_timeout")
    assert f"gpu_idle_timeout={given!r}" in str(error.value)
    assert str(error.value).endswith("or 'off' for never")


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("4g", 4 << 30),
        ("512m", 512 << 20),
        ("1.5G", 3 << 29),
        ("2GiB", 2 << 30),
        (1 << 20, 1 << 20),
    ],
)
def test_memory(given: object, size: int) -> None:
    assert parse_memory(given, "memory_per_worker") == size


@pytest.mark.parametrize("given", ["4", "lots", "4 gallons", "1k", 0, 1000, -1, True, 4.5, None])
def test_wrong_memory_is_named(given: object) -> None:
    with pytest.raises(ConfigError, match="memory_per_worker=.*'4g'"):
        parse_memory(given, "memory_per_worker")


def test_one_thing_is_no_several() -> None:
    assert [count_of(n, "GPU") for n in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]
    assert [count_of(n, "process", "processes") for n in (1, 3)] == ["1 process", "3 processes"]
