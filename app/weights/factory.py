"""Call a model's factory: on the meta device, or with data where a constructor cannot do without."""

import importlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from app.dtypes import FLOATING
from app.errors import SettingsError, WarmgateError
from app.settings import Model
from app.weights.dtypes import TORCH, name_of

Factory = Callable[..., nn.Module]


def find_factory(factory: str) -> Factory:
    """Import what `module:name` says; raises SettingsError."""
    module_name, _, path = factory.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            f"model.factory = {factory!r} cannot be imported ({error}); is its package installed and on PYTHONPATH?"
        ) from error
    return found  # type: ignore[no-any-return]


def call_factory(factory: Factory, model: Model) -> nn.Module:
    """Return the factory's module; raises SettingsError where it raises or returns what no weights can be given to."""
    try:
        module = factory(**model.kwargs)
    except WarmgateError:
        raise
    except Exception as error:
        raise SettingsError(f"model.factory {model.factory} raised {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise SettingsError(f"model.factory {model.factory} returned {type(module).__name__}, expected an nn.Module")
    if scripted := [name or "it" for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]:
        raise SettingsError(
            f"model.factory {model.factory}: {scripted[0]} is scripted; return the module it is made of"
        )
    if lazy := [n for n, t in (*module.named_parameters(), *module.named_buffers()) if is_lazy(t)]:
        raise SettingsError(f"model.factory {model.factory}: {lazy[0]} has no shape yet; give the module its sizes")
    return module


def cast_floats(module: nn.Module, model: Model) -> None:
    """Give every floating-point parameter and buffer the configured dtype; ties stay ties."""
    if model.cast is None:
        return
    dtype = TORCH[model.cast]
    shared: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            shared.setdefault(id(buffer), []).append((part, name))
    module._apply(lambda tensor: tensor.to(dtype) if name_of(tensor.dtype) in FLOATING else tensor)
    for (first, kept), *others in shared.values():
        for part, name in others:
            part._buffers[name] = first._buffers[kept]


def construct_ordinarily(factory: Factory, model: Model, keep_parameters: bool) -> nn.Module:
    """Construct the module with real buffers; each parameter is dropped to meta as it is registered, or kept.

    The largest parameter is allocated for a moment but its pages are not touched unless the constructor writes them
    before it registers them.
    """
    with nullcontext() if keep_parameters else _parameters_on_meta(), torch.device("cpu"):
        return call_factory(factory, model)


def construct_with_data(factory: Factory, model: Model) -> nn.Module:
    """Construct the module on the CPU: without its parameters' data where the constructor can do without them."""
    with suppress(SettingsError):
        return construct_ordinarily(factory, model, keep_parameters=False)
    return construct_ordinarily(factory, model, keep_parameters=True)


def drop_parameters(module: nn.Module) -> None:
    """Move parameters to meta; those that are one object stay one."""
    dropped: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_meta:
                part._parameters[name] = dropped.setdefault(id(parameter), _on_meta_device(parameter))


def _on_meta_device(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Register stand-ins on meta; raises SettingsError where the constructor has kept a parameter's data elsewhere."""
    register, mine = nn.Module.register_parameter, threading.get_ident()
    # A parameter that is registered twice is a tie: both get the same stand-in. Weak, or all data would be kept.
    seen: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}
    given_away: list[StorageWeakRef] = []

    def stand_in(parameter: nn.Parameter) -> nn.Parameter:
        known = seen.get(id(parameter))
        if known is None or known[0]() is not parameter:
            known = seen[id(parameter)] = (weakref.ref(parameter), _on_meta_device(parameter))
            given_away.append(StorageWeakRef(parameter.untyped_storage()))
        return known[1]

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        here = param is not None and not param.is_meta and threading.get_ident() == mine
        register(self, name, stand_in(param) if here and param is not None else param)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
    if not all(reference.expired() for reference in given_away):
        raise SettingsError("a parameter is used under another name than its own")
