"""A bucket is run only where time and memory are left for it, and every refusal has its numbers."""

import math
from collections.abc import Callable

import pytest

from app.buckets import Bucket
from app.budget import Budget, BudgetSpentError, DoesNotFitError
from app.footprint import Footprint, measured
from app.settings import Warmup

MIB = 1 << 20
SMALL, LARGE = Bucket((("batch", 1),)), Bucket((("batch", 8),))


def budget(free: int = 1 << 40, **limits: float) -> Budget:
    return Budget(Warmup.model_validate(limits), math.inf, lambda: free)


def test_a_bucket_after_the_time_is_over_is_refused() -> None:
    late = budget(budget_s=5)
    late.until = 0.0
    with pytest.raises(BudgetSpentError, match=r"warmup.budget_s = 5 was spent before bucket batch=8; raise it"):
        late.allow(LARGE)


def test_what_a_larger_bucket_needs_is_told_from_the_one_before() -> None:
    one = budget(budget_bytes=79 * MIB)
    one.allow(SMALL)
    one.took(SMALL, Footprint(10 * MIB, 0))
    with pytest.raises(
        DoesNotFitError,
        match=f"batch=8 needs about {80 * MIB} bytes, as batch=1 took {10 * MIB}; warmup.budget_bytes = {79 * MIB}",
    ):
        one.allow(LARGE)
    one.allow(SMALL)


def test_what_is_free_counts_as_well() -> None:
    one = budget(free=79 * MIB)
    one.took(SMALL, Footprint(10 * MIB, 0))
    with pytest.raises(DoesNotFitError, match=rf"needs about {80 * MIB} bytes.*, and {79 * MIB} are free; raise the"):
        one.allow(LARGE)


def test_a_bucket_that_took_more_than_it_may_is_told_by_what_it_took() -> None:
    one = budget(budget_bytes=MIB)
    with pytest.raises(DoesNotFitError, match=f"bucket batch=1 took {2 * MIB} bytes, warmup.budget_bytes = {MIB}"):
        one.took(SMALL, Footprint(2 * MIB, 0))


def test_where_the_kernel_tells_nothing_nothing_is_guessed() -> None:
    one = budget(free=1, budget_bytes=1)
    one.took(SMALL, Footprint(None, None))
    one.allow(LARGE)


@pytest.mark.parametrize(("keep", "kept"), [(True, 64), (False, 0)])
def test_the_peak_and_what_is_kept_are_measured(keep: bool, kept: int) -> None:
    def work() -> bytes:
        return b"x" * (64 * MIB)

    held: list[bytes] = []
    run: Callable[[], object] = (lambda: held.append(work())) if keep else work
    with measured() as taken:
        run()
    assert taken.peak_bytes is not None
    assert taken.kept_bytes is not None
    assert 60 * MIB < taken.peak_bytes < 80 * MIB
    assert abs(taken.kept_bytes - kept * MIB) < 8 * MIB
