"""Small models for tests that need a process but not a language model; parameters are named as in their files."""

import random
import time

import numpy as np
import torch
from torch import Tensor, nn


class Tiny(nn.Module):
    """Two layers with tied-free weights, one buffer that no checkpoint holds, and a scale that one does."""

    offsets: Tensor
    scale: Tensor

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, 4)
        self.register_buffer("offsets", torch.arange(width, dtype=torch.float32) / width, persistent=False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x + self.offsets))) * self.scale


class Halving(Tiny):
    """Has a method of half precision beside its forward."""

    def halve(self, x: Tensor) -> Tensor:
        return x * (self.scale / 2).half()


class Precise(Halving):
    """Has a method of a third precision."""

    def brief(self, x: Tensor) -> Tensor:
        return x * (self.scale / 2).bfloat16()


class Paired(Tiny):
    """Has methods beside its forward; the numbers in their code are not the same though export calls them the same."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x + self.offsets)) * torch.tensor([0.2, 0.3, 0.5, 0.7]).repeat(4)

    def compare(self, left: Tensor, right: Tensor) -> Tensor:
        return self.encode(left) @ self.encode(right).T


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's; the file holds one of the names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).mean(dim=1))


class Eigen(nn.Module):
    """Uses an operator without a C interface, so its compiled form needs torch's own runner."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return torch.linalg.eigvalsh(hidden.unsqueeze(-1) @ hidden.unsqueeze(-2)) + 0 * x


class Branching(Tiny):
    """Cannot be exported: the path depends on the data, and on each of its two ways there is something to compute."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x + self.offsets))
        if float(x.sum()) > -1e9:
            return self.second(hidden) * self.scale
        return self.second(hidden) * 2


class Centering(Tiny):
    """Takes the batch's mean away: a row's answer depends on the rows beside it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=0))


class Sleeping(Tiny):
    """Takes a quarter of a second for a full bucket of its test."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 8:
            time.sleep(0.25)
        return super().forward(x)


class Telling(Tiny):
    """Fails on a certain value, with a message that holds what was asked."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == 12345).any()):
            raise ValueError(f"cannot take {x.tolist()}")
        return super().forward(x)


class Hanging(Tiny):
    """Never comes back from a certain value."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == 12345).any()):
            time.sleep(3600)
        return super().forward(x)


class Counting(Tiny):
    """Changes a buffer that the checkpoint holds: the next answer depends on who asked before."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale.add_(1)
        return super().forward(x)


class Infinite(Tiny):
    """Answers with values that are no numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 0.0


class Unequal(Tiny):
    """Answers differently when compiled: the proof must find it."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        return hidden + 1 if torch.compiler.is_exporting() else hidden


class Wide(nn.Module):
    """Half a gigabyte of weights, nearly all in one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4_000_000, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.table(ids).mean(dim=1))


class Table(nn.Module):
    """As many weights as asked for, in one table; its output keeps to single precision."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.table(ids).mean(dim=1)).float()


class Showing(Tiny):
    """Uses its weights under names that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.same = [self.second.weight]
        self.register_buffer("part", self.first.weight.detach()[:4], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x + self.offsets))
        return hidden @ self.same[0].t() + x @ self.part.t()


class Gathering(Tiny):
    """Takes whatever it is given, as wrappers do."""

    def forward(self, *tensors: Tensor) -> Tensor:
        (x,) = tensors
        return super().forward(x)


class Breaking(Tiny):
    """Leaves torch in the middle: what is traced are the parts before and after."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x + self.offsets))
        return self.second(torch.from_numpy(hidden.numpy() * 2))


class Foreign(Tiny):
    """Calls an operator that torch does not bring."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.warmgate_tests.doubled(super().forward(x))
        return found


@torch.library.custom_op("warmgate_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Stateful(Tiny):
    """Keeps a state beside its tensors, which its file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.factor])

    def set_extra_state(self, state: Tensor) -> None:
        self.factor = float(state[0])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Tallying(Tiny):
    """Leaves traces that no answer depends on: counts its calls, draws, and sets switches of the process."""

    calls: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("last", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = torch.rand(3)
        random.random()
        np.random.random()
        torch.set_default_dtype(torch.float64)
        return super().forward(x)


def tallying() -> nn.Module:
    return Tallying()


def gathering() -> nn.Module:
    return Gathering()


def breaking() -> nn.Module:
    return Breaking()


def foreign() -> nn.Module:
    return Foreign()


def stateful() -> nn.Module:
    return Stateful()


def showing() -> nn.Module:
    return Showing()


def late() -> nn.Module:
    time.sleep(3)  # so that the checkpoint can change between its reading and its proof
    return Tiny()


def table(rows: int) -> nn.Module:
    return Table(rows)


def tiny() -> nn.Module:
    return Tiny()


def wide() -> nn.Module:
    return Wide()


def paired() -> nn.Module:
    return Paired()


def tied() -> nn.Module:
    return Tied()


def eigen() -> nn.Module:
    return Eigen()


def precise() -> nn.Module:
    return Precise()


def halving() -> nn.Module:
    return Halving()


def branching() -> nn.Module:
    return Branching()


def unequal() -> nn.Module:
    return Unequal()


def counting() -> nn.Module:
    return Counting()


def infinite() -> nn.Module:
    return Infinite()


def from_file(file: str) -> nn.Module:
    """A model whose code depends on a file that the factory reads."""
    with open(file) as found:  # noqa: PTH123 - as factories do
        width = int(found.read())
    return Tiny(width)


def sleeping() -> nn.Module:
    time.sleep(3600)  # a factory that hangs without using the processor
    return Tiny()


def raising() -> nn.Module:
    raise RuntimeError("no such configuration")
