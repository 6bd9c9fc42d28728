"""Answers in a notebook: the text of the terminal, and a small chart as inline SVG, without scripts
or style sheets."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, List, Optional, Sequence, Tuple

from .sizes import show_size

if TYPE_CHECKING:
    from .answers import Advice, Answer, Inspection, Leaks, Rehearsal, Replay

WIDTH = 860
LABEL = 400
# What fits into the label.
MOST_LETTERS = 62
ROW = 20
HEIGHT = 140
MOST_BARS = 10
PLAIN = "#7a8ea3"
MARKED = "#2a7ab0"
BAD = "#b3402a"

# Label, value, colour.
Bar = Tuple[str, Optional[float], str]


def size(value: Optional[float]) -> str:
    """Bytes as the program prints them; an empty text for what is unknown."""
    return "" if value is None else show_size(value)


def to_html(answer: "Answer") -> str:
    """The answer for a notebook."""
    chart = chart_of(answer)
    text = f'<pre style="white-space:pre;overflow-x:auto">{escape(answer.text.rstrip())}</pre>'
    return f"<div>{chart}{text}</div>"


def chart_of(answer: "Answer") -> str:
    """The chart that belongs to an answer, or an empty text."""
    from . import answers

    if isinstance(answer, answers.Advice):
        return _advice(answer)
    if isinstance(answer, answers.Leaks):
        return _leaks(answer)
    if isinstance(answer, answers.Inspection):
        return _inspection(answer)
    if isinstance(answer, answers.Replay):
        return _replay(answer)
    if isinstance(answer, answers.Rehearsal):
        return _rehearsal(answer)
    return ""


def _advice(answer: "Advice") -> str:
    """The smallest limit of each setting that PyTorch has: the recommended and the current one,
    then the best."""
    tried = [
        one for one in answer.tried if one.settings is not None and one.needed_bytes is not None
    ]
    tried.sort(key=lambda one: (not (one.recommended or one.current), one.needed_bytes or 0))
    bars: List[Bar] = []
    for one in sorted(tried[:MOST_BARS], key=lambda one: one.needed_bytes or 0):
        label = (one.settings or "(defaults)") + (" (now)" if one.current else "")
        bars.append((label, one.needed_bytes, MARKED if one.recommended else PLAIN))
    return bar_chart("Smallest limit in which the recording completes", bars, answer.limit_bytes)


def _leaks(answer: "Leaks") -> str:
    colour = BAD if answer.leaks else MARKED
    points = [
        float(one.allocated_bytes) for one in answer.per_step if one.allocated_bytes is not None
    ]
    return line_chart("Allocated at the end of each step", points, colour)


def _inspection(answer: "Inspection") -> str:
    if answer.operations:
        most = sorted(answer.operations, key=lambda one: -one.live_bytes)[:MOST_BARS]
        bars: List[Bar] = [(one.name, one.live_bytes, MARKED) for one in most]
        return bar_chart("Live bytes", bars)
    return line_chart(
        "Live bytes over all events", [float(value) for value in answer.live_over_time], MARKED
    )


def _replay(answer: "Replay") -> str:
    several = len({run.workload for run in answer.runs}) > 1
    bars: List[Bar] = []
    for run in answer.runs[: 3 * MOST_BARS]:
        label = f"{run.workload}: {run.strategy}" if several else run.strategy
        bars.append((label, run.peak_reserved_bytes, BAD if run.ooms else MARKED))
    return bar_chart("Peak reserved (red: ran out of memory)", bars)


def _rehearsal(answer: "Rehearsal") -> str:
    bars: List[Bar] = []
    for one in answer.each:
        label = " ".join(part for part in (one.card, one.variant or "") if part)
        bars.append((label, one.peak_card_bytes, MARKED if one.verdict == "fits" else BAD))
    return bar_chart("Peak on the card, with context (red: does not fit)", bars)


def bar_chart(title: str, bars: Sequence[Bar], limit: Optional[float] = None) -> str:
    """Horizontal bars with their values in a column; `limit` is a vertical line with its value below."""
    known = [value for _, value, _ in bars if value is not None]
    if not known:
        return ""
    most = max([*known, limit or 0, 1])
    room = WIDTH - LABEL - 90
    parts = []
    for number, (label, value, colour) in enumerate(bars):
        y = ROW * (number + 1) + 4
        short = label if len(label) <= MOST_LETTERS else "..." + label[3 - MOST_LETTERS :]
        parts.append(
            f'<text x="{LABEL - 6}" y="{y + 12}" text-anchor="end"><title>{escape(label)}</title>{escape(short)}</text>'
        )
        length = room * (value or 0) / most
        parts.append(
            f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{ROW - 6}" fill="{colour}"/>'
        )
        parts.append(
            f'<text x="{WIDTH}" y="{y + 12}" text-anchor="end">{escape(size(value) or "unknown")}</text>'
        )
    height = ROW * (len(bars) + 1) + 10
    if limit:
        x = LABEL + room * limit / most
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{ROW}" y2="{height}" stroke="{BAD}" stroke-dasharray="4 3"/>'
            f'<text x="{x:.1f}" y="{height + 12}" text-anchor="end" fill="{BAD}">available: {escape(size(limit))}</text>'
        )
        height += ROW
    return _svg(title, height, parts)


def line_chart(title: str, values: Sequence[float], colour: str) -> str:
    """A line from the first value to the last; the vertical axis begins at zero."""
    if len(values) < 2:
        return ""
    most = max([*values, 1.0])
    left, right, top, bottom = 80.0, WIDTH - 10.0, ROW + 6.0, HEIGHT - 8.0
    points = " ".join(
        f"{left + (right - left) * place / (len(values) - 1):.1f},{bottom - (bottom - top) * value / most:.1f}"
        for place, value in enumerate(values)
    )
    parts = [
        f'<text x="{left - 6}" y="{top + 8}" text-anchor="end">{escape(size(most))}</text>',
        f'<text x="{left - 6}" y="{bottom}" text-anchor="end">0</text>',
        f'<line x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}" stroke="currentColor" stroke-opacity="0.4"/>',
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
    ]
    return _svg(title, HEIGHT, parts)


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    # currentColor follows the notebook's light or dark theme.
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}" font-family="sans-serif" font-size="11" fill="currentColor">'
        f'<text x="0" y="13" font-weight="bold">{escape(title)}</text>{"".join(parts)}</svg>'
    )
