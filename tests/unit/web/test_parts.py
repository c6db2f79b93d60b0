"""Parts of the pages: parallel coordinates, parts of logs, metrics of files that grow, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.display.run_view import failure_of
from hopsgpu.storage.lake import LakePath
from hopsgpu.web.coordinates import MAX_LINES, coordinates
from hopsgpu.web.log_pages import MAX_BYTES, read_part
from hopsgpu.web.metric_series import MetricFiles
from hopsgpu.web.node_use import means_by_host, samples_in
from tests.unit.searches import trial


def test_coordinates_of_numbers_choices_and_orders_of_magnitude() -> None:
    trials = [
        trial(
            n, params={"lr": 10.0 ** -(n + 1), "layers": 2 * n, "kind": "ab"[n % 2]}, value=float(n)
        )
        for n in range(5)
    ]
    picture = coordinates(trials, "loss", is_minimized=True)
    lr, layers, kind, loss = picture.axes
    assert (lr.is_log, layers.is_log) == (True, False)
    assert lr.labels == ((0.0, "1e-05"), (1.0, "0.1")) and kind.labels == ((0.0, "a"), (1.0, "b"))
    best = picture.lines[-1]
    assert (best.number, best.rank) == (0, 0) and picture.lines[0].rank == 4
    assert best.places == pytest.approx((1.0, 0.0, 0.0, 0.0))
    assert picture.lines[2].places[:2] == pytest.approx((0.5, 0.5)) and loss.name == "loss"
    assert coordinates(trials, "loss", is_minimized=False).lines[-1].number == 4


ODD = [None, True, "x" * 300, [1], {"a": 1}, 10**400, float("nan"), 1e308]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_coordinates_of_odd_values(odd: Any) -> None:
    trials = [trial(n, params={"p": odd if n else -1e308, "q": odd}) for n in range(3)]
    trials.append(trial(3, value=odd if isinstance(odd, float) else None))
    trials.append(trial(4, params={}))
    picture = coordinates(trials, "loss", is_minimized=True)
    places = [place for line in picture.lines for place in line.places if place is not None]
    assert len(picture.lines) >= 4 and all(0 <= place <= 1 for place in places)


def test_the_best_of_many_trials_are_drawn() -> None:
    trials = [trial(n) for n in range(MAX_LINES + 50)]
    picture = coordinates(trials, "loss", is_minimized=True)
    assert (len(picture.lines), picture.left_out) == (MAX_LINES, 50)
    assert picture.lines[-1].number == MAX_LINES + 49
    many = [trial(n, params={f"p{i}": n for i in range(30)}) for n in range(2)]
    wide = coordinates(many, "loss", is_minimized=True)
    assert len(wide.axes) == 11 and wide.axes_left_out == 20


def log_of(directory: Path, content: bytes) -> LakePath:
    (directory / "log").write_bytes(content)
    return LakePath(f"file://{directory}/log")


def test_parts_of_a_log_are_whole_lines(tmp_path: Path) -> None:
    lines = [f"line {n} \u00fcber\n".encode() for n in range(20_000)]
    content = b"".join(lines)
    file = log_of(tmp_path, content)
    end = read_part(file, len(content), None, can_grow=False)
    assert end.end == len(content) and end.begin > 0 and len(end.text.encode()) <= MAX_BYTES
    assert end.text.startswith("line ") and end.text.endswith("line 19999 \u00fcber\n")
    first = read_part(file, len(content), 0, can_grow=False)
    assert first.earlier is None and first.end < len(content) and first.text.endswith("\u00fcber\n")
    assert read_part(file, len(content), first.end, can_grow=False).text.startswith("line ")
    past = read_part(file, len(content), 10**9, can_grow=True)
    assert (past.text, past.begin, past.end) == ("", len(content), len(content))


def test_a_line_without_an_end_is_cut(tmp_path: Path) -> None:
    content = b"x" * (3 * MAX_BYTES)
    part = read_part(log_of(tmp_path, content), len(content), 0, can_grow=True)
    assert part.end == MAX_BYTES and len(part.text) <= 2000


def test_what_a_terminal_would_show(tmp_path: Path) -> None:
    content = b"1 %\r50 %\r100 %\r\n\x1b[31mred\x1b[0m\x00\n\xff\xfe\n"
    part = read_part(log_of(tmp_path, content), len(content), None, can_grow=False)
    assert part.text == "100 %\nred?\n\ufffd\ufffd\n"


def report(step: int, **metrics: Any) -> str:
    return json.dumps({"time": 1.0 * step, "step": step, "metrics": metrics}) + "\n"


def test_metrics_are_read_on_where_the_last_look_ended(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    files = MetricFiles(LakePath(f"file://{tmp_path}"))
    assert files.look().metrics == {}
    logs.mkdir()
    file = logs / "metrics-0.jsonl"
    file.write_text(report(0, loss=3.0) + report(1, loss=2.0)[:-10])
    assert files.look().metrics["loss"][0].points == ((0.0, 3.0),)
    file.write_text(report(0, loss=3.0) + report(1, loss=2.0))
    assert files.look().metrics["loss"][0].points == ((0.0, 3.0), (1.0, 2.0))
    # It was made anew, and then another attempt began.
    file.write_text(report(5, loss=1.0))
    assert files.look().metrics["loss"][0].points == ((5.0, 1.0),)
    (logs / "attempt-1").mkdir()
    (logs / "attempt-1" / "metrics-3.jsonl").write_text(report(7, acc=0.5))
    plots = files.look()
    assert list(plots.metrics) == ["acc"] and plots.metrics["acc"][0].rank == 3


def test_what_is_kept_of_metrics_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    many = {f"m{n}": 1.0 for n in range(100)}
    lines = [report(step, **many) for step in range(2000)]
    odd = ["{", "[]", '{"gpu": 1, "time": 1}', '{"step": "x", "metrics": {}}', '{"gpu": {}}']
    (tmp_path / "logs" / "metrics-0.jsonl").write_text("".join(lines) + "\n".join(odd) + "\n")
    files = MetricFiles(LakePath(f"file://{tmp_path}"))
    plots = files.look()
    while plots.unread:
        plots = files.look()
    assert len(plots.metrics) == 24 and plots.left_out >= 24
    assert all(len(one.points) < 300 for series in plots.metrics.values() for one in series)
    assert plots.odd == 4


def test_errors_without_a_traceback() -> None:
    told = failure_of("the lake is away")
    assert (told.traceback, told.words, told.rank) == ("", "the lake is away", None)
    assert failure_of("").words == ""


def test_samples_become_means_of_minutes_by_host() -> None:
    lines = [
        '{"time": 100, "gpu": {"uuid": "a", "utilisation": 0.5}}',
        '{"time": 50, "gpu": {"uuid": "a", "utilisation": 0.9}}',
        '{"time": 110, "step": 3, "metrics": {"\\"gpu\\"": 1}}',
        '{"time": 120, "gpu": {"uuid": "a", "utilisation": null}}',
        '{"time": 130, "gpu": {"uuid": "a", "utilisation": 7}}',
        'tilisation": 0.5}}, "gpu"',
    ]
    assert list(samples_in("\n".join(lines).encode(), 60.0)) == [(100.0, 0.5)]
    now = 10_000.0
    samples = [
        *(
            ("node1", (now - at, use))
            for at, use in ((10, 0.2), (20, 0.4), (3590, 1.0), (4000, 0.0))
        ),
        ("node2", (now - 100, 0.7)),
    ]
    assert means_by_host(samples, now) == {
        "node1": ((now - 3570, 1.0), (now - 30, pytest.approx(0.3))),
        "node2": ((now - 90, 0.7),),
    }
