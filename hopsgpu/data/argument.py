"""The `data=` argument of `launch`: its forms and the checks on them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hopsgpu.core.boundary import public_class
from hopsgpu.core.spec import check_name
from hopsgpu.data.shard_plan import check_dealing
from hopsgpu.errors import ConfigError
from hopsgpu.storage.lake import LakePath

# The name of data that the user passed without a name.
DEFAULT_NAME = "data"
_MAX_REPR = 99


@public_class
@dataclass(frozen=True)
class Data:
    """Data for `launch(data=...)`, and how its rows are dealt to the ranks.

    Attributes:
        source: a Spark DataFrame, or Parquet on the lake: the URL of a directory or a file, or its
            absolute path on the default file system.
        remainder: what happens to the rows beyond a multiple of the number of ranks: "drop" leaves
            them out, "pad" repeats other rows, and "keep" gives some ranks one row more.
        seed: determines the order of the row groups; each rank gets a consecutive part of them.

    Raises:
        ConfigError: the remainder is another string, or the seed is not an integer ≥ 0.
    """

    __module__ = "hopsgpu"

    source: Any
    remainder: str = "drop"
    seed: int = 0

    def __post_init__(self) -> None:
        check_dealing(self.remainder, self.seed)


@dataclass(frozen=True)
class Datasets:
    """The data that a launch reads, by name.

    Attributes:
        is_single: whether the data was passed without a name; its name is then "data".
    """

    named: Mapping[str, Data]
    is_single: bool

    @property
    def frames(self) -> Iterator[tuple[str, Any]]:
        """Return the DataFrames that the launch must write to the lake, with their names."""
        return ((n, data.source) for n, data in self.named.items() if not _is_path(data.source))

    @property
    def paths(self) -> Iterator[tuple[str, str]]:
        """Return the paths of data that is already on the lake, with their names."""
        return ((n, os.fspath(d.source)) for n, d in self.named.items() if _is_path(d.source))

    def places(self, run_url: str, default_fs: str | None) -> dict[str, str]:
        """Return the URL of each dataset: in place, or below the run's directory.

        Raises:
            ConfigError: a path cannot be read in place, as for `url_of`.
        """
        places = {name: url_of(path, default_fs) for name, path in self.paths}
        places |= {name: f"{run_url}/{DEFAULT_NAME}/{name}" for name, _ in self.frames}
        return {name: places[name] for name in self.named}

    def label(self, name: str) -> str:
        """Return the term for a dataset in messages: `data` or `data.NAME`."""
        return DEFAULT_NAME if self.is_single else f"{DEFAULT_NAME}.{name}"


def datasets_of(argument: object, is_frame: Callable[[object], bool]) -> Datasets | None:
    """Return the data that `data=` names: a DataFrame, a path, a Data, or a mapping to these.

    Raises:
        ConfigError: `data=` is anything else, except None.
    """
    if argument is None:
        return None
    if not isinstance(argument, Mapping):
        return Datasets({DEFAULT_NAME: _data(argument, DEFAULT_NAME, is_frame)}, is_single=True)
    if not argument:
        raise ConfigError(
            "data={}: must name at least one DataFrame or path; pass None for no data"
        )
    named = {
        check_name(name, "a name in data"): _data(value, f"{DEFAULT_NAME}[{name!r}]", is_frame)
        for name, value in argument.items()
    }
    return Datasets(named, is_single=False)


def _data(value: object, label: str, is_frame: Callable[[object], bool]) -> Data:
    data = value if isinstance(value, Data) else Data(value)
    if is_frame(data.source) or (_is_path(data.source) and os.fspath(data.source)):
        return data
    try:
        text = repr(data.source)[:_MAX_REPR]
    except Exception:  # noqa: BLE001 - a user's __repr__ may fail in any way
        text = f"<{type(data.source).__name__}>"
    raise ConfigError(
        f"{label}={text}: must be a Spark DataFrame, the URL or absolute path of Parquet on the"
        " lake, a hopsgpu.Data of one, or a dict of names to these (convert a pandas DataFrame by"
        " spark.createDataFrame)"
    )


def _is_path(source: object) -> bool:
    return isinstance(source, (str, os.PathLike)) and isinstance(os.fspath(source), str)


def url_of(path: str, default_fs: str | None) -> str:
    """Return the URL of data that is read in place.

    Args:
        path: a URL, or an absolute path on the default file system. If that is HDFS, `hdfs:///x`
            and `hdfs:/x` are such paths too.
        default_fs: `fs.defaultFS`.

    Raises:
        ConfigError: the path is neither; its file system cannot be read in place; or the URL names
            no file system, and the default file system is of another kind.
    """
    default_fs = default_fs or "file:///"
    scheme, _, authority = default_fs.partition("://")
    default = f"{scheme}://{authority.partition('/')[0]}"
    url = re.sub(r"^(\w+):/(?!/)", r"\1:///", path)  # Spark writes such URLs
    if path.startswith("/"):
        url = default + path
    elif url.startswith(f"{scheme}:///"):
        url = default + url.removeprefix(f"{scheme}://")
    elif no_host := re.match(r"(hdfs|viewfs|webhdfs|swebhdfs):///", url):
        raise ConfigError(
            f"data={path!r}: the URL names no file system, and the default file system is"
            f" {default_fs}: write {no_host[1]}://<name>/{url[no_host.end() :]}"
        )
    try:
        return LakePath(url).url
    except ConfigError:
        raise ConfigError(
            f"data={path!r}: Parquet is read in place only from an absolute path, or from an"
            " hdfs://, viewfs://, webhdfs://, swebhdfs://, s3://, s3a://, gs://, abfss:// or"
            " file:/// URL without '#', '?' and ';'; otherwise read it with Spark and pass the"
            " DataFrame"
        ) from None
