"""The advice for objects that belong to a process, by type."""

from __future__ import annotations

import concurrent.futures
import logging
import logging.handlers
import multiprocessing
import queue
import re
import socket
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.errors import ConfigError
from hopsgpu.packaging.pickling import pickle_call
from hopsgpu.packaging.remedies import remedy_for
from hopsgpu.packaging.unpicklable import advice_on, describe_value


def refused(value: object) -> str:
    with pytest.raises(ConfigError) as error:
        pickle_call(lambda: value, (), {})
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("loguru._logger.Logger", "`from loguru import logger` as the first line"),
        ("structlog._base.BoundLoggerBase", "structlog.get_logger() inside the function"),
        ("structlog._output.PrintLogger", "structlog.get_logger() inside the function"),
        ("wandb.sdk.wandb_run.Run", "wandb.init() inside the function"),
        ("mlflow.tracking.client.MlflowClient", "in rank 0 alone"),
        ("mlflow.tracking.fluent.ActiveRun", "in rank 0 alone"),
        ("torch.utils.tensorboard.writer.SummaryWriter", "hopsgpu.context().log_dir"),
        ("tensorboardX.writer.SummaryWriter", "hopsgpu.context().log_dir"),
        ("psycopg2.extensions.connection", "Connect inside the function"),
        ("psycopg.Connection", "Connect inside the function"),
        ("pymysql.connections.Connection", "Connect inside the function"),
        ("redis.client.Redis", "Connect inside the function"),
        ("redis.asyncio.client.Redis", "Connect inside the function"),
        ("pymongo.synchronous.mongo_client.MongoClient", "Connect inside the function"),
        ("pymongo.synchronous.collection.Collection", "Connect inside the function"),
        ("httpx._client.BaseClient", "Connect inside the function"),
        ("grpc._channel.Channel", "Connect inside the function"),
        ("h5py._hl.base.HLObject", "open it inside the function"),
        ("torch.utils.data.dataloader._BaseDataLoaderIter", "pass the DataLoader"),
        ("redis_lookalike.client.Redis", ""),
        ("builtins.dict", ""),
    ],
)
def test_advice_by_name(name: str, words: str) -> None:
    module, _, kind = name.rpartition(".")
    base = type(kind, (), {"__module__": module})
    derived = type("Own", (base,), {"__module__": "__main__"})
    for one in (base, derived):
        advice = remedy_for(one)
        assert (words in advice) if words and advice else advice is None


def _engine() -> Any:
    import sqlalchemy

    return sqlalchemy.create_engine("sqlite://")


def _session() -> Any:
    import sqlalchemy.orm

    return sqlalchemy.orm.Session(_engine())


def _s3(kind: str) -> Any:
    import boto3

    return getattr(boto3, kind)("s3", region_name="eu-west-1")


def _console() -> Any:
    import rich.console

    return rich.console.Console()


def _progress() -> Any:
    import rich.progress

    return rich.progress.Progress()


CONNECT, PROCESS = "Connect inside the function", "Start it inside the function"
REAL: dict[str, tuple[Callable[[], Any], str]] = {
    "handler": (logging.StreamHandler, "logger there"),
    "queue handler": (lambda: logging.handlers.QueueHandler(queue.Queue()), "add it to a logger"),
    "console": (_console, "its output"),
    "progress": (_progress, "its output"),
    "engine": (_engine, CONNECT),
    "session": (_session, CONNECT),
    "connection": (lambda: sqlite3.connect(":memory:"), CONNECT),
    "cursor": (lambda: sqlite3.connect(":memory:").cursor(), CONNECT),
    "client": (lambda: _s3("client"), "with boto3 there"),
    "resource": (lambda: _s3("resource"), "with boto3 there"),
    "generator": (lambda: (n for n in range(3)), "list("),
    "thread": (threading.Thread, PROCESS),
    "lock": (threading.RLock, "Create it inside"),
    "socket": (socket.socket, CONNECT),
    "event": (threading.Event, "Create it inside"),
    "queue": (queue.Queue, "Create it inside"),
    "queue of processes": (multiprocessing.Queue, "shared only with processes"),
    "pool": (concurrent.futures.ThreadPoolExecutor, PROCESS),
    "future": (concurrent.futures.Future, "Pass its result()"),
}


@pytest.mark.parametrize(("make", "words"), REAL.values(), ids=REAL)
def test_advice_for_real_objects(make: Callable[[], Any], words: str) -> None:
    value = make()
    said = refused({"a": [value]})
    # The object is named, not what it is made of.
    assert re.search(rf"'value'\['a'\]\[0\] is an? ([\w.]+\.)?{type(value).__qualname__},", said)
    assert words in said


def test_a_handler_of_a_file_and_a_bar_with_a_file(tmp_path: Path) -> None:
    from tqdm import tqdm

    handler = logging.FileHandler(tmp_path / "log")
    assert "logger there" in refused(handler)
    handler.close()
    with (tmp_path / "bar").open("w") as file:
        assert "its output" in refused(tqdm(total=1, file=file))


def test_values_that_are_useless_after_unpickling_are_refused() -> None:
    run = type("Run", (), {"__module__": "wandb.sdk.wandb_run"})()
    message = refused(run)
    assert "wandb.sdk.wandb_run.Run" in message and "wandb.init()" in message
    with multiprocessing.Manager() as manager:
        assert "Return the value" in refused(manager.dict())


def test_what_travels() -> None:
    import boto3
    import requests

    values = (logging.getLogger("a.b"), requests.Session(), boto3.session.Session())
    assert pickle_call(lambda: values, (), {})


def test_a_decorator_of_gin_has_its_own_advice() -> None:
    scope: dict[str, Any] = {"__name__": "gin.config", "lock": threading.Lock()}
    exec(
        "import functools\n"
        "def configurable(f):\n"
        "    @functools.wraps(f)\n"
        "    def wrapped(): return lock, f()\n"
        "    return wrapped",
        scope,
    )
    message = refused(scope["configurable"](lambda: 1))
    assert "gin.config" in message and "gin.parse_config()" in message


class Endless:
    """A wrapper whose `__getattr__` never finds its own attribute."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_an_object_whose_attributes_raise_is_described() -> None:
    value = Endless()
    assert describe_value(value).endswith("Endless")
    assert advice_on(value).startswith("Create it inside")
