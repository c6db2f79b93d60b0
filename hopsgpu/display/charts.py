"""Small plots, as characters for a terminal and as SVG for a notebook."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator, Mapping, Sequence

from hopsgpu.display.picture import Bounds, Point

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-~=+*#"
# Visible on light and on dark backgrounds.
_COLOUR = "#3b82f6"
_FAINT = "#94a3b8"
_WRITTEN = "#7c8799"


# Bounds of plots of shares, whose heights must be comparable.
SHARES = (0.0, 1.0)


def sparkline(
    points: Sequence[Point],
    width: int,
    levels: str = BLOCKS,
    bounds: Bounds | None = None,
    span: Bounds | None = None,
) -> str:
    """Return values over time or steps as at most `width` characters; "" without values.

    Args:
        levels: a character for each height.
        bounds: the lowest and the highest value, by default those of the points.
        span: the first and the last time or step, by default those of the points.
    """
    if not points:
        return ""
    first, last = span or (points[0][0], points[-1][0])
    cells: dict[int, list[float]] = {}
    for at, value in points:
        cell = int((at - first) / ((last - first) or 1.0) * width)
        cells.setdefault(min(cell, width - 1), []).append(value)
    means = {cell: sum(values) / len(values) for cell, values in cells.items()}
    least, most = bounds or (min(means.values()), max(means.values()))
    drawn = [" "] * (max(means) + 1)
    for cell, mean in _between(means):
        # A mean over a short time may exceed a bound from means over longer times.
        high = min(max((mean - least) / ((most - least) or 1.0), 0.0), 1.0)
        drawn[cell] = levels[round(high * (len(levels) - 1))]
    return "".join(drawn)


def _between(means: Mapping[int, float]) -> Iterator[tuple[int, float]]:
    """Yield values by place in order, interpolated linearly in between."""
    places = sorted(means)
    for start, end in itertools.pairwise(places):
        rise = (means[end] - means[start]) / (end - start)
        yield from ((place, means[start] + rise * (place - start)) for place in range(start, end))
    yield places[-1], means[places[-1]]


def lines_image(
    traces: Sequence[Sequence[Point]],
    width: int,
    height: int,
    bounds: Bounds | None = None,
    span: Bounds | None = None,
    colours: Sequence[str] = (),
) -> str:
    """Return a plot of values over time or steps, as the URL of an image.

    The first trace is drawn in front of the others.

    Args:
        colours: a colour of each trace; by default the first one has a colour and the others are
            faint.
        bounds: the lowest and the highest value, by default those of the points.
        span: the first and the last time or step, by default those of the points.
    """
    coloured = [pair for pair in itertools.zip_longest(traces, colours) if pair[0]]
    drawn = [trace for trace, _ in coloured]
    if not drawn:
        return _address("", width, height)
    first, last = span or (min(t[0][0] for t in drawn), max(t[-1][0] for t in drawn))
    least, most = bounds or _range(drawn)
    shapes = []
    for number, (trace, own_colour) in reversed(list(enumerate(coloured))):
        at = [
            (
                2 + (when - first) / ((last - first) or 1.0) * (width - 4),
                height - 2 - (value - least) / ((most - least) or 1.0) * (height - 4),
            )
            for when, value in trace
        ]
        colour, thick = (_FAINT, 1) if number else (_COLOUR, 1.6)
        if own_colour is not None:
            colour, thick = own_colour, 1.6
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        if len(at) == 1:
            shapes.append(
                f'<circle cx="{at[0][0]:.1f}" cy="{at[0][1]:.1f}" r="2" fill="{colour}"/>'
            )
        else:
            shapes.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{thick}"/>'
            )
    return _address("".join(shapes), width, height)


def bars_image(shares: Sequence[float], width: int, height: int) -> str:
    """Return shares in [0, 1] side by side, as the URL of an image."""
    step = width / max(len(shares), 1)
    bars = []
    for number, share in enumerate(shares):
        tall = max(min(share, 1.0), 0.0) * (height - 1) + 1
        place = f'x="{number * step:.1f}" y="{height - tall:.1f}"'
        size = f'width="{max(step - (step > 3), 0.5):.1f}" height="{tall:.1f}"'
        bars.append(f'<rect {place} {size} fill="{_COLOUR}"/>')
    frame = f'<rect width="{width}" height="{height}" fill="{_FAINT}" fill-opacity="0.25"/>'
    return _address(frame + "".join(bars), width, height)


def held_image(held: Sequence[Point], used: Sequence[Point], width: int, height: int) -> str:
    """Return a plot of the number held over time, and of the part in use, as the URL of an image.

    Args:
        held: number held, by seconds, in order; at least one point.
    """
    margin, low = 34.0, height - 18.0
    most = max(value for _, value in held) or 1.0
    last = max(held[-1][0], used[-1][0]) or 1.0

    def area(points: Sequence[Point], look: str) -> str:
        at = [
            f"{margin + x / last * (width - margin - 4):.1f},{low - y / most * (low - 12):.1f}"
            for x, y in ((0.0, points[0][1]), *points, (last, points[-1][1]))
        ]
        return f'<polygon points="{margin},{low} {" ".join(at)} {width - 4},{low}" {look}/>'

    shapes = [
        area(held, f'fill="{_FAINT}" fill-opacity="0.35"'),
        area(used, f'fill="{_COLOUR}" fill-opacity="0.8"'),
        _text(margin - 5, 16, f"{most:g}", "end"),
        _text(margin - 5, low, "0", "end"),
        _text(margin, height - 4, "0 s", "start"),
        _text(width - 4, height - 4, f"{last:,.0f} s" if last >= 10 else f"{last:.1f} s", "end"),
    ]
    return _address("".join(shapes), width, height)


def worlds_image(
    worlds: Sequence[tuple[float, float, int]], last: float, width: int, height: int
) -> str:
    """Return a bar for each world of an elastic gang over time, as the URL of an image.

    A bar is as high as the world's number of ranks, which stands above it if there is room.

    Args:
        worlds: of each world its begin and its end, in seconds, and its number of ranks.
        last: where the axis ends, in seconds.
    """
    low, most = height - 18.0, max((ranks for _, _, ranks in worlds), default=1)
    scale = (width - 4) / (last or 1.0)
    shapes = [
        f'<rect x="2" y="{low:.1f}" width="{width - 4}" height="1" fill="{_FAINT}"/>',
        _text(2, height - 4, "0 s", "start"),
        _text(width - 4, height - 4, f"{last:,.0f} s" if last >= 10 else f"{last:.1f} s", "end"),
    ]
    for begin, end, ranks in worlds:
        x, wide = 2 + begin * scale, max((end - begin) * scale - 1, 1.0)
        tall = ranks / most * (low - 14)
        place = f'x="{x:.1f}" y="{low - tall:.1f}" width="{wide:.1f}" height="{tall:.1f}"'
        shapes.append(f'<rect {place} fill="{_COLOUR}" fill-opacity="0.8"/>')
        if wide >= 7 * len(str(ranks)):
            shapes.append(_text(x + wide / 2, low - tall - 3, str(ranks), "middle"))
    return _address("".join(shapes), width, height)


def _text(x: float, y: float, words: str, anchor: str) -> str:
    font = f'font-family="sans-serif" font-size="11" fill="{_WRITTEN}"'
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" {font}>{words}</text>'


def _range(traces: Sequence[Sequence[Point]]) -> Bounds:
    values = [value for trace in traces for _, value in trace]
    return min(values), max(values)


def _address(shapes: str, width: int, height: int) -> str:
    view = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {view}>{shapes}</svg>'
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
