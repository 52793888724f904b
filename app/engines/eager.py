"""The module as it is written: the reference for every other engine, and the declared fallback."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.utils import _pytree

from app.artifacts import Artifact, Layer, bypassed
from app.buckets import FORWARD, Bucket
from app.errors import ArtifactError
from app.weights import LoadedModel
from app.weights.dtypes import same_bits


class EagerEngine:
    """Calls the module."""

    plugin = True
    name = "eager"

    def __init__(self, module: nn.Module, read_only: frozenset[str]) -> None:
        self._module = module
        self._before = {name: buffer.clone() for name, buffer in module.named_buffers() if name not in read_only}

    @classmethod
    def open(cls, model: LoadedModel, artifact: Artifact | None) -> Self:
        """Take the installed module; raises ArtifactError when only tensors were bound."""
        del artifact
        if model.module is None:
            raise ArtifactError("the eager engine needs the installed module")
        return cls(model.module, model.read_only)

    @property
    def dynamic(self) -> bool:
        """Eager code runs every shape."""
        return True

    def restore_buffers(self) -> tuple[str, ...]:
        """Put back the buffers that forward has changed: what it answers may depend on who asked before."""
        now = dict(self._module.named_buffers())
        changed = tuple(name for name, before in self._before.items() if not same_bits(now[name], before))
        for name in changed:
            self._put(name, now[name])
        return changed

    def _put(self, name: str, now: torch.Tensor) -> None:
        """In place, so that compiled code goes on finding it, unless forward has put another tensor there."""
        before = self._before[name]
        with torch.inference_mode():
            if now.shape == before.shape and now.dtype == before.dtype:
                now.copy_(before)
                return
        owner, _, attribute = name.rpartition(".")
        self._module.get_submodule(owner)._buffers[attribute] = before.clone()

    def layers(self) -> tuple[Layer, ...]:
        """None of torch's caches: nothing is compiled."""
        return bypassed("the module runs as it is written")

    def run(self, inputs: Sequence[torch.Tensor], path: str, bucket: Bucket | None) -> Sequence[torch.Tensor]:
        """Call the module and flatten what it returns, in the order that torch flattens mappings and tuples."""
        del bucket
        return tensors_of(method_of(self._module, path)(*inputs))


def method_of(module: nn.Module, path: str) -> Callable[..., Any]:
    """Return what serves a path: the module itself, whose hooks run with its forward, or one of its methods."""
    return module if path == FORWARD else getattr(module, path)  # type: ignore[no-any-return]


def tensors_of(returned: Any) -> list[torch.Tensor]:
    """Return the tensors in what a module returned, in the order that torch flattens mappings and tuples."""
    leaves, _ = _pytree.tree_flatten(returned)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
