"""Bad input to launch, submit and plan: a ConfigError at the call, and nothing started."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import hopsgpu
from hopsgpu.errors import ConfigError
from hopsgpu.launcher.options import LaunchOptions

CALLS = [hopsgpu.launch, hopsgpu.submit, hopsgpu.plan]


def train() -> None: ...


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"workers": 0}, "workers=0.*≥ 1"),
        ({"workers": -2}, "workers=-2.*≥ 1"),
        ({"workers": 1.5}, "workers=1.5.*must be an integer"),
        ({"workers": "2"}, "workers='2'.*must be an integer"),
        ({"gpus_per_worker": 0.7}, "gpus_per_worker=0.7: a fraction must be 1/2, 1/3"),
        (
            {"gpus_per_worker": 0.5},
            "workers=1 with gpus_per_worker=0.5: workers must be a multiple of 2",
        ),
        ({"gpus_per_worker": -1}, "gpus_per_worker=-1.*≥ 0"),
        ({"cores_per_worker": 0}, "cores_per_worker=0.*≥ 1"),
        ({"memory_per_worker": "much"}, "memory_per_worker='much'.*'4g'"),
        ({"acquire_timeout": "soon"}, "acquire_timeout='soon'.*'10m'"),
        ({"acquire_timeout": timedelta(0)}, "acquire_timeout=.*above zero"),
        ({"env_vars": {"RANK": "1"}}, "env_vars sets RANK"),
        ({"env_vars": "A=1"}, "env_vars='A=1'.*mapping"),
        ({"model": "../x"}, "model='../x'"),
        ({"name": "a b"}, "name='a b'"),
        ({"args": "abc"}, "args='abc'.*tuple or list"),
        ({"args": 3}, "args=3.*tuple or list"),
        ({"kwargs": [1]}, r"kwargs=\[1\].*mapping"),
        ({"kwargs": {1: 2}}, "kwargs=.*mapping"),
        ({"args": (1,)}, r"train\(\).*does not accept these args and kwargs"),
        ({"kwargs": {"x": 1}}, "does not accept these args and kwargs.*'x'"),
        ({"gpus_per_worker": 65}, "gpus_per_worker=65: must be at most 64"),
        ({"env_vars": {"A": "x" * 200_000}}, "env_vars: A is longer than"),
        ({"env_vars": {f"A{n}": "x" * 100_000 for n in range(6)}}, "env_vars are longer than"),
        ({"acquire_timeout": 10**400}, "acquire_timeout=1000.*above zero"),
        ({"progress": lambda: None}, "progress=.*"),
        ({"progress": "loud"}, "progress='loud'.*'rich', 'lines', 'off'"),
        (
            {"parameter_servers": 1},
            "parameter_servers=1 with workers=1.*workers must be at least 2",
        ),
        ({"parameter_servers": -1}, "parameter_servers=-1: must be an integer ≥ 0"),
        ({"placement": "near"}, "placement='near'.*'pack'.*'spread'"),
        ({"gpu_type": ""}, "gpu_type='': must be part of a GPU's product name"),
        ({"gpu_type": 100}, "gpu_type=100: must be part of a GPU's product name"),
        ({"gpu_type": "A100", "gpus_per_worker": 0}, "gpu_type='A100' with gpus_per_worker=0"),
        ({"visible": "node"}, "visible='node': must be 'container'.*'rank'.*None"),
        ({"data": ""}, "data='': must be a Spark DataFrame, the URL or absolute path of Parquet"),
        ({"data": 3}, "data=3: must be a Spark DataFrame"),
        ({"data": {}}, "data={}: must name at least one"),
        ({"data": {"a b": "/x"}}, "a name in data='a b'"),
        ({"data": {"train": None}}, r"data\['train'\]=None: must be a Spark DataFrame"),
        ({"run_timeout": "soon"}, "run_timeout='soon'.*above zero"),
        ({"run_timeout": 0}, "run_timeout=0.*above zero"),
        ({"retries": -1}, "retries=-1: must be an integer ≥ 0"),
        ({"retries": False}, "retries=False: must be an integer ≥ 0"),
        ({"resume": "../x"}, "resume='../x'"),
        ({"resume": ""}, "resume=''"),
        ({"model": "_x"}, "model='_x'"),
        ({"model": 5}, "model=5"),
        ({"python_env": "env.tar.gz"}, "python_env='env.tar.gz': there is no such file.*a list of"),
    ],
)
def test_bad_arguments(call: Callable[..., Any], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call(train, **arguments)


@pytest.mark.parametrize("call", CALLS)
def test_what_cannot_be_called(call: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="train_fn=5"):
        call(5)


async def waits() -> int:
    return 1


def yields() -> Iterator[int]:
    yield 1


async def yields_later() -> AsyncIterator[int]:
    yield 1


class Waiting:
    async def __call__(self) -> int:
        return 1

    async def train(self) -> int:
        return 1


def awaited(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run() -> Any:
        return asyncio.run(function())

    return run


def test_functions_that_a_call_does_not_run() -> None:
    asynchronous = [waits, functools.partial(waits), Waiting(), Waiting().train]
    for function in asynchronous:
        with pytest.raises(ConfigError, match="asyncio.run"):
            hopsgpu.launch(function)
    for function in (yields, yields_later, functools.partial(yields)):
        with pytest.raises(ConfigError, match="generator .*yield"):
            hopsgpu.launch(function)
    for function in (awaited(waits), Waiting, train, lambda: None):
        with pytest.raises(ConfigError, match=r"hopsgpu\.session\(name\)"):
            hopsgpu.launch(function)


def anything(*args: object) -> None: ...


def test_arguments_that_cannot_be_pickled_or_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"args\[0\] .*_thread.lock"):
        hopsgpu.launch(anything, args=(threading.Lock(),))
    monkeypatch.setattr("hopsgpu.launcher.function_shipping._MAX_CALL_BYTES", 2**20)
    with pytest.raises(ConfigError, match="1048576 bytes"):
        hopsgpu.launch(anything, args=(bytes(2**21),))


@pytest.mark.parametrize("call", CALLS)
def test_without_a_session(call: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"hopsgpu\.session\(name\)"):
        call(train)
    with pytest.raises(ConfigError, match="spark='yarn'.*SparkSession"):
        call(train, spark="yarn")


def test_a_rank_launches_no_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPSGPU_CONTEXT", "/somewhere")
    with pytest.raises(ConfigError, match="cannot launch"):
        hopsgpu.launch(train)


def test_the_three_calls_have_the_designs_signature() -> None:
    parameters = [str(p) for p in inspect.signature(hopsgpu.launch).parameters.values()]
    names = [p.partition(":")[0] for p in parameters]
    assert names == [
        *("train_fn", "args", "kwargs", "workers", "gpus_per_worker", "cores_per_worker"),
        *("memory_per_worker", "parameter_servers", "placement", "gpu_type", "visible", "data"),
        *(
            "model",
            "name",
            "acquire_timeout",
            "run_timeout",
            "gpu_idle_timeout",
            "retries",
            "resume",
        ),
        *("python_env", "env_vars", "independent_ranks"),
        *("working_dir", "model_dir", "checkpoint_dir", "tensorboard_dir", "output_dirs"),
        *("image", "progress", "spark"),
    ]
    for call in CALLS:
        signature = inspect.signature(call)
        assert [str(p) for p in signature.parameters.values()] == parameters
        kinds = {p.kind for name, p in signature.parameters.items() if name != "train_fn"}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY}
        with pytest.raises(TypeError):
            call(train, nonsense=1)
    assert inspect.signature(hopsgpu.launch).return_annotation == "GangResult"
    assert hopsgpu.launch.__doc__ and "workers: the world size" in hopsgpu.launch.__doc__


def test_a_gang_that_is_held_takes_an_environment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="python_env=5"):
        hopsgpu.hold(workers=1, python_env=5)
    (tmp_path / "mine.py").touch()
    with pytest.raises(ConfigError, match="no active SparkSession"):
        hopsgpu.hold(workers=1, python_env=tmp_path)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"workers": (2,)}, r"workers=\(2,\): must be an integer ≥ 1, or the smallest and the la"),
        ({"workers": (1, 2, 3)}, r"workers=\(1, 2, 3\): must be an integer ≥ 1"),
        ({"workers": (None, 2)}, r"workers=\(None, 2\): must be an integer ≥ 1"),
        ({"workers": []}, r"workers=\[\]: must be an integer ≥ 1"),
        ({"workers": (4, 2)}, r"workers=\(4, 2\): the smallest size comes first"),
        ({"workers": ("1", 2)}, r"workers=\('1', 2\): must be an integer"),
        ({"workers": (1, 2), "parameter_servers": 1}, "an elastic gang has no parameter servers"),
        ({"workers": {1, 2}}, "workers={1, 2}: must be an integer"),
    ],
)
def test_sizes_of_elastic_gangs(
    call: Callable[..., Any], arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        call(train, **arguments)


@pytest.mark.parametrize("workers", [(2, 8), [2, 8]])
def test_two_sizes_are_those_of_an_elastic_gang(workers: Any) -> None:
    options = LaunchOptions(train_fn=train, workers=workers)
    spec = options.gang_of(**options.of_run())
    assert spec.is_elastic and (spec.least, spec.workers) == (2, 8)
    assert LaunchOptions(train_fn=train, workers=3).world_sizes == (None, 3)


def test_a_held_gang_has_one_size() -> None:
    with pytest.raises(ConfigError, match=r"hold\(workers=\(1, 2\)\)"):
        hopsgpu.hold(workers=(1, 2))  # type: ignore[arg-type]


def test_idle_gpus_are_bounded_by_a_duration() -> None:
    options = LaunchOptions(train_fn=train, gpu_idle_timeout="30m")
    assert options.gang_of(**options.of_run()).gpu_idle_timeout == 1800.0
    options = LaunchOptions(train_fn=train)
    assert options.gang_of(**options.of_run()).gpu_idle_timeout is None


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gpu_idle_timeout": 0}, "gpu_idle_timeout=0: must be a duration above zero"),
        ({"gpu_idle_timeout": "often"}, "gpu_idle_timeout='often': must be a duration"),
        (
            {"gpu_idle_timeout": "5m", "gpus_per_worker": 0},
            "gpu_idle_timeout='5m' with gpus_per_worker=0: there is no GPU that could idle",
        ),
    ],
)
def test_an_idle_timeout_that_cannot_work(
    call: Callable[..., Any], arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        call(train, **arguments)
