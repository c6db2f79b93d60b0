"""The cluster's GPUs as tables for people."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

    from hopsgpu.yarn.gpus import ClusterGpus, GpuNode, GpuQueue, GpuType, GpuUser

_Cell = tuple[str, str]
_Row = list[_Cell]
_RIGHT = ("FREE", "USED", "TOTAL", "GPUS", "FOR", "GUARANTEED", "MAXIMUM", "PENDING", "MEMORY")
_GOOD, _BAD, _CARE, _FAINT = "green", "red", "yellow", "dim"
_GAP = 2
# What a column may shrink to; others do not.
_LEAST = {"NODE": 12, "STATE": 7, "TYPE": 10, "LABEL": 5, "USER": 5, "QUEUE": 12, "NODES": 10}
_LEAST |= {"NAME": 6, "COULD GET": 10}
# Given up in this order where even that is too wide.
_SPARED = ("DRIVER", "NODES", "MEMORY", "NAME", "TYPE", "PENDING", "GUARANTEED", "MAXIMUM", "LABEL")
# What tells these apart is at their ends.
_CUT_IN_FRONT = ("NODE", "QUEUE")


def tables(found: ClusterGpus, encoding: str, width: int | None = None) -> Text:
    """What is free, who has the rest, what one could get.

    Args:
        found: the GPUs.
        encoding: of the terminal or file; what it has no character for is written as "\\xd7".
        width: of the terminal. Each row of a table is a line that fits into it: names are
            shortened and cut, and columns left out. None for all there is, and no column but the
            last of a table has spaces in it.

    Returns:
        Lines; those that are no rows may be broken at the terminal's width.
    """
    from rich.text import Text

    parts = [[[cell] for cell in _summary(found)]]
    shown = found if width is None else _shortened(found)
    if shown.nodes:
        parts.append(_nodes(shown.nodes))
    if shown.users:
        parts.append(_users(shown.users, shown.time))
    if found.queues:
        # The root says nothing that the nodes do not.
        below = [queue for queue in found.queues if queue.leaf or queue.path != "root"]
        parts.append(_queues(below))
        parts[-1].append(
            [(f"COULD GET: in executors of {found.executor}, if nobody else asks", _FAINT)]
        )
    parts.append([[cell] for cell in _remarks(found)])
    blocks = [Text("\n").join(_aligned(part, encoding, width)) for part in parts if part]
    return Text("\n\n").join(blocks)


def _shortened(found: ClusterGpus) -> ClusterGpus:
    """The same without what the names of all hosts, products and applications have."""
    firsts = Counter(node.host.partition(".")[0] for node in found.nodes)

    def short(host: str) -> str:
        first = host.partition(".")[0]
        # Not of an address, nor where the domain alone tells two apart.
        return first if firsts[first] == 1 and not first.isdigit() else host

    def product(kind: GpuType) -> GpuType:
        return replace(kind, name=kind.name.removeprefix("NVIDIA "))

    return replace(
        found,
        nodes=tuple(
            replace(node, host=short(node.host), types=tuple(map(product, node.types)))
            for node in found.nodes
        ),
        users=tuple(
            replace(
                user,
                id=user.id.removeprefix("application_"),
                hosts={short(host): gpus for host, gpus in user.hosts.items()},
            )
            for user in found.users
        ),
    )


def _aligned(rows: Sequence[_Row], encoding: str, width: int | None) -> list[Text]:
    """Lines of a table; the first row has the headers, a row of one cell is a line of its own."""
    from rich.cells import cell_len
    from rich.text import Text

    shown = [[(_plain(text, encoding), style) for text, style in row] for row in rows]
    full = [row for row in shown if len(row) > 1]
    headers = [text for text, _ in full[0]] if full else []
    widths = [max(cell_len(text) for text, _ in column) for column in zip(*full, strict=True)]
    if width is not None:
        widths = _fitted(headers, widths, width)
    mark = "…" if _plain("…", encoding) == "…" else "~"
    lines = []
    for row in shown:
        if len(row) == 1:
            lines.append(Text(*row[0]))
            continue
        line = Text()
        kept = [i for i, most in enumerate(widths) if most]
        for i in kept:
            text, style = row[i]
            text = _cut(text, widths[i], mark, headers[i] in _CUT_IN_FRONT)
            pad = " " * (widths[i] - cell_len(text))
            right = headers[i] in _RIGHT
            line.append(pad if right else "")
            line.append(text, style=style)
            if i != kept[-1]:
                line.append(("" if right else pad) + " " * _GAP)
        if width is not None:
            line.truncate(width, overflow="crop")
        lines.append(line)
    return lines


def _fitted(headers: Sequence[str], widths: Sequence[int], room: int) -> list[int]:
    """Widths of columns that fit, 0 of one that is left out; the widest shrinks first."""
    fitted = dict(zip(headers, widths, strict=True))
    spared = [name for name in _SPARED if name in fitted]
    while sum(fitted.values()) + _GAP * (len(fitted) - 1) > room:
        wide = [name for name in fitted if fitted[name] > _LEAST.get(name, fitted[name])]
        if wide:
            fitted[max(wide, key=lambda name: fitted[name])] -= 1
        elif spared:
            del fitted[spared.pop(0)]
            # What it leaves is for the others.
            fitted = {name: w for name, w in zip(headers, widths, strict=True) if name in fitted}
        else:
            break
    return [fitted.get(name, 0) for name in headers]


def _cut(text: str, width: int, mark: str, in_front: bool) -> str:
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= width:
        return text
    if in_front:
        return mark + set_cell_size(text[::-1], width - 1)[::-1]
    return set_cell_size(text, width - 1) + mark


def _summary(found: ClusterGpus) -> Iterator[_Cell]:
    if not found.nodes:
        said = f"no node of this YARN has GPUs ({found.nodes_without} nodes run): NodeManagers with"
        yield f"{said} yarn.nodemanager.resource-plugins=yarn.io/gpu have them", _CARE
        return
    broken = f", {found.unhealthy} unhealthy" if found.unhealthy else ""
    when = time.strftime("%H:%M:%S", time.localtime(found.time))
    yield (
        f"{found.free} of {found.total} GPUs free, {found.used} used{broken} ({when})",
        _GOOD if found.free else _CARE,
    )
    best = max(
        (queue for queue in found.queues if queue.obtainable is not None),
        key=lambda queue: queue.obtainable or 0,
        default=None,
    )
    if best is not None:
        where = f" in queue {best.path}{_labelled(best)}" if best.obtainable else ""
        yield f"{found.user} could get {best.obtainable} now{where}", "bold"


def _nodes(nodes: Sequence[GpuNode]) -> list[_Row]:
    labels = any(node.label for node in nodes)
    before = ["NODE", "STATE", "FREE", "USED", "TOTAL", "MEMORY", "DRIVER"]
    rows = [
        [
            (node.host, ""),
            (node.state, "" if node.state == "RUNNING" else _BAD),
            (str(node.free), _GOOD if node.free else _FAINT),
            (str(node.used), ""),
            (str(node.total), ""),
            (",".join(_memory(each.memory_mib) for each in node.types) or "-", ""),
            (node.driver or "-", ""),
            *([(node.label or "-", "")] if labels else []),
            (_names(node), ""),
        ]
        for node in nodes
    ]
    return [_headers(*before, *(["LABEL"] if labels else []), "TYPE"), *rows]


def _headers(*names: str) -> _Row:
    return [(name, "bold") for name in names]


def _names(node: GpuNode) -> str:
    if len(node.types) == 1:
        return node.types[0].name or "-"
    return ", ".join(f"{each.count} × {each.name or '-'}" for each in node.types) or "-"


def _memory(mib: int | None) -> str:
    return "-" if mib is None else f"{mib / 1024:.3g}GiB"


def _users(users: Sequence[GpuUser], now: float) -> list[_Row]:
    headers = ["GPUS", "USER", "FOR", "APPLICATION", "QUEUE", "NODES", "NAME"]
    rows = [
        [
            (str(user.gpus), ""),
            (user.user or "-", "bold"),
            (_duration(user, now), ""),
            (user.id, ""),
            (user.queue or "-", ""),
            (",".join(f"{host}:{n}" for host, n in user.hosts.items()) or "-", ""),
            (user.name or "-", ""),
        ]
        for user in users
    ]
    return [_headers(*headers), *rows]


def _duration(user: GpuUser, now: float) -> str:
    """For how long it has had GPUs; no longer than it runs, where that alone is known."""
    since = user.since or user.started
    if not since:
        return "-"
    seconds = max(int(now - since), 0)
    (days, hours), (minutes, rest) = divmod(seconds // 3600, 24), divmod(seconds % 3600, 60)
    said = (
        f"{days}d{hours:02}h"
        if days
        else f"{hours}h{minutes:02}m"
        if hours
        else f"{minutes}m{rest:02}s"
    )
    return said if user.since else f"≤{said}"


def _queues(queues: Sequence[GpuQueue]) -> list[_Row]:
    labels = any(queue.label for queue in queues)
    headers = ["QUEUE", *(["LABEL"] if labels else [])]
    rows = [
        [
            (queue.path, "" if queue.leaf else _FAINT),
            *([(queue.label or "-", "")] if labels else []),
            (str(queue.guaranteed), ""),
            (str(queue.maximum), ""),
            (str(queue.used), ""),
            ("-" if queue.pending is None else str(queue.pending), _CARE if queue.pending else ""),
            (_obtainable(queue), _GOOD if queue.obtainable else _FAINT),
        ]
        for queue in queues
    ]
    return [_headers(*headers, "GUARANTEED", "MAXIMUM", "USED", "PENDING", "COULD GET"), *rows]


def _labelled(queue: GpuQueue) -> str:
    return f" (label {queue.label})" if queue.label else ""


def _obtainable(queue: GpuQueue) -> str:
    if queue.obtainable is None:
        return "-"
    bounds = {
        "nodes": "room on nodes" if queue.obtainable else "no room on nodes",
        "queue": f"maximum of {queue.bound_queue}",
        "user": f"user limit in {queue.bound_queue}",
        "container": "executors are above its largest container",
        "state": f"it is {queue.state}",
    }
    return f"{queue.obtainable} ({bounds[queue.bound]})"


def _remarks(found: ClusterGpus) -> Iterator[_Cell]:
    if found.unexplained:
        who = "applications that YARN does not show to the caller, or that have just ended"
        yield f"{found.unexplained} GPUs are in use by {who}", ""
    if found.queues and found.acls is not False:
        what = "queues have ACLs" if found.acls else "YARN does not tell whether queues have ACLs"
        yield f"{what}; who may submit where is shown to administrators only", ""
    for node in found.nodes:
        if node.health:
            yield f"{node.host} is {node.state}: {node.health}", _BAD
    for problem in found.problems:
        yield problem, _CARE


def _plain(text: str, encoding: str) -> str:
    """Without what would steer a terminal: names of applications are other users'."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return shown.encode(encoding, "backslashreplace").decode(encoding)
