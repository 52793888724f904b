"""Every tensor of the model has a source, or one error tells every difference with both sides."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints import Checkpoint, CheckpointFile, Piece, TensorEntry
from app.errors import CheckpointError
from app.settings import CastType, Model, Waive
from app.weights.plan import ModelTable, ModelTensor, WeightsPlan, plan_weights

NOTHING = Waive()


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def stored(name: str, *shape: int, dtype: str = "F32") -> ModelTensor:
    return ModelTensor(name, dtype, shape, strides(shape), stored=True)


def rebuilt(name: str, *shape: int) -> ModelTensor:
    return ModelTensor(name, "F32", shape, strides(shape), stored=False)


def table(
    *tensors: ModelTensor, ties: tuple[tuple[str, ...], ...] = (), extra_state: tuple[str, ...] = ()
) -> ModelTable:
    return ModelTable(tensors, ties, extra_state)


def model(waive: Waive = NOTHING, dtype: CastType | None = None) -> Model:
    return Model(name="tiny", factory="a:b", checkpoint=Path("/models/tiny"), waive=waive, dtype=dtype)


def plan_of(
    sources: dict[str, str],
    rebuilt: tuple[str, ...] = (),
    waived: dict[str, tuple[str, ...]] | None = None,
    cast: dict[str, tuple[str, str]] | None = None,
    extra_state: tuple[str, ...] = (),
) -> WeightsPlan:
    return WeightsPlan(sources, rebuilt, waived or {}, cast or {}, extra_state)


def checkpoint(**shapes: tuple[int, ...] | str) -> Checkpoint:
    """Return a checkpoint of F32 tensors of these shapes; a text is the dtype of a tensor of shape [2]."""
    entries = {}
    for name, given in shapes.items():
        dtype, shape = (given, (2,)) if isinstance(given, str) else ("F32", given)
        entries[name] = TensorEntry(name, dtype, shape, 0, 0, 8)
    file = CheckpointFile(Path("/models/tiny/x.safetensors"), -1, 100, (0, 0, 0, 0))
    return Checkpoint(Path("/models/tiny"), "safetensors", (file,), entries)


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
        pytest.param(table(A, B), checkpoint(b=TWO, a=TWO), NOTHING, plan_of({"a": "a", "b": "b"}), id="complete"),
        pytest.param(table(), checkpoint(), NOTHING, plan_of({}), id="a model without tensors"),
        pytest.param(
            table(stored("s"), stored("e", 0, 3)),
            checkpoint(s=(), e=(0, 3)),
            NOTHING,
            plan_of({"s": "s", "e": "e"}),
            id="scalar and empty",
        ),
        pytest.param(table(A, rebuilt("r", 5)), checkpoint(a=TWO), NOTHING, plan_of({"a": "a"}, ("r",)), id="rebuilt"),
        pytest.param(TIED, checkpoint(a=TWO), NOTHING, plan_of({"a": "a", "b": "a"}), id="tie, first name held"),
        pytest.param(TIED, checkpoint(b=TWO), NOTHING, plan_of({"a": "b", "b": "b"}), id="tie, second name held"),
        pytest.param(TIED, checkpoint(a=TWO, b=TWO), NOTHING, plan_of({"a": "a", "b": "b"}), id="tie, both held"),
        pytest.param(
            table(stored("a", 2), rebuilt("b", 2), ties=(("a", "b"),)),
            checkpoint(a=TWO),
            NOTHING,
            plan_of({"a": "a", "b": "a"}),
            id="tie with a name that is not stored",
        ),
        pytest.param(
            table(A, stored("head.w", 2), stored("head.b", 2)),
            checkpoint(a=TWO),
            Waive(missing=["head.*"]),
            plan_of({"a": "a"}, ("head.w", "head.b"), {"missing": ("head.w", "head.b")}),
            id="missing and waived",
        ),
        pytest.param(
            table(A),
            checkpoint(a=TWO, **{"old.ids": TWO, "old.mask": (3,)}),
            Waive(unexpected=["old.*"]),
            plan_of({"a": "a"}, (), {"unexpected": ("old.ids", "old.mask")}),
            id="unexpected and waived",
        ),
        pytest.param(
            table(A),
            checkpoint(a=TWO),
            Waive(missing=["*"], unexpected=["*"]),
            plan_of({"a": "a"}),
            id="nothing to waive",
        ),
        pytest.param(
            TIED,
            checkpoint(),
            Waive(missing=["?"]),
            plan_of({}, ("a", "b"), {"missing": ("a", "b")}),
            id="tie, both waived",
        ),
    ],
)
def test_a_checkpoint_that_fits_gives_a_complete_plan(
    wanted: ModelTable, held: Checkpoint, waive: Waive, plan: WeightsPlan
) -> None:
    assert plan_weights(wanted, held, model(waive)) == plan


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
                "let the factory build the module in the stored dtype, or set model.dtype to cast every floating-point "
                "tensor",
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
        plan_weights(wanted, held, model(waive))

    assert caught.value.problems == problems
    assert str(caught.value).split("\n")[0] == f"/models/tiny does not fit the model: {len(problems)} problem(s)"


def test_all_differences_are_told_in_one_error() -> None:
    wanted = table(stored("gone", 2), stored("shape", 2), stored("dtype", 2), stored("both", 2, dtype="F16"))
    held = checkpoint(shape=(3,), dtype="I64", both=(4, 1), more=TWO)

    with pytest.raises(CheckpointError) as caught:
        plan_weights(wanted, held, model())

    let = "let the factory build the module in the stored dtype, or set model.dtype to cast every floating-point tensor"
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
    before = table(A, rebuilt("r", 3, 4), stored("s"), ties=(("a", "s"),), extra_state=("head._extra_state",))

    assert ModelTable.from_json(before.as_json()) == before


@pytest.mark.parametrize("held", ["F32", "F16", "F64", "F8_E4M3", "BF16"])
def test_a_configured_dtype_casts_every_floating_point_tensor_that_has_another_one(held: str) -> None:
    wanted = table(stored("a", 2, dtype="BF16"), stored("n", 2, dtype="I64"))

    plan = plan_weights(wanted, checkpoint(a=held, n="I64"), model(dtype="bfloat16"))

    assert plan.cast == ({} if held == "BF16" else {"a": (held, "BF16")})


@pytest.mark.parametrize("held", ["I64", "BOOL", "C64", "U8", "F4"])
def test_a_configured_dtype_does_not_make_a_number_of_another_kind_fit(held: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        plan_weights(table(stored("a", 2, dtype="BF16")), checkpoint(a=held), model(dtype="bfloat16"))

    assert caught.value.problems[0].startswith(f"dtype: a is BF16 in the model, {held} in x.safetensors; ")


STATEFUL = table(A, extra_state=("head._extra_state",))


def with_state(held: Checkpoint) -> Checkpoint:
    return replace(held, objects={"head._extra_state": {"scale": 2}})


@pytest.mark.parametrize("kind", ["an object", "a tensor"])
def test_extra_state_is_found_among_tensors_and_objects(kind: str) -> None:
    held = checkpoint(a=TWO)
    held = with_state(held) if kind == "an object" else checkpoint(a=TWO, **{"head._extra_state": TWO})

    assert plan_weights(STATEFUL, held, model()) == plan_of({"a": "a"}, extra_state=("head._extra_state",))


def test_extra_state_that_is_missing_is_told_and_can_be_waived() -> None:
    with pytest.raises(CheckpointError) as caught:
        plan_weights(STATEFUL, checkpoint(a=TWO), model())

    assert caught.value.problems == (
        "missing: head._extra_state (state of a module beside its tensors) is in the model, not in the checkpoint "
        "(model.waive.missing leaves the module as its constructor made it)",
    )
    waived = plan_weights(STATEFUL, checkpoint(a=TWO), model(Waive(missing=["head.*"])))
    assert waived == plan_of({"a": "a"}, (), {"missing": ("head._extra_state",)})


def test_extra_state_that_no_module_takes_is_unexpected_and_can_be_waived() -> None:
    held = with_state(checkpoint(a=TWO))

    with pytest.raises(CheckpointError) as caught:
        plan_weights(table(A), held, model())

    assert caught.value.problems == (
        "unexpected: head._extra_state (no tensor) is in the checkpoint, not in the model "
        "(model.waive.unexpected accepts it)",
    )
    waived = plan_weights(table(A), held, model(Waive(unexpected=["head.*"])))
    assert waived == plan_of({"a": "a"}, (), {"unexpected": ("head._extra_state",)})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"shape": (2,)}, "shape: a is [4] in the model, [2] in y.safetensors"),
        ({"name": "b"}, "unexpected: b F32[4] is in y.safetensors, not in the model"),
    ],
)
def test_a_tensor_in_pieces_is_told_with_the_file_of_its_first_piece(change: dict[str, Any], problem: str) -> None:
    held = checkpoint(a=TWO)
    file = replace(held.files[0], path=Path("/models/tiny/y.safetensors"))
    pieces = (Piece(1, 0, (0,), (2,)), Piece(0, 8, (2,), (2,)))
    entry = replace(TensorEntry("a", "F32", (4,), 0, 0, 16, pieces=pieces), **change)
    held = replace(held, files=(*held.files, file), tensors={entry.name: entry})

    with pytest.raises(CheckpointError) as caught:
        plan_weights(table(stored("a", 4)), held, model(Waive(missing=["a"])))

    assert caught.value.problems[0].startswith(problem)
