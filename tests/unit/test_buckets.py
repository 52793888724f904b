"""Which shapes are promised, and what happens to the others: arithmetic on sizes."""

import pytest

from app.buckets import Bucket, Coverage, Dimension, Kind, Refusal, Route, cross

BATCH = Dimension("batch", 1, 8, (1, 4))
SEQUENCE = Dimension("sequence", 2, 64, (16, 32))


def bucket(batch: int, sequence: int) -> Bucket:
    return Bucket((("batch", batch), ("sequence", sequence)))


def coverage(dynamic: bool, policy: str) -> Coverage:
    dimensions = (BATCH, SEQUENCE)
    return Coverage(dimensions, cross(dimensions), dynamic, policy)


@pytest.mark.parametrize(
    ("dimensions", "names"),
    [
        ((BATCH,), ["batch=1", "batch=4"]),
        ((Dimension("batch", 1, 8, (4, 1)),), ["batch=1", "batch=4"]),
        (
            (BATCH, SEQUENCE),
            ["batch=1,sequence=16", "batch=1,sequence=32", "batch=4,sequence=16", "batch=4,sequence=32"],
        ),
        (
            (Dimension("batch", 1, 8, (1, 8)), Dimension("sequence", 1, 4, (2, 3))),
            ["batch=1,sequence=2", "batch=1,sequence=3", "batch=8,sequence=2", "batch=8,sequence=3"],
        ),
        (
            (Dimension("batch", 1, 2, (1, 2)), Dimension("sequence", 1, 64, (1, 64))),
            ["batch=1,sequence=1", "batch=2,sequence=1", "batch=1,sequence=64", "batch=2,sequence=64"],
        ),
        ((), ["fixed"]),
    ],
)
def test_the_cross_product_comes_smallest_first(dimensions: tuple[Dimension, ...], names: list[str]) -> None:
    assert [one.name for one in cross(dimensions)] == names


@pytest.mark.parametrize("policy", ["pad", "reject", "eager"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_bucket_of_just_this_shape_is_taken_whatever_the_policy(dynamic: bool, policy: str) -> None:
    found = coverage(dynamic, policy).route({"batch": 4, "sequence": 16})

    assert found == Route(Kind.EXACT, bucket(4, 16), (("batch", 4), ("sequence", 16)), 0.0)


def test_the_order_in_which_sizes_are_given_does_not_matter() -> None:
    found = coverage(True, "pad").route({"sequence": 16, "batch": 4})

    assert found == Route(Kind.EXACT, bucket(4, 16), (("batch", 4), ("sequence", 16)), 0.0)


BETWEEN = {"batch": 2, "sequence": 24}
BEYOND = {"batch": 2, "sequence": 40}
BETWEEN_TEXT = "shape batch=2,sequence=24 is not covered; nearest covered: batch=1,sequence=32 or batch=4,sequence=32"
BEYOND_TEXT = "shape batch=2,sequence=40 is not covered; nearest covered: batch=1,sequence=32 or batch=4,sequence=32"


@pytest.mark.parametrize(
    ("dynamic", "policy", "sizes", "expected"),
    [
        (True, "pad", BETWEEN, Route(Kind.DYNAMIC, bucket(4, 32), (("batch", 2), ("sequence", 24)))),
        (True, "reject", BETWEEN, Route(Kind.DYNAMIC, bucket(4, 32), (("batch", 2), ("sequence", 24)))),
        (True, "eager", BETWEEN, Route(Kind.DYNAMIC, bucket(4, 32), (("batch", 2), ("sequence", 24)))),
        (False, "pad", BETWEEN, Route(Kind.PADDED, bucket(4, 32), (("batch", 4), ("sequence", 32)), 0.625)),
        (False, "reject", BETWEEN, Refusal(BETWEEN_TEXT, impossible=False)),
        (False, "eager", BETWEEN, Route(Kind.UNCOVERED, None, (("batch", 2), ("sequence", 24)))),
        (True, "pad", BEYOND, Route(Kind.UNCOVERED, None, (("batch", 2), ("sequence", 40)))),
        (True, "eager", BEYOND, Route(Kind.UNCOVERED, None, (("batch", 2), ("sequence", 40)))),
        (True, "reject", BEYOND, Refusal(BEYOND_TEXT, impossible=False)),
        (False, "pad", BEYOND, Refusal(BEYOND_TEXT, impossible=False)),
        (False, "reject", BEYOND, Refusal(BEYOND_TEXT, impossible=False)),
        (False, "eager", BEYOND, Route(Kind.UNCOVERED, None, (("batch", 2), ("sequence", 40)))),
    ],
)
def test_a_shape_between_or_beyond_the_buckets_is_served_by_engine_and_policy(
    dynamic: bool, policy: str, sizes: dict[str, int], expected: Route | Refusal
) -> None:
    assert coverage(dynamic, policy).route(sizes) == expected


@pytest.mark.parametrize(
    ("sizes", "taken", "padding"),
    [
        ({"batch": 1, "sequence": 15}, bucket(1, 16), 1 / 16),
        ({"batch": 1, "sequence": 17}, bucket(1, 32), 15 / 32),
        ({"batch": 2, "sequence": 16}, bucket(4, 16), 0.5),
        ({"batch": 3, "sequence": 31}, bucket(4, 32), 1 - 93 / 128),
        ({"batch": 1, "sequence": 2}, bucket(1, 16), 0.875),
    ],
)
def test_padding_goes_to_the_smallest_bucket_that_holds_the_shape(
    sizes: dict[str, int], taken: Bucket, padding: float
) -> None:
    assert coverage(False, "pad").route(sizes) == Route(Kind.PADDED, taken, taken.sizes, padding)


@pytest.mark.parametrize("policy", ["pad", "reject", "eager"])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"batch": 0, "sequence": 16}, "batch is 0, allowed are 1 to 8"),
        ({"batch": 9, "sequence": 16}, "batch is 9, allowed are 1 to 8"),
        ({"batch": 1, "sequence": 1}, "sequence is 1, allowed are 2 to 64"),
        ({"batch": 9, "sequence": 65}, "batch is 9, allowed are 1 to 8; sequence is 65, allowed are 2 to 64"),
    ],
)
def test_a_shape_outside_the_declared_range_is_impossible_whatever_the_policy(
    dynamic: bool, policy: str, sizes: dict[str, int], why: str
) -> None:
    assert coverage(dynamic, policy).route(sizes) == Refusal(why, impossible=True)


def test_the_ends_of_the_declared_range_belong_to_it() -> None:
    everything = coverage(True, "pad")

    assert [everything.route({"batch": batch, "sequence": sequence}) for batch, sequence in ((1, 2), (8, 64))] == [
        Route(Kind.DYNAMIC, bucket(1, 16), (("batch", 1), ("sequence", 2))),
        Route(Kind.UNCOVERED, None, (("batch", 8), ("sequence", 64))),
    ]


def test_a_model_without_symbolic_dimensions_has_one_bucket_that_is_always_exact() -> None:
    fixed = Coverage((), cross(()), dynamic=False, policy="reject")

    assert fixed.route({}) == Route(Kind.EXACT, Bucket(()), ())


EXACT_ROWS = [
    {"shapes": name, "served": "exact", "by": name}
    for name in ("batch=1,sequence=16", "batch=1,sequence=32", "batch=4,sequence=16", "batch=4,sequence=32")
]


@pytest.mark.parametrize(
    ("dynamic", "policy", "between", "beyond"),
    [
        (True, "pad", "dynamic", "uncovered"),
        (True, "eager", "dynamic", "uncovered"),
        (True, "reject", "dynamic", "rejected"),
        (False, "pad", "padded", "rejected"),
        (False, "eager", "uncovered", "uncovered"),
        (False, "reject", "rejected", "rejected"),
    ],
)
def test_the_rows_say_how_every_shape_is_served(dynamic: bool, policy: str, between: str, beyond: str) -> None:
    assert coverage(dynamic, policy).rows() == [
        *EXACT_ROWS,
        {
            "shapes": "within batch=4,sequence=32",
            "served": between,
            "by": "the smallest that holds it" if between in {"dynamic", "padded"} else f"policy {policy}",
        },
        {"shapes": "beyond, within batch=8,sequence=64", "served": beyond, "by": f"policy {policy}"},
    ]


def test_nothing_lies_beyond_buckets_that_reach_the_end_of_the_range() -> None:
    whole = Dimension("batch", 1, 4, (2, 4))

    assert Coverage((whole,), cross((whole,)), dynamic=True, policy="pad").rows() == [
        {"shapes": "batch=2", "served": "exact", "by": "batch=2"},
        {"shapes": "batch=4", "served": "exact", "by": "batch=4"},
        {"shapes": "within batch=4", "served": "dynamic", "by": "the smallest that holds it"},
    ]


def test_the_rows_never_promise_more_than_the_routes_of_a_list_of_buckets_that_is_no_cross_product() -> None:
    dimensions = (Dimension("batch", 1, 4, (1, 4)), Dimension("sequence", 2, 32, (16, 32)))
    listed = Coverage(dimensions, (bucket(1, 32), bucket(4, 16)), dynamic=True, policy="reject")

    corner = listed.route({"batch": 4, "sequence": 32})

    assert isinstance(corner, Refusal)
    assert "within batch=4,sequence=32" not in {row["shapes"] for row in listed.rows() if row["served"] == "dynamic"}


@pytest.mark.parametrize(("least", "most", "fixed"), [(1, 1, True), (1, 2, False)])
def test_a_dimension_is_fixed_when_only_one_size_is_possible(least: int, most: int, fixed: bool) -> None:
    assert Dimension("batch", least, most, (1,)).fixed is fixed
