"""The contenders of `benchmarks.stores`, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# As many as hopsgpu and the option of `hadoop fs` have.
_THREADS = 64
# To close a file takes hdfs-native milliseconds, or half a second more.
_ASLEEP_SECONDS = 0.3
# 200 MB, in MiB.
MOST_MEMORY = 200e6 / 2**20

OURS = "hopsgpu"
RAW = "hdfs-native"
SHELL = "FsShell"
COPY = "local copy, with fsync"
START = "FsShell's start alone"
# Staging, claim, manifest and rename, which cost the same for any size.
VERSION = "hopsgpu, one byte"


@dataclass(frozen=True)
class Contender:
    """One way of uploading, and the same way of downloading.

    Attributes:
        name: name in the table.
        up: names in `transfers.WAYS`, or FsShell's options.
        threads: number of threads, if it does not choose them itself.
        part: it uploads only one of so many files: HDFS takes half a second to close one, and a
            contender that closes each by itself would need a quarter of an hour for all.
        once_up: it uploads only in the first round.
        once_down: it downloads only in the first round.
    """

    name: str
    up: str
    down: str = ""
    threads: int = 1
    part: int = 1
    once_up: bool = False
    once_down: bool = False

    def cut(self, files: int, rounds: int) -> str:
        """Return which of the files and rounds it skipped; "" if none."""
        told = [f"up {-(-files // self.part)} of the {files} files"] if self.part > 1 else []
        told += [f"up in 1 of {rounds} rounds"] if self.once_up else []
        told += [f"down in 1 of {rounds} rounds"] if self.once_down else []
        return ", ".join(told)


# What lets a file wait for another is given few, and what takes minutes for all a quarter.
_FEW, _QUARTER = 20, 4
LARGE = (
    Contender(OURS, "publish", "download"),
    Contender(RAW, "raw-write", "raw-read"),
    Contender("hdfs", "web-write", "web-read", once_up=True, once_down=True),
    Contender(SHELL, "-put", "-get", once_up=True, once_down=True),
    Contender(COPY, "copy"),
)
SMALL = (
    Contender(OURS, "publish", "download"),
    Contender(RAW, "raw-write", "raw-read", part=_FEW, once_up=True),
    Contender(f"{RAW}, {_THREADS} threads", "raw-write", "raw-read", _THREADS),
    Contender(
        f"hdfs, {_THREADS} threads",
        *("web-write", "web-read", _THREADS),
        part=_QUARTER,
        once_up=True,
        once_down=True,
    ),
    Contender(SHELL, "-put", "-get", part=_FEW, once_up=True),
    Contender(f"{SHELL}, {_THREADS} threads", "-put", "-get", _THREADS, once_up=True),
    Contender(COPY, "copy"),
)


@dataclass(frozen=True)
class Cost:
    """The cost of one transfer.

    Attributes:
        seconds: elapsed seconds, for Python without the start of the interpreter.
        cpu: CPU seconds of the process.
        datanode: CPU seconds of the DataNode meanwhile.
        namenode: CPU seconds of the NameNode meanwhile.
        memory: peak memory of the process, in MiB.
        closing: seconds that hdfs-native took to close the largest file that it wrote.
    """

    seconds: float
    cpu: float
    datanode: float
    namenode: float
    memory: float
    closing: float = 0.0


Costs = dict[str, list[Cost]]


def show(
    title: str, contenders: Sequence[Contender], up: Costs, down: Costs, amount: int, unit: str
) -> None:
    """Print all costs.

    Args:
        amount: total amount, in the unit before the slash of `unit`.
    """
    print(f"\n{title}; medians, CPU in seconds\n\n{'':34}", end="")
    heads = ("times", "s", "least", "most", unit, "CPU", "DN", "NN", "MiB")
    print("".join(f"{head:>9}" for head in heads))
    parts = {each.name: -(-amount // each.part) for each in contenders}
    wholes = dict.fromkeys(parts, amount)
    for way, costs, amounts in (("up", up, parts), ("down", down, wholes)):
        for name, each in costs.items():
            seconds = [cost.seconds for cost in each]
            middle = [_median(each, of) for of in ("cpu", "datanode", "namenode", "memory")]
            rate = amounts.get(name, 0.0) / statistics.median(seconds)
            row = (statistics.median(seconds), min(seconds), max(seconds), rate, *middle)
            numbers = "".join(f"{number:9.2f}" for number in row)
            print(f"{way:5}{name:29}{len(each):9}{numbers}", flush=True)
    print()


def show_cuts(contenders: Sequence[Contender], files: int, rounds: int) -> None:
    """Print the contenders that skipped something; rates are of what each transferred."""
    for each in contenders:
        if cut := each.cut(files, rounds):
            print(f"cut: {each.name}: {cut}")


def judge_large(up: Costs, down: Costs) -> None:
    """Print how one large file compares with the target."""
    for way, costs in (("publish", up), ("download", down)):
        # Of one round, since what the disk still writes of others comes and goes.
        pairs = zip(costs[RAW], costs[OURS], strict=True)
        ratio = statistics.median(raw.seconds / ours.seconds for raw, ours in pairs)
        print(f"{way} has {ratio:.2f} of the rate of {RAW} (target: at least 0.9)")
    _show_closing(up)
    own = _median(up[VERSION], "seconds")
    print(f"of a publish {own:.2f} s are the version's own, whatever its size")
    _judge_memory(up, down)


def _show_closing(up: Costs) -> None:
    """Print the comparison without the random delay of `transfers._Closing`."""
    pairs = list(zip(up[RAW], up[OURS], strict=True))
    ratio = statistics.median(
        (raw.seconds - raw.closing) / (ours.seconds - ours.closing) for raw, ours in pairs
    )
    slept = {name: sum(cost.closing > _ASLEEP_SECONDS for cost in up[name]) for name in (RAW, OURS)}
    print(
        f"closing the file, hdfs-native slept half a second in {slept[RAW]} and {slept[OURS]} of"
        f" {len(pairs)} rounds of the two; without the closing, publish has {ratio:.2f} of its rate"
    )


def judge_small(up: Costs, down: Costs) -> None:
    """Print how many small files compare with the target.

    The time of a contender that skipped files is scaled to all of them.
    """
    start = _median(up[START], "seconds")
    for way, costs in (("publish", up), ("download", down)):
        ours = _median(costs[OURS], "seconds")
        for each in SMALL:
            if each.name.startswith(SHELL):
                part = each.part if costs is up else 1
                work = (_median(costs[each.name], "seconds") - start) * part
                wanted = "measured" if each.threads > 1 else "target: at least 5"
                print(
                    f"{way} has {work / ours:.1f} times the rate of {each.name} once up ({wanted}),"
                    f" and {(start + work) / ours:.1f} times that of one call, its start included"
                )
    _judge_memory(up, down)


def _judge_memory(up: Costs, down: Costs) -> None:
    most = max(cost.memory for cost in up[OURS] + down[OURS])
    print(f"the process has {most:.0f} MiB at most (target: under {MOST_MEMORY:.0f})")


def _median(costs: Sequence[Cost], of: str) -> float:
    return statistics.median(float(getattr(cost, of)) for cost in costs)
