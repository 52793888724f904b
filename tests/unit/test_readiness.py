"""Readiness holds only while every check says so; the drain begins once."""

import pytest

from app.readiness import Check, Drain, Readiness, Result, Verdict


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def readiness(**reasons: str | None) -> Readiness:
    return Readiness(*(Check(name, lambda reason=reason: reason) for name, reason in reasons.items()))


@pytest.mark.parametrize(
    ("reasons", "exclude", "holds", "against"),
    [
        ({"a": None}, (), True, {}),
        ({"a": "cold"}, (), False, {"a": "cold"}),
        ({"a": None, "b": "cold"}, (), False, {"b": "cold"}),
        ({"a": "slow", "b": "cold"}, (), False, {"a": "slow", "b": "cold"}),
        ({"a": "slow", "b": None}, ("a",), True, {}),
        ({"a": "slow", "b": "cold"}, ("a",), False, {"b": "cold"}),
        ({"a": "slow", "b": "cold"}, ("a", "b"), True, {}),
        ({"a": ""}, (), False, {"a": ""}),
    ],
)
def test_readiness_holds_when_every_check_that_counts_holds(
    reasons: dict[str, str | None], exclude: tuple[str, ...], holds: bool, against: dict[str, str]
) -> None:
    verdict = readiness(**reasons).verdict(exclude)

    assert (verdict.holds, verdict.reasons) == (holds, against)


@pytest.mark.parametrize(
    ("exclude", "unmatched"),
    [((), ()), (("a",), ()), (("z", "a", "c", "z"), ("c", "z"))],
)
def test_names_that_no_check_has_are_told_once_each_in_order(
    exclude: tuple[str, ...], unmatched: tuple[str, ...]
) -> None:
    assert readiness(a=None, b=None).verdict(exclude).unmatched == unmatched


def test_a_verdict_keeps_the_order_of_the_checks_and_what_each_said() -> None:
    checks = [Check("b", lambda: "cold", lambda: 0.25), Check("a", lambda: None)]

    assert Readiness(*checks).verdict(["a"]) == Verdict(
        (Result("b", "cold", 0.25, excluded=False), Result("a", None, None, excluded=True)), ()
    )


def test_every_check_is_asked_once_at_the_time_of_the_verdict() -> None:
    answers = iter(["first", "second"])
    asked = Readiness(Check("a", lambda: next(answers)))

    assert [asked.verdict().reasons for _ in range(2)] == [{"a": "first"}, {"a": "second"}]


def test_readiness_without_checks_is_impossible() -> None:
    with pytest.raises(ValueError, match=r"^readiness needs at least one check: with none it would hold vacuously$"):
        Readiness()


def test_a_drain_that_has_not_begun_is_no_reason() -> None:
    drain = Drain(Clock())

    assert (drain.begun, drain.began_s, drain.why_not()) == (False, None, None)


def test_a_drain_begins_once_and_keeps_the_moment() -> None:
    clock = Clock()
    drain = Drain(clock)

    first = drain.begin()
    clock.now = 107.26
    second = drain.begin()

    assert (first, second, drain.begun, drain.began_s) == (True, False, True, 100.0)
    assert drain.why_not() == "draining for 7.3 s"
