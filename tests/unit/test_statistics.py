"""Counts for load tools: each request once, its items, and where its time went."""

import pytest

from app.http.infer import Spent
from app.http.statistics import Statistics

SPENT = Spent(decode_s=0.001, encode_s=0.002, queue_s=0.003, compute_s=0.004, items=5)


def test_what_has_ended_is_counted_by_part_and_in_nanoseconds() -> None:
    statistics = Statistics(lambda: 2)
    for _ in range(3):
        statistics.note(200, 0.011, SPENT)
    statistics.note(400, 0.5, None)

    (row,) = statistics.document("m", "1")["model_stats"]

    assert (row["name"], row["version"], row["inference_count"], row["execution_count"]) == ("m", "1", 15, 2)
    assert row["inference_stats"] == {
        "success": {"count": 3, "ns": 33_000_000},
        "fail": {"count": 1, "ns": 500_000_000},
        "queue": {"count": 3, "ns": 9_000_000},
        "compute_input": {"count": 3, "ns": 3_000_000},
        "compute_infer": {"count": 3, "ns": 12_000_000},
        "compute_output": {"count": 3, "ns": 6_000_000},
        "cache_hit": {"count": 0, "ns": 0},
        "cache_miss": {"count": 0, "ns": 0},
    }
    assert row["last_inference"] > 1_700_000_000_000


@pytest.mark.parametrize("status", [400, 503, 504])
def test_a_server_that_has_answered_nothing_has_no_last_inference(status: int) -> None:
    statistics = Statistics(lambda: 0)
    statistics.note(status, 0.1, None)

    (row,) = statistics.document("m", "1")["model_stats"]

    assert (row["last_inference"], row["inference_count"], row["inference_stats"]["fail"]["count"]) == (0, 0, 1)
