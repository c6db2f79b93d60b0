"""The cluster's GPUs as tables for people."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

    from hopsgpu.yarn.gpus import ClusterGpus, GpuNode, GpuQueue, GpuUser

_Cell = tuple[str, str]
_Row = list[_Cell]
_RIGHT = ("FREE", "USED", "TOTAL", "GPUS", "FOR", "GUARANTEED", "MAXIMUM", "PENDING", "MEMORY")
_GOOD, _BAD, _CARE, _FAINT = "green", "red", "yellow", "dim"


def tables(found: ClusterGpus, encoding: str) -> Text:
    """What is free, who has the rest, what one could get.

    Args:
        found: the GPUs.
        encoding: of the terminal or file; what it has no character for is written as "\\xd7".

    Returns:
        Lines that are not to be broken; a terminal in which they are drawn in place cuts them.
    """
    from rich.text import Text

    parts = [[[cell] for cell in _summary(found)]]
    if found.nodes:
        parts.append(_nodes(found.nodes))
    if found.users:
        parts.append(_users(found.users, found.time))
    if found.queues:
        # The root says nothing that the nodes do not.
        below = [queue for queue in found.queues if queue.leaf or queue.path != "root"]
        parts.append(_queues(below))
        parts[-1].append(
            [(f"COULD GET: in executors of {found.executor}, if nobody else asks", _FAINT)]
        )
    parts.append([[cell] for cell in _remarks(found)])
    blocks = [Text("\n").join(_aligned(part, encoding)) for part in parts if part]
    return Text("\n\n", no_wrap=True, overflow="ellipsis").join(blocks)


def _aligned(rows: Sequence[_Row], encoding: str) -> list[Text]:
    """Lines of a table; the first row has the headers, a row of one cell is a line of its own."""
    from rich.cells import cell_len
    from rich.text import Text

    shown = [[(_plain(text, encoding), style) for text, style in row] for row in rows]
    full = [row for row in shown if len(row) > 1]
    widths = [max(cell_len(text) for text, _ in column) for column in zip(*full, strict=True)]
    right = [header in _RIGHT for header, _ in shown[0]]
    lines = []
    for row in shown:
        line = Text()
        for i, (text, style) in enumerate(row):
            pad = " " * (widths[i] - cell_len(text)) if len(row) > 1 else ""
            line.append("  " if i else "")
            line.append(pad if right[i] else "")
            line.append(text, style=style)
            line.append("" if right[i] or i == len(row) - 1 else pad)
        lines.append(line)
    return lines


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
    headers = ["NODE", "STATE", "FREE", "USED", "TOTAL", "TYPE", "MEMORY", "DRIVER"]
    rows = [
        [
            (node.host, ""),
            (node.state, "" if node.state == "RUNNING" else _BAD),
            (str(node.free), _GOOD if node.free else _FAINT),
            (str(node.used), ""),
            (str(node.total), ""),
            (_names(node), ""),
            (", ".join(_memory(each.memory_mib) for each in node.types) or "-", ""),
            (node.driver or "-", ""),
            *([(node.label or "-", "")] if labels else []),
        ]
        for node in nodes
    ]
    return [_headers(*headers, *(["LABEL"] if labels else [])), *rows]


def _headers(*names: str) -> _Row:
    return [(name, "bold") for name in names]


def _names(node: GpuNode) -> str:
    if len(node.types) == 1:
        return node.types[0].name or "-"
    return ", ".join(f"{each.count} × {each.name or '-'}" for each in node.types) or "-"


def _memory(mib: int | None) -> str:
    return "-" if mib is None else f"{mib / 1024:.3g} GiB"


def _users(users: Sequence[GpuUser], now: float) -> list[_Row]:
    headers = ["GPUS", "USER", "FOR", "APPLICATION", "QUEUE", "NODES", "NAME"]
    rows = [
        [
            (str(user.gpus), ""),
            (user.user or "-", "bold"),
            (_duration(user, now), ""),
            (user.id, ""),
            (user.queue or "-", ""),
            (", ".join(f"{host} ({n})" for host, n in user.hosts.items()) or "-", ""),
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
    headers = ["QUEUE", "GUARANTEED", "MAXIMUM", "USED", "PENDING", "COULD GET"]
    rows = [
        [
            (queue.path + _labelled(queue), "" if queue.leaf else _FAINT),
            (str(queue.guaranteed), ""),
            (str(queue.maximum), ""),
            (str(queue.used), ""),
            ("-" if queue.pending is None else str(queue.pending), _CARE if queue.pending else ""),
            (_obtainable(queue), _GOOD if queue.obtainable else _FAINT),
        ]
        for queue in queues
    ]
    return [_headers(*headers), *rows]


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
