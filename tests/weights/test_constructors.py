"""Constructors as people write them: what they draw, keep under second names, or leave empty is found or refused."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from app.errors import CheckpointError, SettingsError
from app.settings import Model
from app.weights.skeleton import build_skeleton
from tests.weights.loading import MODES, load, numbered, save


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.l = nn.Linear(3, 4)
            self.register_buffer("drawn", torch.randn(4), persistent=False)


class OneGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.w = nn.Parameter(torch.empty(4))
        nn.init.normal_(self.w, generator=generator)
        self.register_buffer("drawn", torch.empty(4).normal_(generator=generator), persistent=False)


class FromNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)
        self.drawn = torch.tensor(np.random.rand(2).tolist())


class Kept(nn.Module):
    """Keeps a parameter under a local name and reads a value, so that it is built with data."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.zeros(3))
        self.p = weight
        self.same, self.view = [weight], weight.data[:2]
        self.large = torch.ones(1).item() > 0


class Bits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(3))
        self.bits = self.p.detach().view(torch.int32)


class Conjugated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        self.other = self.p.detach().conj()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.l = nn.utils.weight_norm(nn.Linear(3, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.l(x)


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)
        torch.rand(1, device="cpu")
        self.register_buffer("cache", torch.empty(100_000), persistent=False)


class LazyStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.LazyBatchNorm1d(affine=False)


class SparseTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(2, 2)
        self.table = torch.eye(3, device="cpu").to_sparse()


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)
        object.__setattr__(self, "w", self.l.weight)


class HookOnTie(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)
        self.tied = self.l.weight
        self.l.register_load_state_dict_pre_hook(self._double)

    @staticmethod
    def _double(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2


class ChangesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)
        self.register_load_state_dict_post_hook(self._treble)

    @staticmethod
    def _treble(module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            module.get_parameter("l.weight").mul_(3)


KINDS = {kind.__name__: kind for kind in nn.Module.__subclasses__() if kind.__module__ == __name__}


def make(kind: str) -> nn.Module:
    return KINDS[kind]()


def model(kind: type[nn.Module], checkpoint: Path = Path("/nowhere")) -> Model:
    factory = "tests.weights.test_constructors:make"
    return Model(name="m", factory=factory, kwargs={"kind": kind.__name__}, checkpoint=checkpoint)


@pytest.mark.parametrize("kind", [Forked, OneGenerator])
def test_what_is_drawn_after_parameters_from_a_generator_of_its_own_is_the_ordinary_value(
    kind: type[nn.Module],
) -> None:
    assert torch.equal(build_skeleton(model(kind)).module.get_buffer("drawn"), kind().get_buffer("drawn"))


def test_what_numpy_draws_without_a_seed_is_refused_by_its_name() -> None:
    with pytest.raises(SettingsError, match="makes drawn at random"):
        build_skeleton(model(FromNumpy))


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_under_a_local_name_shows_the_loaded_values(mode: Any, tmp_path: Path) -> None:
    state = {"p": torch.tensor([1.0, 2.0, 3.0])}
    loaded = load(model(Kept, save(tmp_path, state)), mode)
    assert isinstance(loaded.module, Kept)
    assert loaded.module.same[0] is loaded.module.p
    assert loaded.module.p.tolist() == [1, 2, 3]
    assert loaded.module.view.tolist() == [1, 2]


@pytest.mark.parametrize(("kind", "name"), [(Bits, "bits"), (Conjugated, "other")])
def test_weights_shown_as_another_type_of_numbers_are_refused(kind: type[nn.Module], name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} shows p as another type of numbers"):
        build_skeleton(model(kind))


def test_what_a_hook_computes_before_every_call_may_be_random(tmp_path: Path) -> None:
    source = Normed()
    state = {n: t.clone() for n, t in source.state_dict().items()}
    loaded = load(model(Normed, save(tmp_path, state)))
    x = torch.ones(2, 3)
    with torch.no_grad():
        assert loaded.module is not None
        assert torch.equal(loaded.module(x), source(x))


def test_memory_that_nobody_has_written_is_not_taken_for_random() -> None:
    assert build_skeleton(model(Empty)).module.get_buffer("cache").shape == (100_000,)


def test_statistics_without_a_size_are_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"l\.running_mean has no shape yet"):
        build_skeleton(model(LazyStatistics))


def test_a_sparse_tensor_is_left_as_the_constructor_made_it() -> None:
    module = build_skeleton(model(SparseTable)).module
    assert isinstance(module, SparseTable)
    assert torch.equal(module.table.to_dense(), torch.eye(3))


def test_a_hidden_parameter_is_not_registered(tmp_path: Path) -> None:
    state = numbered(Hidden())
    loaded = load(model(Hidden, save(tmp_path, state)))
    assert loaded.module is not None
    assert set(loaded.module.state_dict()) == {"l.weight", "l.bias"}
    assert loaded.module.w is loaded.module.get_parameter("l.weight")


def test_random_states_are_as_before_also_where_the_constructor_seeds() -> None:
    before = torch.get_rng_state()
    build_skeleton(model(Forked))
    torch.manual_seed(11)
    seeded = torch.get_rng_state()
    build_skeleton(model(OneGenerator))
    assert torch.equal(torch.get_rng_state(), seeded)
    torch.set_rng_state(before)


def test_a_hook_that_changes_one_name_of_a_tie_alone_is_refused(tmp_path: Path) -> None:
    weight = torch.rand(4, 3)
    file = save(tmp_path, {"l.weight": weight, "tied": weight, "l.bias": torch.zeros(4)}, ".bin")
    with pytest.raises(CheckpointError, match="are one tensor, and loading has changed one of its names alone"):
        load(model(HookOnTie, file))


@pytest.mark.parametrize("mode", MODES)
def test_a_hook_may_change_what_it_loads_in_place(mode: Any, tmp_path: Path) -> None:
    state = numbered(ChangesInPlace())
    loaded = load(model(ChangesInPlace, save(tmp_path, state)), mode)
    assert torch.equal(loaded.tensors["l.weight"], state["l.weight"] * 3)
    assert loaded.copied_bytes >= state["l.weight"].nbytes
