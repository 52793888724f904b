"""The start-up graph: edges come from signatures, and all is proven before anything runs."""

from typing import Any

import pytest

from app.errors import SettingsError
from app.graph import Graph, Lane, Skipped, Stage, stage
from app.progress import Progress
from app.settings import Settings
from app.stages import STARTUP
from app.stages.rehearse_requests import Rehearsal
from app.startup import Startup


class Seed: ...


class Left: ...


class Right: ...


class Both: ...


@stage(Lane.DISK)
def make_left(seed: Seed, progress: Progress) -> Left:
    del seed, progress
    return Left()


@stage(Lane.PROCESS)
def make_right(seed: Seed) -> Right:
    del seed
    return Right()


@stage(Lane.DEVICE)
def join_both(left: Left, right: Right, seed: Seed) -> Both:
    del left, right, seed
    return Both()


def made(name: str, gives: Any, *needs: Any) -> Stage:
    return Stage(name, lambda *_: gives(), needs, gives, Lane.DISK)


def test_a_stage_is_named_after_its_function_and_takes_needs_and_promise_from_its_signature() -> None:
    assert (make_left.name, make_left.needs, make_left.gives, make_left.lane) == (
        "make-left",
        (Seed, Progress),
        Left,
        Lane.DISK,
    )


def test_edges_follow_from_types_and_given_values_and_progress_are_no_edges() -> None:
    graph = Graph([join_both, make_left, make_right], given=[Seed])

    assert {one.name: graph.before(one) for one in graph.stages} == {
        "make-left": (),
        "make-right": (),
        "join-both": ("make-left", "make-right"),
    }


def test_stages_stand_in_an_order_in_which_they_could_run_one_after_another() -> None:
    order = [one.name for one in Graph([join_both, make_left, make_right], given=[Seed]).stages]

    assert (sorted(order), order[-1]) == (["join-both", "make-left", "make-right"], "join-both")


@stage(Lane.DISK)
def plain() -> Left:
    return Left()


@stage(Lane.DISK)
def skipped_or_one() -> Left | Skipped[Left]:
    return Left()


@stage(Lane.DISK)
def skipped_or_union() -> Left | Right | Skipped[Left | Right]:
    return Left()


@stage(Lane.DISK)
def skipped_or_nothing() -> Left | Skipped[Left | None] | None:
    return Left()


@pytest.mark.parametrize(
    ("one", "promise"),
    [
        (plain, Left),
        (skipped_or_one, Left),
        (skipped_or_union, Left | Right),
        (skipped_or_nothing, Left | None),
    ],
)
def test_being_skipped_is_no_part_of_the_promise(one: Stage, promise: Any) -> None:
    assert one.gives == promise


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        pytest.param([join_both], f"join-both needs {Left}, which no stage gives", id="a need without giver"),
        pytest.param(
            [made("one", Left), made("two", Left)],
            f"two and another stage both give {Left}; a value has one giver",
            id="two givers",
        ),
        pytest.param(
            [made("one", Seed)], f"one and another stage both give {Seed}; a value has one giver", id="gives a seed"
        ),
        pytest.param([made("a", Left, Left)], "the stages go in a circle: a → a", id="a circle of one"),
    ],
)
def test_a_graph_that_cannot_run_is_refused(stages: list[Stage], text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Graph(stages, given=[Seed])

    assert str(caught.value) == text


def test_a_circle_is_refused_with_every_stage_on_it() -> None:
    with pytest.raises(SettingsError) as caught:
        Graph([made("a", Left, Both), made("b", Right, Left), made("c", Both, Right), made("d", Seed)])

    turns = [" → ".join([*names, names[0]]) for names in ("abc", "bca", "cab", "acb", "cba", "bac")]
    assert str(caught.value) in {f"the stages go in a circle: {turn}" for turn in turns}


@pytest.mark.parametrize(
    ("promises", "names"),
    [
        ((Both,), {"make-left", "make-right", "join-both"}),
        ((Left,), {"make-left"}),
        ((Left, Right), {"make-left", "make-right"}),
        ((Seed,), set()),
    ],
)
def test_until_keeps_only_what_the_promises_need(promises: tuple[Any, ...], names: set[str]) -> None:
    graph = Graph([make_left, make_right, join_both], given=[Seed])

    assert {one.name for one in graph.until(*promises).stages} == names


def test_the_graph_of_this_program_has_these_edges() -> None:
    assert {one.name: set(STARTUP.before(one)) for one in STARTUP.stages} == {
        "open-checkpoint": set(),
        "preflight": {"open-checkpoint"},
        "read-weights": {"open-checkpoint", "preflight"},
        "import-runtime": set(),
        "acquire-device": {"import-runtime"},
        "find-artifact": {"open-checkpoint", "import-runtime", "acquire-device"},
        "build-artifact": {"find-artifact", "acquire-device"},
        "compute-reference": {"find-artifact", "read-weights", "acquire-device"},
        "build-skeleton": {"import-runtime", "build-artifact"},
        "install-weights": {"read-weights", "build-artifact", "build-skeleton"},
        "bind-engine": {"install-weights", "build-artifact"},
        "warm-buckets": {"bind-engine", "read-weights"},
        "prove-answers": {"warm-buckets", "compute-reference", "acquire-device", "read-weights"},
        "load-codec": set(),
        "prove-codec": {"load-codec", "prove-answers", "compute-reference", "read-weights", "acquire-device"},
        "rehearse-requests": {"prove-answers", "prove-codec", "warm-buckets"},
    }


def test_everything_that_uses_the_device_runs_on_the_device_lane() -> None:
    lanes = {one.name: one.lane for one in STARTUP.stages}

    assert {name for name, lane in lanes.items() if lane is Lane.DEVICE} == {
        "import-runtime",
        "acquire-device",
        "build-skeleton",
        "install-weights",
        "bind-engine",
        "warm-buckets",
        "prove-answers",
        "prove-codec",
    }


def test_settings_and_a_way_to_rehearse_are_the_seeds_of_this_program() -> None:
    assert STARTUP.given == {Settings, Rehearsal}


def test_every_stage_waits_before_the_start() -> None:
    startup = Startup(STARTUP, {}, lambda: 0.0)

    assert {view.state for view in startup.snapshot()} == {"waiting"}
