"""The line through memory samples: a leak is seen through noise, and noise alone is no leak."""

import random

import pytest

from benchmarks.trend import memory_row, slope

MIB = 1 << 20


def samples(per_hour_mib: float, noise_mib: float, seed: int = 3) -> list[tuple[float, float]]:
    """Return ten minutes, one sample a second, of a process of 300 MiB."""
    draw = random.Random(seed)
    return [(float(t), (300 + per_hour_mib * t / 3600 + draw.gauss(0, noise_mib)) * MIB) for t in range(600)]


def test_a_straight_line_has_its_slope_and_no_doubt() -> None:
    found, half = slope(samples(36, 0))
    assert found == pytest.approx(36 * MIB / 3600)
    assert half == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_is_seen_through_noise(seed: int) -> None:
    assert not memory_row("soak", samples(60, 1, seed)).holds


@pytest.mark.parametrize("per_hour_mib", [0, -60])
def test_noise_alone_and_falling_memory_are_no_leak(per_hour_mib: float) -> None:
    assert memory_row("soak", samples(per_hour_mib, 1)).holds


def test_what_is_taken_at_first_is_no_leak() -> None:
    settled = [(t, size + (20 * MIB if t > 60 else 0)) for t, size in samples(0, 0.1)]
    assert memory_row("soak", settled).holds


def test_too_few_samples_are_told() -> None:
    with pytest.raises(SystemExit, match="5 samples of memory are too few for a trend: 20 spans are needed"):
        slope(samples(0, 1)[:5])
