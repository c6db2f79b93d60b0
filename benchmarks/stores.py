"""Uploads and downloads of models, compared with raw HDFS clients, FsShell and a local copy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.store_tables import (
    LARGE,
    SMALL,
    START,
    VERSION,
    Contender,
    Cost,
    Costs,
    judge_large,
    judge_small,
    show,
    show_cuts,
)
from benchmarks.transfers import MODEL
from hopsgpu import devcluster
from hopsgpu.devcluster.layout import DATANODE, NAMENODE
from hopsgpu.devcluster.status import DaemonStatus
from hopsgpu.storage.filesystem import BLOCK
from hopsgpu.storage.hadoop_conf import HadoopConf
from hopsgpu.storage.lake import LakePath

_MB = 1_000_000
_SMALL_BYTES = 100_000
# An even number: who comes first in one round is last in the next.
_ROUNDS_LARGE, _ROUNDS_SMALL = 12, 4
_TICKS = os.sysconf("SC_CLK_TCK")


def measure(large_mb: int = 1000, small_files: int = 2000) -> Mapping[str, object]:
    """Transfer one large file and many small ones, with the contenders in turn.

    Args:
        large_mb: size of the large file.
        small_files: number of files of 100 kB.

    Returns:
        For "large" and "small", "up" and "down": what each transfer of each contender took; and
        what was cut, by contender.
    """
    figures: dict[str, object] = {}
    with _lake() as lake, tempfile.TemporaryDirectory(prefix="hopsgpu-bench-") as directory:
        place = Path(directory)
        source = _files(place / "large", 1, large_mb * _MB)
        up, down = _rounds(LARGE, _ROUNDS_LARGE, source, lake)
        title = f"one file of {large_mb} MB, {_ROUNDS_LARGE} rounds"
        show(title, LARGE, up, down, large_mb, "MB/s")
        show_cuts(LARGE, 1, _ROUNDS_LARGE)
        judge_large(up, down)
        cut = {each.name: each.cut(1, _ROUNDS_LARGE) for each in LARGE}
        figures["large"] = {"up": _plain(up), "down": _plain(down), "cut": cut}

        source = _files(place / "small", small_files, _SMALL_BYTES)
        up, down = _rounds(SMALL, _ROUNDS_SMALL, source, lake)
        title = f"{small_files} files of {_SMALL_BYTES // 1000} kB, {_ROUNDS_SMALL} rounds"
        show(title, SMALL, up, down, small_files, "files/s")
        show_cuts(SMALL, small_files, _ROUNDS_SMALL)
        judge_small(up, down)
        cut = {each.name: each.cut(small_files, _ROUNDS_SMALL) for each in SMALL}
        figures["small"] = {"up": _plain(up), "down": _plain(down), "cut": cut}
    return figures


@contextmanager
def _lake() -> Iterator[LakePath]:
    lake = LakePath(f"{HadoopConf.load().get('fs.defaultFS')}/tmp/hopsgpu-bench-{uuid.uuid4().hex}")
    lake.make()
    try:
        yield lake
    finally:
        lake.remove()


def _files(directory: Path, number: int, size: int) -> Path:
    """Create a directory of incompressible files."""
    directory.mkdir()
    for index in range(number):
        with (directory / f"{index:05d}.bin").open("wb") as file:
            for begin in range(0, size, BLOCK):
                file.write(os.urandom(min(BLOCK, size - begin)))
    return directory


def _rounds(
    contenders: Sequence[Contender], rounds: int, source: Path, lake: LakePath
) -> tuple[Costs, Costs]:
    """Download with all contenders what hopsgpu, the first, has uploaded in the same round."""
    up: Costs = {each.name: [] for each in contenders}
    up |= {START: [], VERSION: []}
    down: Costs = {each.name: [] for each in contenders if each.down}
    sources = {part: _part(source, part) for part in {each.part for each in contenders}}
    for number in range(rounds):
        up[START].append(_shell(["-test", "-e", "/"]))
        up[VERSION].append(_smallest(source.parent, lake))
        published = lake / uuid.uuid4().hex
        # In turns: each has the disk and the DataNode with what the one before left them to do.
        order = contenders[:: 1 if number % 2 else -1]
        for each in (one for one in order if not (one.once_up and number)):
            with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
                ours = each.up == "publish"
                place = published if ours else lake / uuid.uuid4().hex
                if each.up == "copy":
                    place = LakePath(f"file://{scratch}/up")
                own = sources[each.part]
                up[each.name].append(_transfer(each.up, own, place.url, each.threads))
                _compare(each, _arrived(_version_in(place) if ours else place), _size(own))
                if not ours:
                    place.remove()
        for each in (one for one in order if one.down and not (one.once_down and number)):
            with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
                local = Path(scratch) / "down"
                origin = published if each.down == "download" else _version_in(published)
                down[each.name].append(_transfer(each.down, local, origin.url, each.threads))
                _compare(each, _size(local), _size(source))
        published.remove()
    return up, down


def _version_in(published: LakePath) -> LakePath:
    return published / MODEL / "1"


def _arrived(place: LakePath) -> int:
    return sum(entry.size for entry in place.entries() if entry.name.endswith(".bin"))


def _compare(each: Contender, came: int, wanted: int) -> None:
    if came != wanted:
        raise RuntimeError(f"{each.name}: {came} of {wanted} bytes arrived")


def _part(source: Path, part: int) -> Path:
    """Create a directory with one of so many files of another."""
    if part == 1:
        return source
    directory = source.with_name(f"{source.name}-{part}")
    directory.mkdir()
    for file in sorted(source.iterdir())[::part]:
        (directory / file.name).hardlink_to(file)
    return directory


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*.bin"))


def _smallest(directory: Path, lake: LakePath) -> Cost:
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        Path(scratch, "one").write_bytes(b"1")
        place = lake / uuid.uuid4().hex
        cost = _transfer("publish", Path(scratch), place.url, 1)
        place.remove()
        return cost


def _transfer(way: str, local: Path, url: str, threads: int) -> Cost:
    # What the one before has left to be written is not to count.
    os.sync()
    if way.startswith("-"):
        many = ["-t", str(threads)] if threads > 1 else []
        ends = [str(local), url] if way == "-put" else [url, str(local)]
        return _shell([way, *many, *ends])
    command = [sys.executable, "-m", "benchmarks.transfers", way, str(local), url, str(threads)]
    before = _daemons_cpu()
    ran = subprocess.run(
        command, env={**os.environ, "BENCH_WEB": _web()}, stdout=subprocess.PIPE, check=True
    )
    return Cost(**json.loads(ran.stdout), **_since(before))


def _shell(options: Sequence[str]) -> Cost:
    """Run `hadoop fs`, with the jars that PySpark includes."""
    conf = os.environ["HADOOP_CONF_DIR"]
    command = [
        f"{os.environ['JAVA_HOME']}/bin/java",
        f"-Djdk.net.hosts.file={HadoopConf.load().get('hopsgpu.hosts')}",
        *("-cp", f"{conf}:{os.environ['SPARK_HOME']}/jars/*"),
        *("org.apache.hadoop.fs.FsShell", *options),
    ]
    before, began = _daemons_cpu(), time.monotonic()
    shell = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(shell.pid, 0)
    took = time.monotonic() - began
    shell.returncode = os.waitstatus_to_exitcode(status)
    if shell.returncode:
        raise RuntimeError(f"FsShell {' '.join(options)} ended with {shell.returncode}")
    cpu = used.ru_utime + used.ru_stime
    return Cost(took, cpu, memory=used.ru_maxrss / 1024, **_since(before))


def _daemons() -> dict[str, DaemonStatus]:
    directory = Path(os.environ["HADOOP_CONF_DIR"]).parents[1]
    return {daemon.name: daemon for daemon in devcluster.status(directory).daemons}


def _web() -> str:
    return _daemons()[NAMENODE].web


def _daemons_cpu() -> dict[str, float]:
    daemons = _daemons()
    return {name: _cpu(daemons[name].pid) for name in (DATANODE, NAMENODE)}


def _since(before: Mapping[str, float]) -> dict[str, float]:
    return {name: cpu - before[name] for name, cpu in _daemons_cpu().items()}


def _cpu(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _plain(costs: Costs) -> dict[str, list[dict[str, float]]]:
    return {name: [asdict(cost) for cost in each] for name, each in costs.items()}
