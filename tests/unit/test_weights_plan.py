"""Every tensor of the model has a source, or one error tells every difference with both sides."""

from pathlib import Path

import pytest

from app.checkpoints import Checkpoint, CheckpointFile, TensorEntry
from app.errors import CheckpointError
from app.settings import Waive
from app.weights.plan import ModelTable, ModelTensor, WeightsPlan, plan_weights

NOTHING = Waive()


def stored(name: str, *shape: int, dtype: str = "F32") -> ModelTensor:
    return ModelTensor(name, dtype, shape, stored=True)


def rebuilt(name: str, *shape: int) -> ModelTensor:
    return ModelTensor(name, "F32", shape, stored=False)


def table(*tensors: ModelTensor, ties: tuple[tuple[str, ...], ...] = ()) -> ModelTable:
    return ModelTable(tensors, ties)


def checkpoint(**shapes: tuple[int, ...] | str) -> Checkpoint:
    """Return a checkpoint of F32 tensors of these shapes; a text is the dtype of a tensor of shape [2]."""
    entries = {}
    for name, given in shapes.items():
        dtype, shape = (given, (2,)) if isinstance(given, str) else ("F32", given)
        entries[name] = TensorEntry(name, dtype, shape, 0, 0, 8)
    file = CheckpointFile(Path("/models/tiny/x.safetensors"), -1, 100, (0, 0, 0, 0))
    return Checkpoint(Path("/models/tiny"), "safetensors", (file,), entries, None)


def missing(name: str, shape: str = "[2]", also: str = "") -> str:
    return (
        f"missing: {name} F32{shape} is in the model, not in the checkpoint{also}; "
        "is it the checkpoint of this architecture? (model.waive.missing accepts it)"
    )


def unexpected(name: str, shape: str = "[2]") -> str:
    return f"unexpected: {name} F32{shape} is in x.safetensors, not in the model (model.waive.unexpected accepts it)"


TWO = (2,)
A, B = stored("a", 2), stored("b", 2)
TIED = table(A, B, ties=(("a", "b"),))


@pytest.mark.parametrize(
    ("wanted", "held", "waive", "plan"),
    [
        pytest.param(
            table(A, B), checkpoint(b=TWO, a=TWO), NOTHING, WeightsPlan({"a": "a", "b": "b"}, (), {}), id="complete"
        ),
        pytest.param(table(), checkpoint(), NOTHING, WeightsPlan({}, (), {}), id="a model without tensors"),
        pytest.param(
            table(stored("s"), stored("e", 0, 3)),
            checkpoint(s=(), e=(0, 3)),
            NOTHING,
            WeightsPlan({"s": "s", "e": "e"}, (), {}),
            id="scalar and empty",
        ),
        pytest.param(
            table(A, rebuilt("r", 5)), checkpoint(a=TWO), NOTHING, WeightsPlan({"a": "a"}, ("r",), {}), id="rebuilt"
        ),
        pytest.param(
            TIED, checkpoint(a=TWO), NOTHING, WeightsPlan({"a": "a", "b": "a"}, (), {}), id="tie, first name held"
        ),
        pytest.param(
            TIED, checkpoint(b=TWO), NOTHING, WeightsPlan({"a": "b", "b": "b"}, (), {}), id="tie, second name held"
        ),
        pytest.param(
            TIED, checkpoint(a=TWO, b=TWO), NOTHING, WeightsPlan({"a": "a", "b": "b"}, (), {}), id="tie, both held"
        ),
        pytest.param(
            table(stored("a", 2), rebuilt("b", 2), ties=(("a", "b"),)),
            checkpoint(a=TWO),
            NOTHING,
            WeightsPlan({"a": "a", "b": "a"}, (), {}),
            id="tie with a name that is not stored",
        ),
        pytest.param(
            table(A, stored("head.w", 2), stored("head.b", 2)),
            checkpoint(a=TWO),
            Waive(missing=["head.*"]),
            WeightsPlan({"a": "a"}, ("head.w", "head.b"), {"missing": ("head.w", "head.b")}),
            id="missing and waived",
        ),
        pytest.param(
            table(A),
            checkpoint(a=TWO, **{"old.ids": TWO, "old.mask": (3,)}),
            Waive(unexpected=["old.*"]),
            WeightsPlan({"a": "a"}, (), {"unexpected": ("old.ids", "old.mask")}),
            id="unexpected and waived",
        ),
        pytest.param(
            table(A),
            checkpoint(a=TWO),
            Waive(missing=["*"], unexpected=["*"]),
            WeightsPlan({"a": "a"}, (), {}),
            id="nothing to waive",
        ),
        pytest.param(
            TIED,
            checkpoint(),
            Waive(missing=["?"]),
            WeightsPlan({}, ("a", "b"), {"missing": ("a", "b")}),
            id="tie, both waived",
        ),
    ],
)
def test_a_checkpoint_that_fits_gives_a_complete_plan(
    wanted: ModelTable, held: Checkpoint, waive: Waive, plan: WeightsPlan
) -> None:
    assert plan_weights(wanted, held, waive) == plan


@pytest.mark.parametrize(
    ("wanted", "held", "waive", "problems"),
    [
        pytest.param(table(A, B), checkpoint(a=TWO), NOTHING, (missing("b"),), id="missing"),
        pytest.param(table(A), checkpoint(a=TWO, c=(2, 3)), NOTHING, (unexpected("c", "[2, 3]"),), id="unexpected"),
        pytest.param(
            table(A),
            checkpoint(a=(2, 1)),
            NOTHING,
            ("shape: a is [2] in the model, [2, 1] in x.safetensors",),
            id="shape",
        ),
        pytest.param(
            table(A),
            checkpoint(a="BF16"),
            NOTHING,
            (
                "dtype: a is F32 in the model, BF16 in x.safetensors; "
                "let the factory build the module in the stored dtype",
            ),
            id="dtype",
        ),
        pytest.param(
            TIED,
            checkpoint(),
            NOTHING,
            (missing("a", also=" nor under the tied b"), missing("b", also=" nor under the tied a")),
            id="tie, no name held",
        ),
        pytest.param(
            TIED,
            checkpoint(b=(3,)),
            NOTHING,
            (
                "shape: a is [2] in the model, [3] in x.safetensors",
                "shape: b is [2] in the model, [3] in x.safetensors",
            ),
            id="tie, the held name has another shape",
        ),
        pytest.param(
            table(A, rebuilt("r", 2)), checkpoint(a=TWO, r=TWO), NOTHING, (unexpected("r"),), id="rebuilt and held"
        ),
        pytest.param(
            table(A, B), checkpoint(a=TWO), Waive(missing=["B", "b.*"]), (missing("b"),), id="another waive pattern"
        ),
        pytest.param(
            table(A), checkpoint(a=TWO, c=TWO), Waive(missing=["*"]), (unexpected("c"),), id="the other waive list"
        ),
        pytest.param(
            table(A),
            checkpoint(a=(3,)),
            Waive(missing=["*"], unexpected=["*"]),
            ("shape: a is [2] in the model, [3] in x.safetensors",),
            id="nobody waives a shape",
        ),
    ],
)
def test_a_difference_is_refused_with_both_sides(
    wanted: ModelTable, held: Checkpoint, waive: Waive, problems: tuple[str, ...]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        plan_weights(wanted, held, waive)

    assert caught.value.problems == problems
    assert str(caught.value).split("\n")[0] == f"/models/tiny does not fit the model: {len(problems)} problem(s)"


def test_all_differences_are_told_in_one_error() -> None:
    wanted = table(stored("gone", 2), stored("shape", 2), stored("dtype", 2), stored("both", 2, dtype="F16"))
    held = checkpoint(shape=(3,), dtype="I64", both=(4, 1), more=TWO)

    with pytest.raises(CheckpointError) as caught:
        plan_weights(wanted, held, NOTHING)

    let = "let the factory build the module in the stored dtype"
    assert str(caught.value) == "\n".join(
        [
            "/models/tiny does not fit the model: 6 problem(s)",
            f"  - {missing('gone')}",
            f"  - {unexpected('more')}",
            "  - shape: shape is [2] in the model, [3] in x.safetensors",
            f"  - dtype: dtype is F32 in the model, I64 in x.safetensors; {let}",
            "  - shape: both is [2] in the model, [4, 1] in x.safetensors",
            f"  - dtype: both is F16 in the model, F32 in x.safetensors; {let}",
        ]
    )


def test_the_table_comes_back_from_the_manifest_as_it_went_in() -> None:
    before = table(A, rebuilt("r", 3, 4), stored("s"), ties=(("a", "s"),))

    assert ModelTable.from_json(before.as_json()) == before
