"""Modules with a way of loading of their own end up as an ordinary module that loads the same state."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from app.errors import CheckpointError
from app.settings import Model, Waive
from app.weights import LoadedModel
from app.weights.layout import Mode
from tests.weights.loading import MODES, load, numbered, save

SUFFIXES = [".safetensors", ".bin"]


class PreHook(nn.Module):
    """A parent's hook that scales a child's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.other = nn.Linear(3, 4), nn.Linear(2, 2)
        self.register_load_state_dict_pre_hook(self.scale)

    @staticmethod
    def scale(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *rest: Any) -> None:
        state[f"{prefix}l.weight"] = state[f"{prefix}l.weight"] * 2


class Overrides(nn.Module):
    """Changes what its child is given in `_load_from_state_dict`."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.l = nn.Parameter(torch.zeros(3)), nn.Linear(3, 4)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[f"{prefix}l.bias"] = state[f"{prefix}l.bias"] + state[f"{prefix}own"].sum()
        super()._load_from_state_dict(state, prefix, *rest)


class PostHook(nn.Module):
    """Derives a buffer and a plain attribute from what was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)
        self.register_buffer("sums", torch.zeros(4), persistent=False)
        self.total = 0.0
        self.register_load_state_dict_post_hook(self.derive)

    @staticmethod
    def derive(module: nn.Module, keys: Any) -> None:
        assert isinstance(module, PostHook)
        module.sums = module.l.weight.detach().sum(1)
        module.total = float(module.sums.sum())


class Nested(Overrides):
    """A loader within a loader: both apply, the outer first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = PreHook()


class Signature(nn.Module):
    """Its `load_state_dict` is for people and takes a path."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)

    def load_state_dict(self, path: Path) -> None:  # type: ignore[override]
        raise NotImplementedError(path)


class SignatureAndHook(PreHook):
    def load_state_dict(self, path: Path) -> None:  # type: ignore[override]
        raise NotImplementedError(path)


class Shows(PreHook):
    """A plain attribute is a weight that a hook changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first_rows = self.l.weight.detach()[:2]


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))


class Within(nn.Module):
    """Anything, as a part between others."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(1, 1), inner, nn.Linear(1, 1)


class State(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)
        self.taken: Any = None

    def get_extra_state(self) -> Any:
        return {"scale": 0.5, "names": ["a", "b"]}

    def set_extra_state(self, state: Any) -> None:
        self.taken = state


class TensorState(State):
    def get_extra_state(self) -> Any:
        return torch.arange(5)


class NoSetter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)

    def get_extra_state(self) -> Any:
        return {"scale": 0.5}


class Unreadable(State):
    def get_extra_state(self) -> Any:
        return complex(1, 2)


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)

    def _load_from_state_dict(self, *given: Any) -> None:
        raise KeyError("something of its own")


class Drops(nn.Module):
    """Replaces its parameter by one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)
        self.register_load_state_dict_post_hook(self.train_again)

    @staticmethod
    def train_again(module: nn.Module, keys: Any) -> None:
        assert isinstance(module, Drops)
        module.l.weight = nn.Parameter(torch.zeros(4, 3))


class Marked(nn.Module):
    """Attributes on parameters, as tensor-parallel layers and quantizers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.head = nn.Linear(3, 4), nn.Linear(3, 4)
        self.l.weight.shard_axis = 1
        self.l.bias.scales = {"a": [1.0]}
        self.head.weight = self.l.weight


class MarkedAndHook(Marked):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(lambda *given: None)


class Versioned(nn.Module):
    """Reads two versions of its format, and remembers which it was given."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(3))
        self.seen: Any = "nothing"

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *rest: Any
    ) -> None:
        self.seen = metadata.get("version")
        if self.seen == 1:
            state[f"{prefix}p"] = -state[f"{prefix}p"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


SAME = (
    PreHook, Overrides, PostHook, Nested, Signature, SignatureAndHook, Shows, Counts, Parametrized, Spectral,
)  # fmt: skip
OTHERS = (State, TensorState, NoSetter, Unreadable, Raises, Drops, Marked, MarkedAndHook, Versioned)
KINDS: dict[str, Callable[[], nn.Module]] = {kind.__name__: kind for kind in (*SAME, *OTHERS)}


def make(kind: str, within: bool = False) -> nn.Module:
    return Within(KINDS[kind]()) if within else KINDS[kind]()


def load_kind(kind: str, path: Path, mode: Mode = "map", within: bool = False, **fields: Any) -> LoadedModel:
    factory, kwargs = "tests.weights.test_load_hooks:make", {"kind": kind, "within": within}
    return load(Model(name="m", factory=factory, kwargs=kwargs, checkpoint=path, **fields), mode)


def inner(module: nn.Module | None) -> Any:
    return module.inner if isinstance(module, Within) else module


def plain_values(module: nn.Module) -> dict[str, Any]:
    kinds = (int, float, str, list, dict, type(None))
    return {
        f"{prefix}.{name}": value
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, kinds) and not name.startswith("_") and name != "training"
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("within", [False, True], ids=["alone", "as a part"])
@pytest.mark.parametrize("kind", [kind.__name__ for kind in SAME])
def test_a_module_that_loads_in_its_own_way_is_what_torch_makes_of_it(
    tmp_path: Path, kind: str, within: bool, suffix: str, mode: Mode
) -> None:
    torch.manual_seed(0)
    ordinary = make(kind, within).eval()
    state = numbered(ordinary)
    save(tmp_path, state, suffix)
    # Not the module's own method, which may have another signature; and not the state itself, which hooks change.
    nn.Module.load_state_dict(ordinary, copy.deepcopy(state))

    module = load_kind(kind, tmp_path, mode, within).module

    assert module is not None
    wanted, found = dict(ordinary.named_parameters()), dict(module.named_parameters())
    wanted |= dict(ordinary.named_buffers())
    found |= dict(module.named_buffers())
    assert found.keys() == wanted.keys()
    assert {name: torch.equal(tensor, wanted[name]) for name, tensor in found.items()} == dict.fromkeys(wanted, True)
    assert plain_values(module) == plain_values(ordinary)
    assert not any(tensor.requires_grad for tensor in module.parameters())
    if kind == "Shows":
        assert torch.equal(inner(module).first_rows, inner(ordinary).l.weight[:2])


def test_the_hooks_of_these_tests_change_what_is_loaded() -> None:
    for kind in ("PreHook", "Overrides", "PostHook", "Nested"):
        module = make(kind)
        state = numbered(module)
        module.load_state_dict(copy.deepcopy(state))
        unchanged = all(torch.equal(module.state_dict()[name], tensor) for name, tensor in state.items())
        assert unchanged is (kind == "PostHook")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("within", [False, True], ids=["alone", "as a part"])
@pytest.mark.parametrize(
    ("kind", "taken"), [("State", {"scale": 0.5, "names": ["a", "b"]}), ("TensorState", torch.arange(5))]
)
def test_state_beside_the_tensors_is_given_to_the_module(
    tmp_path: Path, kind: str, taken: Any, within: bool, mode: Mode
) -> None:
    save(tmp_path, make(kind, within).state_dict(), ".bin")

    found = inner(load_kind(kind, tmp_path, mode, within).module).taken

    assert torch.equal(found, taken) if isinstance(taken, torch.Tensor) else found == taken


@pytest.mark.parametrize("within", [False, True], ids=["alone", "as a part"])
def test_a_module_that_gives_state_and_takes_none_is_refused_by_its_name(tmp_path: Path, within: bool) -> None:
    save(tmp_path, make("NoSetter", within).state_dict(), ".bin")

    with pytest.raises(CheckpointError, match=f"^{'inner' if within else 'the module'} did not take _extra_state, "):
        load_kind("NoSetter", tmp_path, within=within)


@pytest.mark.parametrize("within", [False, True], ids=["alone", "as a part"])
def test_state_that_was_not_read_is_a_problem_of_the_plan(tmp_path: Path, within: bool) -> None:
    save(tmp_path, make("Unreadable", within).state_dict(), ".bin")
    name = "inner._extra_state" if within else "_extra_state"

    with pytest.raises(CheckpointError) as caught:
        load_kind("Unreadable", tmp_path, within=within)

    assert caught.value.problems == (
        f"state: {name} is a complex, which is not read from this format; let get_extra_state return a tensor or plain "
        f"values, or waive it as missing and leave it out of the checkpoint",
    )


def test_state_that_may_be_missing_and_is_leaves_the_module_as_it_was_made(tmp_path: Path) -> None:
    save(tmp_path, make("Unreadable").l.state_dict(prefix="l."), ".bin")

    loaded = load_kind("Unreadable", tmp_path, waive=Waive(missing=["_extra_state"]))

    assert inner(loaded.module).taken is None
    assert loaded.plan.waived == {"missing": ("_extra_state",)}


@pytest.mark.parametrize("within", [False, True], ids=["alone", "as a part"])
def test_a_module_that_fails_to_load_is_told_by_its_name_and_why(tmp_path: Path, within: bool) -> None:
    save(tmp_path, make("Raises", within).state_dict())
    where = "inner" if within else "the module"

    with pytest.raises(CheckpointError, match=f"^{where} could not load its state: KeyError: 'something of its own'$"):
        load_kind("Raises", tmp_path, within=within)


def test_a_hook_that_makes_a_parameter_train_again_is_refused_by_its_name(tmp_path: Path) -> None:
    save(tmp_path, make("Drops").state_dict())

    with pytest.raises(CheckpointError, match=r"^loading made l\.weight require gradients; weights that serve never"):
        load_kind("Drops", tmp_path)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("within", [False, True], ids=["alone", "as a part"])
@pytest.mark.parametrize("kind", ["Marked", "MarkedAndHook"])
def test_attributes_of_a_parameter_are_those_of_the_installed_one(
    tmp_path: Path, kind: str, within: bool, mode: Mode
) -> None:
    save(tmp_path, numbered(make(kind, within)))

    module = inner(load_kind(kind, tmp_path, mode, within).module)

    assert module.l.weight is module.head.weight
    assert vars(module.l.weight) == {"shard_axis": 1}
    assert vars(module.l.bias) == {"scales": {"a": [1.0]}}
    assert vars(module.head.bias) == {}


def versioned_state(within: bool, version: int | None) -> "OrderedDict[str, Any]":
    state = make("Versioned", within).state_dict()
    name = "inner" if within else ""
    state[f"{name}.p".lstrip(".")] = torch.arange(1.0, 4.0)
    metadata: Any = state._metadata  # type: ignore[attr-defined]
    assert metadata[name] == {"version": 3}
    if version is None:
        del state._metadata  # type: ignore[attr-defined]
    else:
        metadata[name]["version"] = version
    return state


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("within", [False, True], ids=["alone", "as a part"])
@pytest.mark.parametrize(
    ("suffix", "stored", "seen"),
    [(".bin", 1, 1), (".bin", 2, 2), (".bin", 3, 3), (".bin", None, 3), (".safetensors", 1, 3)],
)
def test_a_module_is_told_the_version_that_the_file_says_or_todays(
    tmp_path: Path, suffix: str, stored: int | None, seen: int, within: bool, mode: Mode
) -> None:
    save(tmp_path, versioned_state(within, stored), suffix)

    module = inner(load_kind("Versioned", tmp_path, mode, within).module)

    sign = -1 if seen == 1 else 1
    assert (module.seen, module.p.tolist()) == (seen, [sign * 1.0, sign * 2.0, sign * 3.0])


def test_the_version_of_a_state_that_is_wrapped_is_read_too(tmp_path: Path) -> None:
    save(tmp_path, {"epoch": 3, "state_dict": versioned_state(within=True, version=1)}, ".bin")

    assert inner(load_kind("Versioned", tmp_path, within=True).module).seen == 1
