"""What running a model may leave behind in the process beside its answers, taken before and put back after."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Traces:
    """The state at one moment, of the process and of the calling thread."""

    states: dict[str, Any]

    @classmethod
    def take(cls) -> "Traces":
        """Look at random states, gradient mode, default dtype and threads; call it on the thread that serves."""
        import torch

        return cls(
            {
                "torch's random state": torch.get_rng_state(),
                "numpy's random state": np.random.get_state(legacy=False),
                "python's random state": random.getstate(),
                "the gradient mode": torch.is_grad_enabled(),
                "the default dtype": torch.get_default_dtype(),
                "the number of threads": torch.get_num_threads(),
            }
        )

    def restore(self) -> tuple[str, ...]:
        """Put everything back as it was; return the names of what had changed."""
        import torch

        now = Traces.take().states
        put = {
            "torch's random state": torch.set_rng_state,
            "numpy's random state": np.random.set_state,
            "python's random state": random.setstate,
            "the gradient mode": torch.set_grad_enabled,
            "the default dtype": torch.set_default_dtype,
            "the number of threads": torch.set_num_threads,
        }
        changed = tuple(name for name, value in self.states.items() if not _same(now[name], value))
        for name in changed:
            put[name](self.states[name])
        return changed


def _same(one: Any, other: Any) -> bool:
    if hasattr(one, "equal"):  # a tensor
        return bool(one.equal(other))
    return repr(_plain(one)) == repr(_plain(other))


def _plain(state: Any) -> Any:
    """Return a state whose text is complete: numpy shortens long arrays."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state
