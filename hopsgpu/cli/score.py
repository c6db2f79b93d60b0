"""`hopsgpu score`: a table scored by an application of its own."""

from __future__ import annotations

import hashlib
import keyword
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hopsgpu.cli.submit import Submission, submission_options

if TYPE_CHECKING:
    from collections.abc import Mapping

# The driver script. It imports the user's module by name, so that the module and its imports are
# shipped.
_SCRIPT = '''\
"""Scores a table; written by `hopsgpu score`."""

import os
import sys

# In YARN the modules are shipped, and another user may own that directory of the node.
if os.path.dirname(os.path.abspath(__file__)) == {scripts!r}:
    sys.path.insert(0, {directory!r})

import {module}  # noqa: E402

import hopsgpu  # noqa: E402

if __name__ == "__main__":
    hopsgpu.session({name!r})
    result = hopsgpu.score({module}.{function}, **{options!r})
    print(f"{{result.rows:,}} rows in {{result.url}}")
    for part in result.failed_parts:
        print(f"left out: {{part.place}}: {{part.error.strip().splitlines()[-1]}}")
'''


@click.command()
@submission_options
@click.option("--data", required=True, metavar="URL", help="Parquet on the lake: URL or path.")
@click.option(
    "--output",
    metavar="URL",
    help="Directory for the output, which must not exist.  [default: `output` in the run's"
    " directory]",
)
@click.option(
    "--model", metavar="NAME[@VERSION|TAG]", help="Model that PREDICT gets: digits@production."
)
@click.option("--columns", metavar="A,B", help="Columns that PREDICT gets.  [default: all columns]")
@click.option("--keep", metavar="A,B", help="Columns of the data that the output has.")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="NAME=N,N",
    help="Shape of a row of a column of lists: image=28,28 (repeatable).",
)
@click.option(
    "--batch-size", type=click.IntRange(1), default=1024, show_default=True, help="Rows of a batch."
)
@click.option(
    "--max-concurrent",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="The most executors at a time.",
)
@click.option(
    "--gpus-per-worker",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="GPUs of each process; 0 for CPU executors.",
)
@click.option(
    "--cores-per-worker",
    type=click.IntRange(1),
    metavar="N",
    help="Cores of each process.  [default: the nodes' share of cores per GPU, less one]",
)
@click.option("--memory-per-worker", metavar="SIZE", help="Memory of each process.  [default: 4g]")
@click.option("--gpu-type", metavar="TYPE", help="Words of the GPUs' product name, such as A100.")
@click.option(
    "--acquire-timeout",
    metavar="TIME",
    help="How long to wait for the first executor.  [default: 10m]",
)
@click.option("--score-timeout", metavar="TIME", help="How long the score may take in all.")
@click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    help="End when a part has failed three times, or leave it out.  [default: raise]",
)
@click.option("--resume", metavar="ID", help="Continue a score that ended early.")
@click.argument("predict", metavar="FILE.py:PREDICT")
def score(
    predict: str,
    columns: str | None,
    keep: str | None,
    shapes: tuple[str, ...],
    **others: Any,
) -> None:
    """Score a table on YARN's GPUs, as hopsgpu.score() does.

    FILE.py:PREDICT names a function of a batch, or a class, in a Python file of this machine; the
    modules that it imports are shipped with it. The other options are those of `hopsgpu submit`.
    """
    from hopsgpu.core.cache_directory import cache_directory

    own_options = {name: others.pop(name) for name in _OWN}
    options = {name: value for name, value in own_options.items() if value is not None}
    for name, listed in (("columns", columns), ("keep", keep)):
        if listed:
            options[name] = [column for column in listed.split(",") if column]
    if shapes:
        options["shapes"] = dict(map(_shape, shapes))
    submission = Submission(**others)
    script = write_script(cache_directory(os.environ) / "score", predict, options, submission.name)
    replace(submission, name=submission.name or predict.rpartition(":")[2]).run(str(script))


_OWN = (
    "data",
    "output",
    "model",
    "batch_size",
    "max_concurrent",
    "gpus_per_worker",
    "cores_per_worker",
    "memory_per_worker",
    "gpu_type",
    "acquire_timeout",
    "score_timeout",
    "on_error",
    "resume",
)


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    from hopsgpu.errors import ConfigError

    name, _, sizes = text.rpartition("=")
    try:
        shape = tuple(int(size) for size in sizes.split(","))
    except ValueError:
        shape = ()
    if not name or not shape:
        raise ConfigError(
            f"--shape {text}: must be a column and the sizes of a row, as image=28,28"
        )
    return name, shape


def write_script(
    directory: Path, predict: str, options: Mapping[str, Any], name: str | None
) -> Path:
    """Write the script that scores, and return its path.

    This process's `sys.path` gets the directory of the user's file, whose modules are shipped.

    Args:
        directory: directory for the script.
        predict: the file and the name in it, as "job.py:predict".
        options: the options of `hopsgpu.score`.
        name: name of the application; None for that of the function.

    Raises:
        ConfigError: `predict` names no Python file, or no name in it.
    """
    from hopsgpu.errors import ConfigError

    path, _, function = predict.rpartition(":")
    file = Path(path)
    if not file.is_file() or file.suffix != ".py" or not _is_name(file.stem):
        raise ConfigError(
            f"{predict}: must be a Python file of this machine, whose name can be imported, and a"
            " function or class in it, as job.py:predict"
        )
    if not _is_name(function):
        raise ConfigError(f"{predict}: {function!r} is not the name of a function or class")
    home = str(file.resolve().parent)
    text = _SCRIPT.format(
        scripts=str(directory.absolute()),
        directory=home,
        module=file.stem,
        function=function,
        name=name or function,
        options=dict(options),
    )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    script = directory / f"score_{digest}.py"
    script.write_text(text, encoding="utf-8")
    sys.path.insert(0, home)
    return script


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)
