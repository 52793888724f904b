"""Random numbers in constructors: whether any were drawn, and leaving the process's generators as they were."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DrawWatch(TorchDispatchMode):  # type: ignore[misc]
    """Notices random operations of torch on tensors that have data, whatever generator they use."""

    def __init__(self) -> None:
        super().__init__()
        self._before = _states()
        self._drew = False

    @property
    def drew(self) -> bool:
        """Random numbers were drawn since the watch was made, from torch, numpy's global generator or `random`."""
        return self._drew or _states()[1:] != self._before[1:]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what is drawn and let it happen."""
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            tensors = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
            self._drew |= any(not tensor.is_meta for tensor in tensors)
        return result


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Leave torch's, numpy's and Python's generators as they were."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


@contextmanager
def other_start(number: int) -> Iterator[None]:
    """Begin at another place of every generator, and fill memory that nobody writes with one value.

    So that of two constructions only what is drawn differs.
    """
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _states() -> tuple[bytes, object, str]:
    state: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr((state[1].tobytes(), *state[2:]))
