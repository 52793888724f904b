"""Tensors of a module that are, or look into, a stored one under another name: they must see the loaded values.

`self.ws = [self.layer.weight]` or a buffer made of `weight.detach()[:2]` are not stored, but neither are they values of
their own. On the meta device, too, two tensors share a storage object exactly when one is a view of the other.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from app.errors import SettingsError
from app.weights.attributes import plain_tensors, put_attribute


@dataclass(frozen=True, slots=True)
class Alias:
    """A tensor under `attribute` (and `path` into it) of the part at `prefix` that shows the tensor named `target`.

    `same`: it is that very object; else it is a view of `size` and `stride` that begins `offset` elements behind it.
    """

    prefix: str
    attribute: str
    path: tuple[Any, ...]
    target: str
    same: bool
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def name(self) -> str:
        """The name of the attribute or buffer."""
        return f"{self.prefix}.{self.attribute}" if self.prefix else self.attribute


def find_aliases(module: nn.Module) -> tuple[Alias, ...]:
    """Return the aliases among a module's plain attributes and the buffers that no checkpoint holds.

    Raises SettingsError for one that shows a stored tensor as another type, which cannot be made anew from its shape.
    """
    owners: dict[int, tuple[str, torch.Tensor]] = {}
    unstored: list[tuple[str, str, tuple[Any, ...], torch.Tensor]] = list(plain_tensors(module))
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and name in part._non_persistent_buffers_set:
                unstored.append((prefix, name, (), tensor))
            elif tensor is not None:
                owners.setdefault(_storage(tensor), (f"{prefix}.{name}" if prefix else name, tensor))
    found = []
    for prefix, attribute, path, tensor in unstored:
        if (owner := owners.get(_storage(tensor))) is None:
            continue
        target, shown = owner
        if (tensor.dtype, tensor.is_conj(), tensor.is_neg()) != (shown.dtype, shown.is_conj(), shown.is_neg()):
            name = f"{prefix}.{attribute}" if prefix else attribute
            raise SettingsError(f"{name} shows {target} as another type of numbers; compute it in forward")
        offset = tensor.storage_offset() - shown.storage_offset()
        same, size, stride = tensor is shown, tuple(tensor.shape), tuple(tensor.stride())
        found.append(Alias(prefix, attribute, path, target, same, size, stride, offset))
    return tuple(found)


def repoint(module: nn.Module, aliases: tuple[Alias, ...]) -> None:
    """Let every alias show what its target is now."""
    for alias in aliases:
        part = module.get_submodule(alias.prefix)
        owner, _, attribute = alias.target.rpartition(".")
        shown = getattr(module.get_submodule(owner), attribute)
        value = shown if alias.same else _view(shown, alias)
        if alias.attribute in part._buffers:
            part._buffers[alias.attribute] = value
        else:
            put_attribute(part, alias.attribute, alias.path, value)


def _view(shown: torch.Tensor, alias: Alias) -> torch.Tensor:
    return shown.detach().as_strided(alias.size, alias.stride, shown.storage_offset() + alias.offset)


def _storage(tensor: torch.Tensor) -> int:
    # The address of the storage object, not of its data: on meta there is none. Sparse tensors have no storage.
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)
