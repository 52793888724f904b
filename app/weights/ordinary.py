"""The values that no checkpoint brings, exactly as an ordinary construction of the module gives them."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn

from app.errors import SettingsError
from app.settings import Model
from app.weights.aliases import Alias
from app.weights.attributes import plain_tensors, put_attribute, value_at
from app.weights.dtypes import same_bits
from app.weights.factory import Factory, cast_floats, construct_ordinarily, drop_parameters
from app.weights.randomness import DrawWatch, other_start


@dataclass(frozen=True, slots=True)
class Unstored:
    """Where a tensor without data is: `path` leads into an attribute that holds containers.

    `waived`: a checkpoint may hold it, and need not.
    """

    kind: Literal["parameter", "buffer", "attribute"]
    prefix: str
    attribute: str
    path: tuple[Any, ...] = ()
    waived: bool = False

    @property
    def name(self) -> str:
        """The name of the parameter, buffer or attribute."""
        return f"{self.prefix}.{self.attribute}" if self.prefix else self.attribute

    def value(self, module: nn.Module) -> torch.Tensor:
        """Return what is there in a module."""
        found: torch.Tensor = value_at(getattr(module.get_submodule(self.prefix), self.attribute), self.path)
        return found

    def put(self, module: nn.Module, value: torch.Tensor) -> None:
        """Give it a value."""
        part = module.get_submodule(self.prefix)
        if self.kind == "attribute":
            put_attribute(part, self.attribute, self.path, value)
        elif self.kind == "buffer":
            part._buffers[self.attribute] = value
        else:
            # The object itself: another name of it gets the same.
            part._parameters[self.attribute] = cast("nn.Parameter", value.requires_grad_(False))


def unstored(module: nn.Module, waived: frozenset[str], aliases: tuple[Alias, ...]) -> tuple[Unstored, ...]:
    """Return what has no data and gets none from a checkpoint; `waived` names count, aliases of stored tensors not."""
    shown = {(alias.prefix, alias.attribute, alias.path) for alias in aliases}
    return tuple(one for one in _candidates(module, waived) if (one.prefix, one.attribute, one.path) not in shown)


def _candidates(module: nn.Module, waived: frozenset[str]) -> Iterator[Unstored]:
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, parameter in part._parameters.items():
            one = Unstored("parameter", prefix, name, waived=True)
            if parameter is not None and one.name in waived:
                yield one
        for name, buffer in part._buffers.items():
            stored = name not in part._non_persistent_buffers_set
            one = Unstored("buffer", prefix, name, waived=stored)
            if buffer is not None and buffer.is_meta and (not stored or one.name in waived):
                yield one
    for prefix, name, path, tensor in plain_tensors(module):
        if tensor.is_meta:
            yield Unstored("attribute", prefix, name, path)


def forget(module: nn.Module, aliases: tuple[Alias, ...]) -> None:
    """Take the data of everything that is no parameter: what is not stored is then found as in any other module."""
    shown = {(alias.prefix, alias.attribute, alias.path) for alias in aliases}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to("meta")
    for prefix, name, path, tensor in list(plain_tensors(module)):
        if (prefix, name, path) not in shown:
            Unstored("attribute", prefix, name, path).put(module, tensor.to("meta"))


def ordinary_values(factory: Factory, model: Model, wanted: tuple[Unstored, ...]) -> Mapping[Unstored, torch.Tensor]:
    """Construct the module once more, with data, and return the wanted values.

    Parameters are not given data unless that decides over a value: because it is computed where a parameter lies, or
    because it is drawn at random after they were. Such a construction is made twice, and what differs then is no value
    that another process could find again: raises SettingsError naming it.
    """
    keep = any(one.kind == "parameter" for one in wanted)
    values, drew = _first(factory, model, keep, wanted)
    if drew and (differing := _drawn(factory, model, wanted)):
        raise SettingsError(
            f"model.factory {model.factory} makes {', '.join(differing[:10])} at random, other at every start, and no "
            f"checkpoint holds it; seed the constructor, or store it"
        )
    return values


def _first(
    factory: Factory, model: Model, keep_parameters: bool, wanted: tuple[Unstored, ...]
) -> tuple[dict[Unstored, torch.Tensor], bool]:
    """Return the wanted values, and whether random numbers were drawn for them or before them."""
    if not keep_parameters:
        # A constructor that reads its parameters' values fails without them, and then has its second try.
        with suppress(SettingsError):
            watch = DrawWatch()
            with watch:
                values, _ = _construct(factory, model, False, wanted)
            if not watch.drew and not any(value.is_meta for value in values.values()):
                return values, False
    values, _ = _construct(factory, model, True, wanted)
    return values, True


def _drawn(factory: Factory, model: Model, wanted: tuple[Unstored, ...]) -> list[str]:
    """Return the names of what two constructions make differently.

    What a hook computes anew before every call (weight normalisation) does not matter.
    """
    found = []
    for number in (1, 2):
        with other_start(number):
            found.append(_construct(factory, model, True, wanted))
    (one, module), (other, _) = found
    hooked = {prefix for prefix, part in module.named_modules(remove_duplicate=False) if part._forward_pre_hooks}
    return sorted(
        {
            place.name
            for place in wanted
            if not place.waived and place.prefix not in hooked and not same_bits(one[place], other[place])
        }
    )


def _construct(
    factory: Factory, model: Model, keep_parameters: bool, wanted: tuple[Unstored, ...]
) -> tuple[dict[Unstored, torch.Tensor], nn.Module]:
    module = construct_ordinarily(factory, model, keep_parameters)
    cast_floats(module, model)
    values = {one: one.value(module) for one in wanted}
    drop_parameters(module)
    return values, module
