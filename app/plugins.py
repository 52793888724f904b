"""Devices, checkpoint formats and engines are found by file name and refused at load, with the reason."""

import importlib
import inspect
import pkgutil
from typing import Any, TypeVar, cast

from app.errors import PluginError

P = TypeVar("P")


def names(package: str) -> tuple[str, ...]:
    """Return the names of the plugins in a package: its modules that define one."""
    paths = importlib.import_module(package).__path__
    return tuple(sorted(m.name for m in pkgutil.iter_modules(paths) if not m.name.startswith("_")))


def load(package: str, name: str, protocol: type[P]) -> type[P]:
    """Return the one class in `package.name` that has every member of `protocol`; raises PluginError."""
    if name not in names(package):
        raise PluginError(f"no plugin {name!r} in {package}; there are {', '.join(names(package))}")
    try:
        module = importlib.import_module(f"{package}.{name}")
    except ImportError as error:
        raise PluginError(f"{package}.{name} cannot be imported: {error}; is its library installed?") from error
    classes = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    marked = [c for c in classes if getattr(c, "plugin", False)]
    if len(marked) != 1:
        raise PluginError(f"{module.__name__} must define one class with `plugin = True`, it defines {len(marked)}")
    if lacking := sorted(_members(protocol) - set(dir(marked[0]))):
        raise PluginError(f"{module.__name__}.{marked[0].__name__} lacks {', '.join(lacking)} of {protocol.__name__}")
    return cast("type[P]", marked[0])


def _members(protocol: type[Any]) -> set[str]:
    declared = set(protocol.__annotations__) | {n for n, v in vars(protocol).items() if callable(v) or _is_member(v)}
    return {name for name in declared if not name.startswith("_")}


def _is_member(value: object) -> bool:
    return isinstance(value, property | classmethod | staticmethod)
