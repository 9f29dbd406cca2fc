"""Charts as inline SVG: bars, lines, a roofline. 400 units wide, so that text stays legible on a phone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from unicodedata import east_asian_width

from stretto.page.text import short, with_unit

WIDTH = 400
LEFT = 60.0  # of an axis whose marks may be 0.0001 or 100M, beside its own name
COLOURS = {"compute": "c1", "bandwidth": "c2", "gather latency": "c3", "launch": "c4"}


def _svg(height: float, body: str, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{extra}">{escape(text)}</text>'


ROOM = 58  # small letters in the width of a picture


def fitting(text: str, room: float = ROOM) -> str:
    """As much of a name as fits: capitals take more room than small letters, and Chinese ones most."""
    for i, letter in enumerate(text):
        wide = letter in "mMW@%" or east_asian_width(letter) in "WF"
        room -= 1.8 if wide else 1.3 if letter.isupper() or letter == "w" else 1.0
        if room < 0 or (room < 1 and i < len(text) - 1):
            return text[:i] + "…"
    return text


WIDE = 100.0  # largest over smallest: from here on bars of true length would not show the small ones


def bars(
    rows: Sequence[tuple[str, float, str]],
    label: str,
    unit: str = "",
    *,
    log: bool = False,
    legend: Mapping[str, str] | None = None,
) -> str:
    """Horizontal bars: (name, value, colour class). The name stands above its bar, so that long ones fit.

    log: where values are far apart the lengths are logarithmic, which is written below them. legend: colour -> what
    it means.
    """
    rows = [row for row in rows if row[1] > 0]
    if not rows:
        return "<p>nothing to show</p>"
    known = [value for _, value, _ in rows if math.isfinite(value)] or [1.0]
    maximum, least = max(known), min(known)
    log = log and maximum > WIDE * least
    parts, y = [], 4.0
    for name, value, colour in rows:
        share = min(1.0, value / maximum)
        if log and share < 1.0:
            share = 0.05 + 0.95 * math.log(value / least) / math.log(maximum / least)
        parts.append(_text(0, y + 10, fitting(name)))
        parts.append(
            f'<rect x="0" y="{y + 14:.1f}" width="{max(1.0, share * 330):.1f}" height="11" rx="2" class="{colour}">'
            f"<title>{escape(name)}: {escape(with_unit(value, unit))}</title></rect>"
        )
        parts.append(_text(max(1.0, share * 330) + 5, y + 24, with_unit(value, unit), extra="dim"))
        y += 33
    if log:
        parts.append(_text(0, y + 10, "lengths are logarithmic", extra="dim small"))
        y += 14
    meant = {colour: words for colour, words in (legend or {}).items() if any(c == colour for _, _, c in rows)}
    if meant:
        parts.append(_legend(meant, y + 12))
        y += 22
    return _svg(y + 2, "".join(parts), label)


def _legend(meant: Mapping[str, str], y: float) -> str:
    """Dots in a row, each with what its colour means."""
    parts, x = [], 4.0
    for colour, words in meant.items():
        parts.append(f'<circle cx="{x + 5:.0f}" cy="{y - 4:.0f}" r="5" class="{colour}"/>' + _text(x + 14, y, words))
        x += 30 + 6.4 * len(words)
    return "".join(parts)


def _scale(values: Sequence[float], low: float, high: float) -> tuple[float, float, float]:
    """Map of log10 values onto low..high: (offset, least, factor)."""
    logs = [math.log10(v) for v in values if v > 0] or [0.0]
    least, maximum = math.floor(min(logs)), math.ceil(max(logs))
    maximum = maximum if maximum > least else least + 1
    return low, least, (high - low) / (maximum - least)


def _ticks(scale: tuple[float, float, float], end: float) -> list[tuple[float, str]]:
    low, least, factor = scale
    count = round(abs((end - low) / factor))
    step = max(1, count // 5)
    return [(low + i * factor, short(10.0 ** (least + i))) for i in range(0, count + 1, step)]


def lines(
    series: dict[str, list[tuple[float, float]]], label: str, xlabel: str, ylabel: str, *, limits: Sequence[str] = ()
) -> str:
    """Line chart, both axes logarithmic. series: name -> [(x, y)]; limits: names of those that are dashed."""
    series = {name: [p for p in points if p[0] > 0 and 0 < p[1] < math.inf] for name, points in series.items()}
    series = {name: points for name, points in series.items() if points}
    if not series:
        return "<p>nothing to show</p>"
    places = sorted({x for points in series.values() for x, _ in points})
    first, last = math.log10(places[0]), math.log10(places[-1])
    sx = (LEFT, first, (390 - LEFT) / max(last - first, 1e-9))
    sy = _scale([y for points in series.values() for _, y in points], 225, 12)
    body = [_axes(sx, sy, 390, 12, 225, xlabel, ylabel, places)]
    y = 272.0
    dashed = [name for name in series if name in limits]
    for i, (name, points) in enumerate(series.items()):
        # Two limits are dashed in two ways.
        again = name in dashed[1:]
        style = (
            f"roof{' again' * again}" if name in limits else f"line l{i % 8}{' again' * (i >= 8)}"
        )  # there are eight colours
        path = " ".join(f"{_at(sx, x):.1f},{_at(sy, y):.1f}" for x, y in sorted(points))
        body.append(f'<polyline points="{path}" class="{style}"/>')
        body += [
            f'<circle cx="{_at(sx, a):.1f}" cy="{_at(sy, b):.1f}" r="3" class="dot l{i % 8}"/>'
            for a, b in points
            if name not in limits
        ]
        body.append(f'<path d="M2 {y - 6:.0f} H20" class="{style}"/>' + _text(26, y - 2, name))
        y += 16
    return _svg(y, "".join(body), label)


def _at(scale: tuple[float, float, float], value: float) -> float:
    low, least, factor = scale
    return low + (math.log10(value) - least) * factor


LETTER = 8.0  # units that a digit and its part of a gap take


def _apart(marks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Those marks whose names do not meet, the first and the last always among them."""
    saved = list(marks[:1])
    for x, text in marks[1:-1]:
        if x - saved[-1][0] >= LETTER * (len(text) + len(saved[-1][1]) + 1) / 2:
            saved.append((x, text))
    while (
        len(marks) > 1
        and len(saved) > 1
        and marks[-1][0] - saved[-1][0] < LETTER * (len(marks[-1][1]) + len(saved[-1][1]) / 2)
    ):
        saved.pop()
    return saved + list(marks[1:][-1:])


def _axes(
    sx: tuple[float, float, float],
    sy: tuple[float, float, float],
    right: float,
    top: float,
    bottom: float,
    xlabel: str,
    ylabel: str,
    places: Sequence[float] = (),
) -> str:
    """The frame of a chart; places: where the lower axis has its marks, if not at powers of ten."""
    marks = _apart([(_at(sx, place), short(place)) for place in places]) or _ticks(sx, right)
    parts = [f'<path d="M{sx[0]} {top} V{bottom} H{right}" class="axis"/>']
    parts += [
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" class="grid"/>'
        # The outer names stay inside: one would meet the other axis, the other would leave the picture.
        + _text(x, bottom + 13, text, "start" if x <= sx[0] else "end" if x > right - 12 else "middle", "dim")
        for x, text in marks
    ]
    parts += [
        f'<line x1="{sx[0]}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        + _text(sx[0] - 4, y + 4, text, "end", "dim")
        for y, text in _ticks(sy, top)
    ]
    parts.append(_text((sx[0] + right) / 2, bottom + 28, xlabel, "middle"))
    middle = (top + bottom) / 2
    parts.append(
        f'<text transform="translate(11 {middle:.0f}) rotate(-90)" text-anchor="middle">{escape(ylabel)}</text>'
    )
    return "".join(parts)


Move = tuple[str, float, str, float]  # an op that computes nothing: name, byte/s, bound, share of time


def roofline(
    points: Sequence[tuple[str, float, float, str, float]],
    peak: float,
    bandwidths: dict[str, float],
    label: str,
    moves: Sequence[Move] = (),
) -> str:
    """points: (name, flop/byte, flop/s, bound, share of time). Roofs: peak flop/s, and byte/s by name.

    moves have no place on it, since they do no flop: below it they stand on an axis of bytes per second.
    """
    shown = [p for p in points if p[1] > 0 and 0 < p[2] < math.inf]
    xs = [p[1] for p in shown] + [0.01, peak / max(bandwidths.values())]
    ys = [p[2] for p in shown] + [peak * 1.5]
    sx, sy = _scale(xs, LEFT, 390), _scale(ys, 250, 12)
    left, right = 10.0 ** sx[1], 10.0 ** (sx[1] + (390 - LEFT) / sx[2])
    floor = 10.0 ** sy[1]
    body = [_axes(sx, sy, 390, 12, 250, "flop per byte", "flop per second")]
    names: list[str] = []
    for line, (name, rate) in enumerate(sorted(bandwidths.items(), key=lambda item: -item[1])):
        start, knee = max(left, floor / rate), min(right, peak / rate)
        body.append(
            f'<polyline points="{_at(sx, start):.1f},{_at(sy, start * rate):.1f} '
            f'{_at(sx, knee):.1f},{_at(sy, knee * rate):.1f}" class="roof">'
            f"<title>{escape(name)}: {short(rate)}B/s</title></polyline>"
        )
        # Below the picture, in their order: beside the lines the names of roofs that lie close would cover one another.
        names.append(_text(4, 314 + 13 * line, f"roof {line + 1} from the top: {name}, {short(rate)}B/s", extra="dim"))
    flat = _at(sy, peak)
    knee = _at(sx, peak / max(bandwidths.values()))
    body.append(f'<line x1="{knee:.1f}" x2="390" y1="{flat:.1f}" y2="{flat:.1f}" class="roof"/>')
    body.append(_text(388, flat - 4, f"GEMM {short(peak)}flop/s", "end", "dim small"))
    for name, x, y, bound, share in shown:
        body.append(
            f'<circle cx="{_at(sx, x):.1f}" cy="{_at(sy, y):.1f}" r="{3 + 9 * math.sqrt(share):.1f}" '
            f'class="point {COLOURS.get(bound, "c5")}">'
            f"<title>{escape(name)}: {short(y)}flop/s, {bound}</title></circle>"
        )
    body.append(_legend({colour: bound for bound, colour in COLOURS.items()}, 296))
    lanes, height = _moves(moves, bandwidths, 324.0 + 13 * len(names))
    return _svg(height, "".join(body + names) + lanes, label)


LANES = 6  # ops with a line of their own


def _moves(moves: Sequence[Move], bandwidths: dict[str, float], top: float) -> tuple[str, float]:
    """Ops that only move bytes, the slowest on lines of their own, the others on one; and where the drawing ends."""
    shown = sorted((m for m in moves if 0 < m[1] < math.inf), key=lambda m: -m[3])
    if not shown:
        return "", top - 12
    lanes = [[m] for m in shown[:LANES]] + ([shown[LANES:]] if len(shown) > LANES else [])
    first, bottom = top + 12, top + 12 + 32.0 * len(lanes)
    sx = _scale([m[1] for m in shown] + list(bandwidths.values()), 10, 390)
    body = [_text(0, top + 4, "without flops: bytes per second, and the same roofs")]
    body.append(f'<path d="M10 {bottom} H390" class="axis"/>')
    body += [
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{first}" y2="{bottom}" class="grid"/>'
        + _text(x, bottom + 13, text, "start" if x <= 12 else "end" if x > 378 else "middle", "dim")
        for x, text in _ticks(sx, 390)
    ]
    body += [
        f'<line x1="{_at(sx, rate):.1f}" x2="{_at(sx, rate):.1f}" y1="{first}" y2="{bottom}" class="roof">'
        f"<title>{escape(name)}: {short(rate)}B/s</title></line>"
        for name, rate in bandwidths.items()
        if rate > 0
    ]
    for lane, (y, ops) in enumerate(zip((first + 32.0 * i for i in range(len(lanes))), lanes, strict=True)):
        name, rate, _, share = ops[0]
        text = f"{len(ops)} others" if lane == LANES else f"{fitting(name, 38)} {share:.0%}"
        body.append(_text(12, y + 11, f"{text}, {short(rate)}B/s" if lane < LANES else text, extra="halo"))
        body += [
            f'<circle cx="{_at(sx, rate):.1f}" cy="{y + 22:.1f}" r="{3 + 6 * math.sqrt(share):.1f}" '
            f'class="point {COLOURS.get(bound, "c5")}">'
            f"<title>{escape(name)}: {short(rate)}B/s, {bound}</title></circle>"
            for name, rate, bound, share in ops
        ]
    return "".join(body), bottom + 18
