"""A start-up runs every stage as soon as it can; the first failure stops the rest."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from app.errors import (
    ArtifactError,
    CheckpointError,
    DeviceLostError,
    PluginError,
    ResourceError,
    SettingsError,
    StallError,
    WarmgateError,
    WarmupError,
)
from app.graph import Graph, Lane, Skipped, Stage
from app.lanes import run_on_thread
from app.progress import Progress, Stopped
from app.startup import MOVES, StageView, Startup, State

Act = Callable[[Progress], Any]


class First: ...


class Second: ...


class Third: ...


class Beside: ...


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def inline(work: Callable[[], Any], name: str) -> Any:
    del name
    return work()


INLINE = dict.fromkeys(Lane, inline)
THREADS = dict.fromkeys(Lane, run_on_thread)


def acting(name: str, act: Act, gives: Any, *needs: Any) -> Stage:
    return Stage(name, lambda progress, *_: act(progress), (Progress, *needs), gives, Lane.DISK)


def chain(first: Act, second: Act, third: Act) -> Graph:
    return Graph(
        [
            acting("first", first, First),
            acting("second", second, Second, First),
            acting("third", third, Third, First, Second),
        ]
    )


def single(act: Act) -> Graph:
    return Graph([acting("first", act, First)])


def works(progress: Progress) -> object:
    del progress
    return object()


def skips(progress: Progress) -> Skipped[object]:
    del progress
    return Skipped(object(), "nothing to do")


def fails(progress: Progress) -> object:
    progress.expect(4, "bytes")
    progress.advance(3)
    raise ResourceError("no memory; add some", ["first place", "second place"])


def breaks(progress: Progress) -> object:
    del progress
    raise ValueError("odd\nsecond line")


def stops(progress: Progress) -> object:
    progress.stop()
    progress.advance()
    return object()


def states(startup: Startup) -> dict[str, str]:
    return {view.name: str(view.state) for view in startup.snapshot()}


def ended(*states_in_order: str) -> dict[str, str]:
    return dict(zip(("first", "second", "third"), states_in_order, strict=True))


@pytest.mark.parametrize(
    ("acts", "expected"),
    [
        ((works, works, works), ended("done", "done", "done")),
        ((skips, works, works), ended("skipped", "done", "done")),
        ((works, skips, works), ended("done", "skipped", "done")),
        ((skips, skips, skips), ended("skipped", "skipped", "skipped")),
    ],
)
def test_a_start_up_without_failure_finishes_every_stage(acts: tuple[Act, Act, Act], expected: dict[str, str]) -> None:
    startup = Startup(chain(*acts), INLINE, Clock())

    asyncio.run(startup.run())

    assert (states(startup), startup.error, startup.finished, startup.missing()) == (expected, None, True, ())


@pytest.mark.parametrize(
    ("acts", "expected"),
    [
        ((fails, works, works), ended("failed", "stopped", "stopped")),
        ((works, fails, works), ended("done", "failed", "stopped")),
        ((works, works, fails), ended("done", "done", "failed")),
        ((breaks, works, works), ended("failed", "stopped", "stopped")),
        ((works, breaks, works), ended("done", "failed", "stopped")),
        ((skips, works, breaks), ended("skipped", "done", "failed")),
        ((works, skips, fails), ended("done", "skipped", "failed")),
    ],
)
def test_the_first_stage_that_fails_ends_the_start_up(acts: tuple[Act, Act, Act], expected: dict[str, str]) -> None:
    startup = Startup(chain(*acts), INLINE, Clock())

    with pytest.raises(WarmgateError) as caught:
        asyncio.run(startup.run())

    assert (states(startup), startup.finished) == (expected, False)
    assert startup.error is caught.value


@pytest.mark.parametrize(
    ("acts", "expected"),
    [
        ((stops, works, works), ended("stopped", "stopped", "stopped")),
        ((works, stops, works), ended("done", "stopped", "stopped")),
        ((works, works, stops), ended("done", "done", "stopped")),
    ],
)
def test_being_stopped_is_nobodys_error(acts: tuple[Act, Act, Act], expected: dict[str, str]) -> None:
    startup = Startup(chain(*acts), INLINE, Clock())

    with pytest.raises(Stopped):
        asyncio.run(startup.run())

    assert (states(startup), startup.finished, startup.error) == (expected, False, None)


@pytest.mark.parametrize(
    ("acts", "reasons"),
    [
        ((works, fails, works), [None, "failed 3 of 4 bytes: no memory; add some", "stopped"]),
        ((breaks, works, works), ["failed: odd", "stopped", "stopped"]),
        ((skips, works, stops), [None, None, "stopped"]),
    ],
)
def test_each_stage_says_in_one_line_why_it_keeps_the_process_from_being_ready(
    acts: tuple[Act, Act, Act], reasons: list[str | None]
) -> None:
    startup = Startup(chain(*acts), INLINE, Clock())

    with pytest.raises((WarmgateError, Stopped)):
        asyncio.run(startup.run())

    assert [view.reason for view in startup.snapshot()] == reasons


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (WarmgateError, 1),
        (SettingsError, 2),
        (PluginError, 2),
        (CheckpointError, 3),
        (ResourceError, 4),
        (ArtifactError, 5),
        (WarmupError, 6),
        (StallError, 7),
        (DeviceLostError, 8),
    ],
)
def test_an_error_of_ours_is_raised_as_it_is_with_its_exit_code(kind: type[WarmgateError], code: int) -> None:
    error = kind("the thing is so; do this")

    def act(progress: Progress) -> object:
        del progress
        raise error

    startup = Startup(single(act), INLINE, Clock())

    with pytest.raises(kind) as caught:
        asyncio.run(startup.run())

    assert caught.value is error
    assert caught.value.exit_code == code


def test_a_foreign_exception_becomes_an_error_that_names_the_stage_and_keeps_the_cause() -> None:
    startup = Startup(single(breaks), INLINE, Clock())

    with pytest.raises(WarmgateError) as caught:
        asyncio.run(startup.run())

    assert str(caught.value) == "first failed: ValueError: odd\nsecond line; the traceback is in the log"
    assert caught.value.exit_code == 1
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_stage_that_tries_to_leave_the_process_fails_like_any_other() -> None:
    def leaves(progress: Progress) -> object:
        del progress
        raise SystemExit(0)

    startup = Startup(chain(works, leaves, works), INLINE, Clock())

    with pytest.raises(WarmgateError) as caught:
        asyncio.run(startup.run())

    assert str(caught.value) == "second failed: SystemExit: 0; the traceback is in the log"
    assert states(startup) == ended("done", "failed", "stopped")


def test_stages_get_the_values_that_they_need_in_the_order_of_their_signature() -> None:
    seen: list[tuple[Any, ...]] = []

    def last(*given: Any) -> Third:
        seen.append(given)
        return Third()

    seed, second = First(), Second()
    graph = Graph(
        [
            Stage("second", lambda _: Skipped(second, "made before"), (First,), Second, Lane.DISK),
            Stage("third", last, (Second, First), Third, Lane.DEVICE),
        ],
        given=[First],
    )
    startup = Startup(graph, INLINE, Clock())

    asyncio.run(startup.run(seed))

    assert seen == [(second, seed)]
    assert (startup.values[First], startup.values[Second]) == (seed, second)


@dataclass
class Meeting:
    """Holds one stage on its thread until the test lets it go."""

    arrived: threading.Event
    released: threading.Event
    left: threading.Event

    def act(self, progress: Progress) -> object:
        self.arrived.set()
        self.released.wait()
        self.left.set()
        progress.check()
        return object()


@pytest.fixture
def meeting() -> Iterable[Meeting]:
    made = Meeting(threading.Event(), threading.Event(), threading.Event())
    yield made
    made.released.set()


def test_a_failure_stops_the_stage_that_runs_beside_it_and_its_late_end_changes_nothing(meeting: Meeting) -> None:
    def fails_meanwhile(progress: Progress) -> object:
        meeting.arrived.wait()
        return fails(progress)

    graph = Graph([acting("beside", meeting.act, Beside), acting("second", fails_meanwhile, Second)])
    startup = Startup(graph, THREADS, Clock())

    with pytest.raises(ResourceError):
        asyncio.run(startup.run())
    before = states(startup)
    meeting.released.set()
    meeting.left.wait()

    assert (before, states(startup)) == ({"beside": "stopped", "second": "failed"},) * 2


def test_a_failure_from_outside_stops_the_running_stage_and_is_what_the_start_up_raises(meeting: Meeting) -> None:
    startup = Startup(chain(works, meeting.act, works), THREADS, Clock())
    error = StallError("stage second made no progress")

    async def scenario() -> None:
        running = asyncio.create_task(startup.run())
        await asyncio.to_thread(meeting.arrived.wait)
        startup.fail(error)
        meeting.released.set()
        await running

    with pytest.raises(StallError) as caught:
        asyncio.run(scenario())

    assert caught.value is error
    assert states(startup) == ended("done", "stopped", "stopped")


def test_the_first_error_is_kept_when_another_comes_from_outside() -> None:
    startup = Startup(single(fails), INLINE, Clock())
    with pytest.raises(ResourceError) as caught:
        asyncio.run(startup.run())

    startup.fail(StallError("later"))

    assert startup.error is caught.value


def test_a_cancelled_start_up_stops_its_stages_and_has_no_error(meeting: Meeting) -> None:
    startup = Startup(chain(works, meeting.act, works), THREADS, Clock())

    async def scenario() -> None:
        running = asyncio.create_task(startup.run())
        await asyncio.to_thread(meeting.arrived.wait)
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scenario())

    assert (states(startup), startup.error) == (ended("done", "stopped", "stopped"), None)


def test_a_start_up_that_was_stopped_before_it_began_runs_no_stage() -> None:
    ran: list[str] = []
    startup = Startup(chain(*[lambda _: ran.append("ran")] * 3), INLINE, Clock())
    startup.stop()

    with pytest.raises(Stopped):
        asyncio.run(startup.run())

    assert (ran, states(startup)) == ([], ended("stopped", "stopped", "stopped"))


def test_stopping_a_finished_start_up_changes_nothing() -> None:
    startup = Startup(chain(works, skips, works), INLINE, Clock())
    asyncio.run(startup.run())

    startup.stop()

    assert (states(startup), startup.finished, startup.error) == (ended("done", "skipped", "done"), True, None)


ALLOWED = {
    (State.WAITING, State.RUNNING),
    (State.WAITING, State.STOPPED),
    (State.RUNNING, State.DONE),
    (State.RUNNING, State.FAILED),
    (State.RUNNING, State.SKIPPED),
    (State.RUNNING, State.STOPPED),
}


def test_the_table_of_moves_allows_exactly_these() -> None:
    assert {(before, to) for before, after in MOVES.items() for to in after} == ALLOWED


@pytest.mark.parametrize(("before", "to"), list(product(State, State)))
def test_a_stage_moves_only_as_the_table_allows_and_only_a_move_is_told(before: State, to: State) -> None:
    told: list[StageView] = []
    startup = Startup(single(works), INLINE, Clock(), told.append)
    record = startup._records["first"]
    record.state = before

    startup._move(record, to)

    moved = (before, to) in ALLOWED
    assert record.state is (to if moved else before)
    assert [view.state for view in told] == ([to] if moved else [])


def test_the_listener_is_told_each_move_with_its_time() -> None:
    told: list[tuple[str, str, float | None, float | None]] = []
    clock = Clock()

    def slow(progress: Progress) -> object:
        del progress
        clock.now += 2.0
        return object()

    def listen(view: StageView) -> None:
        told.append((view.name, str(view.state), view.start_s, view.end_s))

    asyncio.run(Startup(chain(slow, skips, slow), INLINE, clock, listen).run())

    assert told == [
        ("first", "running", 0.0, None),
        ("first", "done", 0.0, 2.0),
        ("second", "running", 2.0, None),
        ("second", "skipped", 2.0, 2.0),
        ("third", "running", 2.0, None),
        ("third", "done", 2.0, 4.0),
    ]


def test_the_end_of_start_up_is_the_clock_after_the_last_stage() -> None:
    clock = Clock()

    def slow(progress: Progress) -> object:
        del progress
        clock.now += 1.5
        return object()

    startup = Startup(chain(slow, slow, slow), INLINE, clock)
    asyncio.run(startup.run())

    assert startup.finished_s == 4.5


def test_missing_names_the_stages_that_have_not_finished() -> None:
    seen: list[list[str]] = []
    made: list[Startup] = []

    def looks(progress: Progress) -> object:
        del progress
        seen.append([view.name for view in made[0].missing()])
        return object()

    made.append(Startup(chain(looks, looks, looks), INLINE, Clock()))
    asyncio.run(made[0].run())

    assert seen == [["first", "second", "third"], ["second", "third"], ["third"]]


@pytest.mark.parametrize(
    ("total", "done", "ratio"),
    [(0, 0, None), (0, 5, None), (4, 0, 0.0), (4, 1, 0.25), (4, 4, 1.0), (4, 9, 1.0)],
)
def test_the_ratio_of_a_running_stage_is_its_share_or_unknown(total: int, done: int, ratio: float | None) -> None:
    seen: list[float | None] = []
    made: list[Startup] = []

    def looks(progress: Progress) -> object:
        progress.expect(total, "bytes")
        progress.advance(done)
        seen.append(made[0].view("first").ratio)
        return object()

    made.append(Startup(single(looks), INLINE, Clock()))
    asyncio.run(made[0].run())

    assert (seen, made[0].view("first").ratio) == ([ratio], 1.0)


@pytest.mark.parametrize(
    ("state", "amount", "detail", "reason"),
    [
        (State.WAITING, (0, 0, ""), "", "waiting"),
        (State.RUNNING, (0, 0, ""), "", "running"),
        (State.RUNNING, (3, 9, "bytes"), "", "running 3 of 9 bytes"),
        (State.RUNNING, (0, 0, ""), "on shard 2", "running: on shard 2"),
        (State.RUNNING, (3, 9, "bytes"), "on shard 2", "running 3 of 9 bytes: on shard 2"),
        (State.FAILED, (0, 0, ""), "no memory", "failed: no memory"),
        (State.STOPPED, (0, 0, ""), "", "stopped"),
        (State.DONE, (9, 9, "bytes"), "read", None),
        (State.SKIPPED, (0, 0, ""), "nothing to do", None),
    ],
)
def test_the_reason_holds_state_amount_and_detail(
    state: State, amount: tuple[int, int, str], detail: str, reason: str | None
) -> None:
    view = StageView("x", state, (), Lane.DISK, None, None, *amount, None, detail, ())

    assert view.reason == reason


LIMIT_S = 10.0


def watch(live: Callable[[Progress, int], None]) -> list[str | None]:
    """Look for a stall at 0, 9, 18 and 27 seconds; `live` is called before each look but the first."""
    clock, told, made = Clock(), [], []

    def act(progress: Progress) -> object:
        for turn in range(4):
            clock.now = turn * 9.0
            if turn:
                live(progress, turn)
            found = made[0].find_stall(LIMIT_S)
            told.append(found and str(found))
        return object()

    made.append(Startup(single(act), INLINE, clock))
    asyncio.run(made[0].run())
    return told


SIGNS: dict[str, Callable[[Progress, int], None]] = {
    "units finished": lambda progress, _: progress.advance(),
    "another detail": lambda progress, turn: progress.say(f"step {turn}"),
    "other rows": lambda progress, turn: progress.show([turn]),
    "observed from outside": lambda progress, turn: progress.observe(lambda: turn),
}


@pytest.mark.parametrize("live", SIGNS.values(), ids=SIGNS)
def test_every_sign_of_life_starts_the_limit_anew(live: Callable[[Progress, int], None]) -> None:
    assert watch(live) == [None, None, None, None]


def test_a_stage_without_a_sign_of_life_for_the_limit_is_a_stall_that_names_it() -> None:
    def silent(progress: Progress, turn: int) -> None:
        del progress, turn

    def text(seconds: int) -> str:
        return (
            f"stage first made no progress for {seconds} s (running); the stacks in the log show where it hangs, "
            f"startup.stall_timeout_s sets the limit"
        )

    assert watch(silent) == [None, None, text(18), text(27)]


def test_a_stage_that_goes_silent_is_measured_from_its_last_sign_of_life() -> None:
    def lives_once(progress: Progress, turn: int) -> None:
        if turn == 1:
            progress.expect(5, "shards")
            progress.advance()
            progress.say("reading b")

    assert watch(lives_once) == [
        None,
        None,
        None,
        "stage first made no progress for 18 s (running 1 of 5 shards: reading b); the stacks in the log show where "
        "it hangs, startup.stall_timeout_s sets the limit",
    ]


def test_saying_the_same_again_is_no_sign_of_life() -> None:
    told = watch(lambda progress, _: progress.say("still at it"))

    assert [text is not None for text in told] == [False, False, False, True]


def test_a_stall_leaves_with_exit_code_seven() -> None:
    clock = Clock()
    found: list[StallError | None] = []
    made: list[Startup] = []

    def act(progress: Progress) -> object:
        del progress
        for clock.now in (0.0, LIMIT_S):
            found.append(made[0].find_stall(LIMIT_S))
        return object()

    made.append(Startup(single(act), INLINE, clock))
    asyncio.run(made[0].run())

    assert [error and error.exit_code for error in found] == [None, 7]


@pytest.mark.parametrize("after_run", [False, True])
def test_a_stage_that_does_not_run_never_stalls(after_run: bool) -> None:
    clock = Clock()
    startup = Startup(single(works), INLINE, clock)
    if after_run:
        asyncio.run(startup.run())
    clock.now = 1e6

    assert (startup.find_stall(LIMIT_S), startup.find_stall(LIMIT_S)) == (None, None)


def test_advancing_a_stopped_stage_raises_but_counts() -> None:
    progress = Progress()
    progress.stop()

    with pytest.raises(Stopped):
        progress.advance(3)

    assert progress.done == 3
