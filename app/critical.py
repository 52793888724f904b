"""Which stages decided when a start was ready, and how much sooner a faster one would have made it: a replay."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.graph import Lane
from app.startup import FINISHED, StageView


@dataclass(frozen=True, slots=True)
class Deciding:
    """A stage on the critical path; times in seconds.

    `at_most_sooner_s`: how much sooner ready would have come had the stage taken no time, which is less than
    `seconds` where another chain takes over; None as long as ready has not come.
    """

    stage: str
    seconds: float
    at_most_sooner_s: float | None


def critical_path(stages: Sequence[StageView]) -> tuple[str, ...]:
    """Return the chain of stages that decided when the last one ended.

    A stage was held up by whichever ended last: one that it needs, or the one before it on a lane that runs a single
    stage at a time.
    """
    return tuple(one.name for one in _path(stages))


# Once ready, the stages stay as they are, and every scrape asks anew.
@functools.lru_cache(maxsize=1)
def deciding(stages: tuple[StageView, ...]) -> tuple[Deciding, ...]:
    """Return the critical path with what each of its stages took, and what it could gain at most."""
    ready = all(one.state in FINISHED for one in stages)
    gaps = _gaps(stages) if ready else {}
    whole_s = _replay(stages, gaps, without="") if ready else 0.0
    return tuple(
        Deciding(
            one.name,
            round(_seconds(one), 4),
            round(max(0.0, whole_s - _replay(stages, gaps, without=one.name)), 4) if ready else None,
        )
        for one in _path(stages)
    )


def _path(stages: Sequence[StageView]) -> list[StageView]:
    ended = {one.name: one for one in stages if one.end_s is not None and one.start_s is not None}
    if not ended:
        return []
    path = [max(ended.values(), key=_end)]
    while held := _held_by(path[-1], {name: one for name, one in ended.items() if one not in path}):
        path.append(held)
    return path[::-1]


def _held_by(one: StageView, ended: Mapping[str, StageView]) -> StageView | None:
    earlier = [e for e in ended.values() if _end(e) <= _start(one) and e.name != one.name]
    held = [e for e in earlier if e.name in one.needs or (e.lane == one.lane == Lane.DEVICE)]
    return max(held, key=_end, default=None)


def _gaps(stages: Sequence[StageView]) -> dict[str, float]:
    """Return how long each stage waited though nothing held it up: for a thread, or for the program to begin."""
    ends = {one.name: _end(one) for one in stages}
    gaps, lane_free = {}, 0.0
    for one in sorted(stages, key=_start):
        free = lane_free if one.lane == Lane.DEVICE else 0.0
        gaps[one.name] = max(0.0, _start(one) - max(free, _met(one, ends)))
        if one.lane == Lane.DEVICE:
            lane_free = _end(one)
    return gaps


def _replay(stages: Sequence[StageView], gaps: Mapping[str, float], without: str) -> float:
    """Return when the last stage ends if one of them takes no time; the device lane runs what comes first."""
    names = {one.name for one in stages}
    waiting = sorted(stages, key=_start)
    ends: dict[str, float] = {}
    lane_free = 0.0
    while waiting:
        able = [one for one in waiting if all(need in ends for need in one.needs if need in names)]
        one = min(able, key=lambda view: _met(view, ends))
        waiting.remove(one)
        start = max(_met(one, ends), lane_free if one.lane == Lane.DEVICE else 0.0) + gaps[one.name]
        ends[one.name] = start + (0.0 if one.name == without else _seconds(one))
        if one.lane == Lane.DEVICE:
            lane_free = ends[one.name]
    return max(ends.values(), default=0.0)


def _met(one: StageView, ends: Mapping[str, float]) -> float:
    """Return when the last need of a stage was met."""
    return max((ends[need] for need in one.needs if need in ends), default=0.0)


def _start(one: StageView) -> float:
    return one.start_s or 0.0


def _end(one: StageView) -> float:
    return one.end_s or 0.0


def _seconds(one: StageView) -> float:
    return _end(one) - _start(one)
