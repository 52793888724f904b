"""The planner's answer as text: table, proposed order, timelines, notes."""

import io
import math
import textwrap
from collections.abc import Sequence

from app.errors import printable
from app.plan import ALL_SUBSETS, Plan, Row, Start, gains, ready_s, replay, rows
from app.report_text import bar

WIDTH = 110
LONG_NAME = 12
# What takes less would be shown with 0.00 s.
SHOWN_S = 0.005


def render(plan: Plan) -> str:
    """Return the whole answer for people."""
    order = tuple(gains(plan))
    parts = [
        _order(plan),
        _table(("cache", "warmed", "ready", "expected", "worst", "advised"), _choices(rows(plan), order)),
        "expected, worst: the first request, over all buckets by their shares, and of the slowest bucket; of buckets\n"
        "that are not warmed the answers are not proven either",
        *_timelines(plan.starts, order),
        "\n".join(textwrap.fill(f"note: {printable(note)}", WIDTH, subsequent_indent="  ") for note in plan.notes),
    ]
    return "\n\n".join(part for part in parts if part)


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head in {"cache", "warmed", "advised", "bucket"} else "right")
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))  # names come from files and are no markup
    into = io.StringIO()
    Console(file=into, width=WIDTH).print(table)
    return "\n".join(line.rstrip() for line in into.getvalue().splitlines())


def _choices(found: Sequence[Row], order: Sequence[str]) -> list[tuple[str, ...]]:
    return [
        (
            row.cache,
            _buckets(row.warmed, order),
            f"{row.ready_s:.2f} s",
            f"{row.expected_first_request_s:.3f} s",
            f"{row.worst_first_request_s:.3f} s",
            _advice(row, order),
        )
        for row in found
    ]


def _buckets(names: Sequence[str], order: Sequence[str]) -> str:
    """Return a choice in few words: names, or where these are long their places in the order."""
    if not names:
        return "none"
    if len(names) == len(order):
        return f"all {len(order)}"
    if len(order) > ALL_SUBSETS:
        return f"1 to {len(names)}"
    if max(len(name) for name in order) > LONG_NAME:
        return " + ".join(str(order.index(name) + 1) for name in names)
    return " + ".join(names)


def _advice(row: Row, order: Sequence[str]) -> str:
    if row.beaten_by:
        return f"no: {_buckets(row.beaten_by, order)} is ready no later, no slower"
    return f"no: {row.why_not}" if row.why_not else "yes"


def _order(plan: Plan) -> str:
    """Return the proposed order with what decides it; times are means over the planned starts."""
    lines = []
    for place, (name, gain) in enumerate(gains(plan).items(), 1):
        buckets = [bucket for start in plan.starts for bucket in start.buckets if bucket.name == name]
        times = [
            math.fsum(values) / len(buckets)
            for values in (
                [one.cost_s for one in buckets],
                [one.steady_s for one in buckets],
                [one.steady_s + one.uncovered_extra_s for one in buckets],
            )
        ]
        lines.append((str(place), name, f"{plan.shares[name]:.1%}", *(f"{t:.3f} s" for t in times), f"{gain:.3g}"))
    table = _table(("order", "bucket", "share", "warm-up", "first if warm", "if not", "gain"), lines)
    return (
        "Proposed order of warming, the greatest gain first: what a second of warm-up takes off the expected first\n"
        f"request, (first if not - first if warm) * share / warm-up\n\n{table}"
    )


def _timelines(starts: Sequence[Start], order: Sequence[str]) -> list[str]:
    end = max(ready_s(start, order) for start in starts)
    return [_timeline(start, order, end) for start in starts]


def _timeline(start: Start, order: Sequence[str], end: float) -> str:
    drawn = [one for one in replay(start, order) if one.end_s - one.start_s >= SHOWN_S]
    lines = [bar(f"  {one.name}", one.start_s, one.end_s, end) for one in drawn]
    return "\n".join([f"{start.cache}, all buckets warmed: ready after {ready_s(start, order):.2f} s", *lines])
