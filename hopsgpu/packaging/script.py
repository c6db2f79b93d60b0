"""A script that runs in the ranks: its command, its files, and the directories that are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import PurePosixPath
from typing import Any

from hopsgpu.errors import ConfigError
from hopsgpu.storage.names import path_below

# The kinds of a script.
FILE, MODULE, PROGRAM = "file", "module", "program"


@dataclass(frozen=True)
class ScriptCall:
    """The script that every rank runs, in its working directory.

    Attributes:
        kind: FILE for a Python file, as `python FILE`; MODULE, as `python -m MODULE`; PROGRAM for a
            program that is not Python.
        target: path of the file, relative to the working directory; name of the module; or the
            program, which is looked up in the working directory and then on the PATH.
        args: the arguments that follow it.
    """

    kind: str
    target: str
    args: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """The words of its command line after `python`, or of the program's."""
        return (*(("-m",) if self.kind == MODULE else ()), self.target, *self.args)


@dataclass(frozen=True)
class KeptDirectories:
    """Directories whose files outlive the rank; paths relative to its working directory.

    Attributes:
        model: its files are published as a version of the model.
        checkpoints: is mirrored to the lake, and put back before the script starts again.
        tensorboard: is uploaded as `context().log_dir` is.
        outputs: are mirrored to the lake.

    Raises:
        ConfigError: a path is not below the working directory, or one is inside another.
    """

    model: str | None = None
    checkpoints: str | None = None
    tensorboard: str | None = None
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        by_option: list[tuple[str, str]] = []
        for option, path in self._options():
            by_option.append((option, _directory(option, path)))
        for option, path in by_option:
            for other, above in by_option:
                if (option, path) != (other, above) and PurePosixPath(path).is_relative_to(above):
                    raise ConfigError(
                        f"{option}={path!r} is inside {other}={above!r}: give directories of which"
                        " none contains another"
                    )
        paths = iter([path for _, path in by_option])
        for name in ("model", "checkpoints", "tensorboard"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, next(paths))
        object.__setattr__(self, "outputs", tuple(paths))

    def _options(self) -> list[tuple[str, object]]:
        named: list[tuple[str, object]] = [
            ("model_dir", self.model),
            ("checkpoint_dir", self.checkpoints),
            ("tensorboard_dir", self.tensorboard),
        ]
        outputs = [("output_dirs", path) for path in self.outputs]
        return [*(pair for pair in named if pair[1] is not None), *outputs]

    @property
    def mirrored_paths(self) -> tuple[str, ...]:
        """The directories that are mirrored to the run's directory on the lake."""
        return (*(() if self.checkpoints is None else (self.checkpoints,)), *self.outputs)

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(path for _, path in self._options() if isinstance(path, str))

    @property
    def not_sent(self) -> frozenset[str]:
        """The directories that ranks fill, and whose local files are therefore not sent to them."""
        return frozenset(filter(None, (self.model, self.tensorboard, *self.outputs)))

    def as_fields(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> KeptDirectories:
        return cls(**{**values, "outputs": tuple(values["outputs"])})


def _directory(option: str, path: object) -> str:
    try:
        if isinstance(path, str):
            return path_below(PurePosixPath(path).as_posix().removeprefix("./"), option)
        raise ConfigError("")
    except ConfigError as error:
        raise ConfigError(
            f"{option}={path!r}: must be a directory below the script's working directory, as a"
            " relative path without '..'"
        ) from error


@dataclass(frozen=True)
class StoredScript:
    """A script on the lake: an archive with its working directory, and modules from elsewhere.

    Attributes:
        url: URL of the archive, which has the directories `work` and `modules/0`, `modules/1`, …
        digest: SHA-256 of the archive.
        roots: number of directories of modules.
        paths: directories in the working directory that ranks import from, besides the script's.
    """

    url: str
    digest: str
    roots: int
    paths: tuple[str, ...] = ()

    def as_fields(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> StoredScript:
        by_name = {field.name: values[field.name] for field in fields(cls)}
        return cls(**{**by_name, "paths": tuple(values["paths"])})
