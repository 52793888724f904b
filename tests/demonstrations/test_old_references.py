"""Assignment saves a second copy of the weights and replaces the Parameter objects: who held the old ones keeps them.

`load_state_dict(assign=True)` puts new Parameters into the module. An optimizer, a tie or compiled code that was bound
before keeps the old objects, and nothing raises: it trains, ties or answers with weights that nobody else sees. So
everything that holds references is bound after the weights are installed.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from app.buckets import FORWARD
from app.engines.eager import EagerEngine
from app.settings import Model
from app.stages import STARTUP
from app.stages.bind_engine import bind_engine
from app.weights.dtypes import same_bits
from tests.weights.loading import load

X = torch.arange(6.0).reshape(2, 3)


class Tied(nn.Module):
    """An embedding whose weight is also that of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.embed(ids))
        return found


def build() -> nn.Module:
    return Tied()


def read(module: nn.Module) -> dict[str, Tensor]:
    """Return other weights for a module as a file gives them: each name has a tensor of its own."""
    torch.manual_seed(1)
    rows = {tensor.data_ptr(): torch.rand_like(tensor) for tensor in module.state_dict().values()}
    return {name: rows[tensor.data_ptr()].clone() for name, tensor in module.state_dict().items()}


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module.zero_grad()
    module(X).sum().backward()
    optimizer.step()


def test_an_optimizer_bound_before_trains_weights_that_nobody_uses() -> None:
    module = nn.Linear(3, 2)
    early = torch.optim.SGD(module.parameters(), lr=0.1)
    module.load_state_dict(read(module), assign=True)
    installed = module.weight.detach().clone()

    step(module, early)
    assert early.param_groups[0]["params"][0] is not module.weight
    assert same_bits(module.weight, installed)

    step(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert not same_bits(module.weight, installed)


def test_a_tie_made_before_is_two_tensors_afterwards() -> None:
    module = Tied()
    state = read(module)
    module.load_state_dict(state, assign=True)

    assert same_bits(module.head.weight, module.embed.weight)
    assert module.head.weight is not module.embed.weight
    with torch.no_grad():
        module.embed.weight.zero_()
    assert module.head.weight.any()


def test_code_compiled_over_a_weight_before_answers_with_the_old_one() -> None:
    module = nn.Linear(3, 2, bias=False)
    weight = module.weight.detach()
    early = torch.compile(lambda x: x @ weight.t(), backend="eager")
    old = early(X)
    module.load_state_dict(read(module), assign=True)

    assert torch.equal(early(X), old)
    assert not torch.allclose(early(X), module(X))
    now = module.weight.detach()
    assert torch.allclose(torch.compile(lambda x: x @ now.t(), backend="eager")(X), module(X))


def start(directory: Path, state: Mapping[str, Tensor]) -> tuple[EagerEngine, Tied, Mapping[str, Tensor]]:
    """Install as a start does, and bind afterwards; also return the tensors that compiled code is given by name."""
    save_file(dict(state), directory / "model.safetensors")
    loaded = load(Model(name="m", factory=f"{__name__}:build", checkpoint=directory))
    assert isinstance(loaded.module, Tied)
    return EagerEngine.open(loaded, None), loaded.module, loaded.tensors


def test_a_start_installs_first_ties_again_and_binds_what_is_installed(tmp_path: Path) -> None:
    state = read(Tied())
    engine, module, tensors = start(tmp_path, state)
    ids = torch.tensor([[0, 3, 4]])

    assert module.head.weight is module.embed.weight
    assert {tensor.data_ptr() for tensor in tensors.values()} == {module.embed.weight.data_ptr()}
    (answer,) = engine.run([ids], FORWARD, None)
    assert torch.equal(answer, state["embed.weight"][ids] @ state["head.weight"].t())


def test_the_graph_of_stages_cannot_bind_before_it_has_installed() -> None:
    assert "install-weights" in STARTUP.before(bind_engine)
