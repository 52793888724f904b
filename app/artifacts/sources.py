"""What the model's code is, found without importing it: local files by content, installed packages by version."""

import ast
import hashlib
import importlib.machinery
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from app.errors import SettingsError


def describe_sources(factory: str) -> dict[str, str]:
    """Return module or package → digest or version for everything that the factory's module imports.

    Imports are read from the syntax tree, those inside functions included. A module that belongs to an installed
    distribution is told by its version; any other is digested and followed. Raises SettingsError when the factory's
    module cannot be found.
    """
    module = factory.partition(":")[0]
    if _locate(module) is None and _distribution(module) is None:
        raise SettingsError(f"model.factory = {factory!r}: no module {module} found; is it on PYTHONPATH?")
    found: dict[str, str] = {}
    installed: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        top = name.partition(".")[0]
        if name in found or top in sys.stdlib_module_names or top in installed:
            continue
        if distribution := _distribution(top):
            found[top] = distribution
            found.update(_required(distribution.partition(" ")[0]))
            installed.add(top)
            continue
        if parent := name.rpartition(".")[0]:
            todo.append(parent)  # importing a module runs every package around it
        path = _locate(name)
        if path is None:
            continue  # an attribute in `from package import attribute`, or an optional import that is not there
        source = path.read_bytes()
        found[name] = hashlib.sha256(source).hexdigest()
        todo += _imports(source, name, is_package=path.name == "__init__.py")
    return dict(sorted(found.items()))


def _imports(source: bytes, module: str, is_package: bool) -> Iterator[str]:
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _distribution(top: str) -> str | None:
    """Name and version of the installed package that a top-level module belongs to; None for code of one's own.

    Only what lies in a site directory counts: a package installed in editable form changes without its version.
    """
    spec = importlib.machinery.PathFinder.find_spec(top)
    places = [*(spec.submodule_search_locations or []), *([spec.origin] if spec.origin else [])] if spec else []
    if not any("site-packages" in place or "dist-packages" in place for place in places):
        return None
    if found := _installed(top):
        return f"{top} {found[0]}"
    # Slow (it reads every installed package's list of files), and needed only where the names differ.
    names = sorted(set(importlib.metadata.packages_distributions().get(top, ())))
    return ", ".join(f"{name} {found[0]}" for name in names if (found := _installed(name))) or None


def _required(distribution: str) -> dict[str, str]:
    """Return the installed versions of everything that a distribution requires, directly and further on."""
    found: dict[str, str] = {}
    todo = [distribution]
    while todo:
        _, requirements = _installed(todo.pop()) or ("", ())
        for requirement in requirements:
            name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
            if name in found or "extra ==" in requirement:
                continue
            if installed := _installed(name):
                found[name] = f"{name} {installed[0]}"
                todo.append(name)
    return found


@cache
def _installed(distribution: str) -> tuple[str, tuple[str, ...]] | None:
    """Return version and requirements of a distribution, or None; its metadata is parsed once."""
    try:
        metadata = importlib.metadata.metadata(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    return str(metadata["Version"]), tuple(metadata.get_all("Requires-Dist") or ())


def _locate(module: str) -> Path | None:
    """Find a module's file; parents are looked up by path, since `find_spec` would import them."""
    search: list[str] | None = None
    spec = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        finder_path = search if search is not None else sys.path
        spec = importlib.machinery.PathFinder.find_spec(name, finder_path)
        if spec is None:
            return None
        search = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None
