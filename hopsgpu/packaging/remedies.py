"""Advice for objects that cannot be sent because they belong to a process, by type.

Types are recognised by the names of package and class, so that no package is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from types import MappingProxyType

_CREATE = "It belongs to this process. Create it inside the function"
_CONNECT = (
    "It is a connection of this process. Connect inside the function, and pass what it is made from"
    " in args or kwargs"
)
_OPEN = "It is open in this process. Pass its path, and open it inside the function"
_START = "It runs in this process. Start it inside the function"
_LOOP = "It runs in this process. Create it inside the function, or pass list(…) of it"
_DISPLAY = "It draws in this process. Create it inside the function: the driver shows its output"
_HANDLER = (
    "Create it inside the function, and add it to a logger there: ranks have no handler of the"
    " driver's loggers"
)
_LOGURU = (
    "Import it inside the function, with `from loguru import logger` as the first line, and add its"
    " sinks there: ranks have no sink of the driver"
)
_STRUCTLOG = (
    "Call structlog.configure() and structlog.get_logger() inside the function: ranks do not have"
    " the driver's configuration"
)
_WANDB = (
    "Call wandb.init() inside the function, in rank 0 alone (hopsgpu.context().rank == 0); the id"
    " of a run can be passed in args or kwargs"
)
_MLFLOW = (
    "Create it inside the function, in rank 0 alone (hopsgpu.context().rank == 0); the id of a run"
    " can be passed in args or kwargs"
)
_TENSORBOARD = "Create it inside the function, with hopsgpu.context().log_dir as its directory"
_MANAGER = (
    "It belongs to a process of the driver's machine. Return the value from the function, or report"
    " numbers with hopsgpu.context().report()"
)

# (advice, packages, classes); the advice is for subclasses too.
_REMEDIES: tuple[tuple[str, str, str], ...] = (
    (_LOGURU, "loguru", "Logger"),
    (
        _STRUCTLOG,
        "structlog",
        "BoundLogger BoundLoggerBase BytesLogger PrintLogger WriteLogger BoundLoggerLazyProxy",
    ),
    (_HANDLER, "logging", "Handler QueueListener"),
    (_DISPLAY, "rich", "Console Progress Live Status"),
    (_DISPLAY, "tqdm", "tqdm"),
    (_WANDB, "wandb", "Run"),
    (_MLFLOW, "mlflow", "ActiveRun MlflowClient TrackingServiceClient"),
    (_TENSORBOARD, "torch tensorboardX", "SummaryWriter FileWriter"),
    (_TENSORBOARD, "tensorflow", "SummaryWriter _ResourceSummaryWriter"),
    (_TENSORBOARD, "tensorboard", "EventFileWriter"),
    (_CONNECT, "sqlite3", "Connection Cursor"),
    (_CONNECT, "psycopg2", "connection cursor AbstractConnectionPool"),
    (
        _CONNECT,
        "psycopg psycopg_pool pymysql MySQLdb oracledb pyodbc asyncpg asyncmy aiomysql snowflake"
        " trino pyhive clickhouse_connect",
        "Connection AsyncConnection Cursor ConnectionPool AsyncConnectionPool SnowflakeConnection"
        " HttpClient Pool",
    ),
    (_CONNECT, "mysql", "MySQLConnectionAbstract MySQLCursorAbstract"),
    (_CONNECT, "duckdb _duckdb", "DuckDBPyConnection DuckDBPyRelation"),
    (
        _CONNECT,
        "sqlalchemy",
        "Engine Connection Session scoped_session sessionmaker AsyncEngine AsyncConnection"
        " AsyncSession async_sessionmaker Pool",
    ),
    (_CONNECT, "redis", "Redis RedisCluster ConnectionPool"),
    (
        _CONNECT,
        "pymongo motor",
        "MongoClient AsyncMongoClient Database AsyncDatabase Collection AsyncCollection",
    ),
    (_CONNECT, "cassandra", "Cluster Session"),
    (_CONNECT, "kafka confluent_kafka cimpl", "KafkaProducer KafkaConsumer Producer Consumer"),
    (_CONNECT, "elasticsearch opensearchpy", "Elasticsearch OpenSearch"),
    (
        "Create it inside the function, with boto3 there; ranks find credentials as boto3 does",
        "botocore boto3 aiobotocore aioboto3",
        "BaseClient AioBaseClient ServiceResource CollectionManager Session AioSession",
    ),
    (_CONNECT, "httpx", "BaseClient"),
    (_CONNECT, "aiohttp", "ClientSession"),
    (_CONNECT, "grpc", "Channel Server"),
    (_CONNECT, "paramiko", "SSHClient SFTPClient Transport"),
    (_CONNECT, "socket ssl", "socket SSLContext SSLObject"),
    (_CREATE, "_ssl", "_SSLContext"),
    (_OPEN, "h5py", "HLObject"),
    (_OPEN, "netCDF4", "Dataset"),
    (_OPEN, "_io tempfile zipfile tarfile", "_IOBase _TemporaryFileWrapper ZipFile TarFile"),
    (_CREATE, "mmap", "mmap"),
    (
        _CREATE,
        "_thread threading asyncio",
        "lock RLock _local Condition Event Semaphore Barrier Lock",
    ),
    (_CREATE, "queue _queue asyncio", "Queue SimpleQueue"),
    (
        "It is shared only with processes that this process starts itself. Create it inside the"
        " function",
        "multiprocessing",
        "SemLock Queue SimpleQueue JoinableQueue Connection _ConnectionBase Synchronized"
        " SynchronizedBase",
    ),
    (_MANAGER, "multiprocessing", "BaseProxy BaseManager"),
    (_START, "threading", "Thread"),
    (_START, "multiprocessing", "BaseProcess Pool"),
    (_START, "concurrent", "Executor"),
    ("It is the result of this process alone. Pass its result()", "concurrent asyncio", "Future"),
    (_START, "asyncio uvloop", "AbstractEventLoop BaseEventLoop Loop Runner"),
    ("It is a child of this process. Start it inside the function", "subprocess", "Popen"),
    (_LOOP, "builtins", "generator async_generator"),
    ("It runs in this process. Call it inside the function", "builtins", "coroutine"),
    (
        "It runs in this process. Create it inside the function: pass the DataLoader, not its"
        " iterator",
        "torch",
        "_BaseDataLoaderIter",
    ),
    (
        "It is registered in this process only. Define the operator in a module beside the script,"
        " which ranks import, or inside the function",
        "torch",
        "CustomOpDef",
    ),
    ("It belongs to this process, and ranks cannot launch gangs", "hopsgpu", "Gang"),
    ("It is a run of this process. Pass what you need of its result", "hopsgpu", "Run"),
)


def _by_class() -> Iterator[tuple[tuple[str, str], str]]:
    for advice, packages, classes in _REMEDIES:
        yield from ((key, advice) for key in product(packages.split(), classes.split()))


_ADVICE: Mapping[tuple[str, str], str] = MappingProxyType(dict(_by_class()))
# Types that can be pickled, but not used in another process.
_USELESS_ELSEWHERE = frozenset({("wandb", "Run"), ("multiprocessing", "BaseProxy")})


def remedy_for(kind: type) -> str | None:
    """Return the advice for objects of a type; None for an unknown type."""
    return next((_ADVICE[key] for key in _keys(kind) if key in _ADVICE), None)


def is_useless_elsewhere(kind: type) -> bool:
    return any(key in _USELESS_ELSEWHERE for key in _keys(kind))


def _keys(kind: type) -> Iterator[tuple[str, str]]:
    for cls in kind.__mro__:
        yield package_of(cls), cls.__name__


def package_of(kind: type) -> str:
    module = kind.__module__
    return module.partition(".")[0] if isinstance(module, str) else ""
