"""The critical path and what each of its stages could gain: the measured start is replayed without the stage."""

from collections.abc import Sequence

import pytest

from app.critical import critical_path, deciding
from app.graph import Lane
from app.startup import StageView, State

DEVICE = Lane.DEVICE


def view(
    name: str, start: float | None, end: float | None, *needs: str, lane: Lane = Lane.DISK, state: State | None = None
) -> StageView:
    known = State.DONE if end is not None else State.RUNNING if start is not None else State.WAITING
    return StageView(name, state or known, needs, lane, start, end, 0, 0, "", None, "", ())


@pytest.mark.parametrize(
    ("stages", "path"),
    [
        pytest.param([], (), id="no stages"),
        pytest.param([view("a", None, None)], (), id="nothing has run"),
        pytest.param([view("a", 0, None)], (), id="nothing has ended"),
        pytest.param([view("a", 0, 1)], ("a",), id="one stage"),
        pytest.param(
            [view("a", 0, 1), view("b", 0, 3), view("c", 3, 5, "a", "b")], ("b", "c"), id="the later of two needs"
        ),
        pytest.param(
            [view("a", 0, 1), view("b", 1, 2, "a"), view("c", 0, 9)], ("c",), id="a long stage that needs nothing"
        ),
        pytest.param(
            [view("a", 0, 4, lane=DEVICE), view("b", 0, 1), view("c", 4, 6, "b", lane=DEVICE)],
            ("a", "c"),
            id="held up by the device lane",
        ),
        pytest.param(
            [view("a", 0, 4), view("b", 0, 1), view("c", 4, 6, "b")], ("b", "c"), id="other lanes hold nobody up"
        ),
        pytest.param(
            [view("a", 0, 4, lane=DEVICE), view("b", 0, 5), view("c", 5, 6, "b", lane=DEVICE)],
            ("b", "c"),
            id="the lane was free before the need was met",
        ),
        pytest.param([view("a", 0, 2), view("b", 2, 3, "a"), view("c", 3, None, "b")], ("a", "b"), id="still running"),
        pytest.param(
            [view("a", 0, 2), view("b", 2, 3, "a"), view("c", None, None, "b")], ("a", "b"), id="still waiting"
        ),
        pytest.param(
            [view("a", 0, 2), view("b", 2, 2, "a"), view("c", 2, 7, "b")], ("a", "b", "c"), id="a stage of no time"
        ),
    ],
)
def test_the_critical_path_is_the_chain_that_decided_when_the_last_stage_ended(
    stages: list[StageView], path: tuple[str, ...]
) -> None:
    assert critical_path(stages) == path


@pytest.mark.timeout(1)
def test_the_critical_path_ends_though_two_stages_of_one_lane_took_no_measurable_time() -> None:
    stages = [view("a", 5, 5, lane=DEVICE), view("b", 5, 5, "a", lane=DEVICE)]

    assert critical_path(stages)[-1] in {"a", "b"}


def gains(stages: Sequence[StageView]) -> dict[str, tuple[float, float | None]]:
    return {one.stage: (one.seconds, one.at_most_sooner_s) for one in deciding(tuple(stages))}


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        pytest.param([], {}, id="no stages"),
        pytest.param([view("a", 1, 3)], {"a": (2, 2)}, id="the time before the first stage stays"),
        pytest.param(
            [view("a", 0, 2), view("b", 2.5, 4, "a")], {"a": (2, 2), "b": (1.5, 1.5)}, id="a chain with a gap"
        ),
        pytest.param(
            [view("build", 0, 5), view("read", 0, 4.9), view("run", 5, 6, "build", "read")],
            {"build": (5, 0.1), "run": (1, 1)},
            id="a parallel stage takes over at once",
        ),
        pytest.param(
            [view("a", 0, 3), view("b", 0, 3), view("c", 3, 4, "a", "b")],
            {"a": (3, 0), "c": (1, 1)},
            id="two of the same length: neither alone is worth anything",
        ),
        pytest.param(
            [view("a", 0, 5), view("x", 0, 1), view("y", 1, 4, "x"), view("z", 5, 6, "a", "y")],
            {"a": (5, 1), "z": (1, 1)},
            id="a parallel chain takes over",
        ),
        pytest.param(
            [view("a", 0, 4, lane=DEVICE), view("b", 0, 3), view("c", 4, 6, "b", lane=DEVICE)],
            {"a": (4, 1), "c": (2, 2)},
            id="the device lane is free sooner, but the need is not met sooner",
        ),
        pytest.param(
            [view("a", 0, 1, lane=DEVICE), view("b", 1, 4, lane=DEVICE), view("c", 4, 6, "a", lane=DEVICE)],
            {"a": (1, 1), "b": (3, 3), "c": (2, 2)},
            id="the device lane runs one stage at a time",
        ),
        pytest.param(
            [view("a", 0, 3), view("b", 1, 4, lane=DEVICE), view("c", 4, 6, "a", lane=DEVICE), view("d", 0, 7, "x")],
            {"d": (7, 1)},
            id="needs outside the graph are met",
        ),
        pytest.param(
            [view("a", 0, 2), view("b", 2, 2, "a", state=State.SKIPPED), view("c", 2, 7, "b")],
            {"a": (2, 2), "b": (0, 0), "c": (5, 5)},
            id="a skipped stage",
        ),
        pytest.param(
            [view("a", 0, 2), view("b", 2, 3, "a"), view("c", 3, None, "b")],
            {"a": (2, None), "b": (1, None)},
            id="still running: ready has not come",
        ),
        pytest.param(
            [view("a", 0, 2), view("b", 2, 3, "a", state=State.FAILED), view("c", None, 3, "b", state=State.STOPPED)],
            {"a": (2, None), "b": (1, None)},
            id="failed: ready never came",
        ),
    ],
)
def test_a_stage_could_gain_what_the_replay_without_it_ends_sooner(
    stages: list[StageView], expected: dict[str, tuple[float, float | None]]
) -> None:
    assert gains(stages) == expected


def test_what_waited_behind_a_stage_on_the_device_lane_still_waits_for_its_own_needs() -> None:
    stages = [
        view("long-need", 0, 1),
        view("a", 0, 2),
        view("long", 1, 11, "long-need", lane=DEVICE),
        view("short", 11, 12, "a", lane=DEVICE),
        view("after", 12, 20, "short"),
    ]

    assert gains(stages) == {"long-need": (1, 1), "long": (10, 9), "short": (1, 1), "after": (8, 8)}


def test_a_start_is_replayed_as_it_was_though_two_stages_came_to_the_lane_at_once() -> None:
    stages = [
        view("need", 0, 1),
        view("second", 3, 4, "need", lane=DEVICE),
        view("first", 1, 3, "need", lane=DEVICE),
        view("end", 4, 5, "second"),
    ]

    assert gains(stages) == {"need": (1, 1), "first": (2, 2), "second": (1, 1), "end": (1, 1)}
