"""Imports point down only, and what belongs to one layer is named nowhere else: read from the source, not run."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

import app

ROOT = Path(app.__file__).parent

# From the bottom to the top; an import goes to a lower rank or stays in its own. Every module has its place here.
RANKS: tuple[tuple[str, ...], ...] = (
    ("app", "app.dtypes", "app.errors", "app.private", "app.units"),
    (
        "app.arrays",
        "app.buckets",
        "app.configure",
        "app.contradictions",
        "app.differences",
        "app.environment",
        "app.identity",
        "app.keys",
        "app.paths",
        "app.plan",
        "app.plan_values",
        "app.samples",
        "app.sampling",
        "app.servable",
        "app.settings",
        "app.validation",
    ),
    (
        "app.budget",
        "app.causes",
        "app.codecs",
        "app.comparison",
        "app.critical",
        "app.footprint",
        "app.graph",
        "app.lanes",
        "app.ledger",
        "app.logs",
        "app.numerics",
        "app.plan_file",
        "app.plan_report",
        "app.plan_text",
        "app.plugins",
        "app.progress",
        "app.readiness",
        "app.report",
        "app.report_file",
        "app.report_text",
        "app.runtime",
        "app.sentinel",
        "app.startup",
        "app.traces",
    ),
    (
        "app.artifacts",
        "app.artifacts.collect",
        "app.artifacts.files",
        "app.artifacts.flight",
        "app.artifacts.golden",
        "app.artifacts.holder",
        "app.artifacts.inputs",
        "app.artifacts.opening",
        "app.artifacts.lease",
        "app.artifacts.prune",
        "app.artifacts.seal",
        "app.artifacts.sources",
        "app.artifacts.store",
        "app.artifacts.trust",
        "app.artifacts.writers",
        "app.checkpoints",
        "app.checkpoints._file",
        "app.checkpoints._index",
        "app.checkpoints._pickle",
        "app.checkpoints._torch_archive",
        "app.checkpoints.dcp",
        "app.checkpoints.safetensors",
        "app.checkpoints.torch_zip",
        "app.child",
        "app.child.failures",
        "app.devices",
        "app.devices.cpu",
        "app.weights",
        "app.weights.aliases",
        "app.weights.attributes",
        "app.weights.assigning",
        "app.weights.choosing",
        "app.weights.converting",
        "app.weights.digests",
        "app.weights.direct",
        "app.weights.disk",
        "app.weights.dtypes",
        "app.weights.factory",
        "app.weights.filesystems",
        "app.weights.install",
        "app.weights.layout",
        "app.weights.memory",
        "app.weights.ordinary",
        "app.weights.page_cache",
        "app.weights.plan",
        "app.weights.randomness",
        "app.weights.reading",
        "app.weights.samples",
        "app.weights.segments",
        "app.weights.skeleton",
        "app.weights.watch",
    ),
    (
        "app.engines",
        "app.engines._compiler",
        "app.engines._container",
        "app.engines._inductor",
        "app.engines.aot",
        "app.engines.eager",
        "app.engines.jit",
    ),
    (
        "app.serving",
        "app.serving.batching",
        "app.serving.coding",
        "app.serving.company",
        "app.serving.encoding",
        "app.serving.executor",
        "app.serving.forward",
        "app.serving.requests",
        "app.serving.runs",
    ),
    (
        # What the child process runs: beside the stages that start it, and never imported by them.
        "app.child.__main__",
        "app.child.blank",
        "app.child.build",
        "app.child.jit",
        "app.child.reference",
        "app.stages",
        "app.stages.acquire_device",
        "app.stages.bind_engine",
        "app.stages.build_artifact",
        "app.stages.build_skeleton",
        "app.stages.compute_reference",
        "app.stages.find_artifact",
        "app.stages.import_runtime",
        "app.stages.install_weights",
        "app.stages.load_codec",
        "app.stages.open_checkpoint",
        "app.stages.preflight",
        "app.stages.prove_answers",
        "app.stages.prove_codec",
        "app.stages.read_weights",
        "app.stages.rehearse_requests",
        "app.stages.warm_buckets",
    ),
    (
        "app.commands",
        "app.console",
        "app.doors",
        "app.http",
        "app.http.answers",
        "app.http.edge",
        "app.http.gate",
        "app.http.infer",
        "app.http.oip",
        "app.http.api_keys",
        "app.http.compression",
        "app.http.connections",
        "app.http.incoming",
        "app.http.model_config",
        "app.http.statistics",
        "app.http.tensors",
        "app.http.wire",
        "app.http.openapi",
        "app.http.openapi_inference",
        "app.http.openapi_paths",
        "app.http.openapi_responses",
        "app.http.openapi_schemas",
        "app.http.parameters",
        "app.http.probes",
        "app.http.rehearsal",
        "app.http.status",
        "app.headers",
        "app.inspection",
        "app.inspection_artifact",
        "app.metrics",
        "app.repack",
        "app.signing",
        "app.status",
    ),
    ("app.process_clock", "app.swap"),
    ("app.sidecar",),
    ("app.draining", "app.endings", "app.server"),
    ("app.__main__",),
)
RANK = {module: number for number, modules in enumerate(RANKS) for module in modules}

MAY_NAME_WEB_FRAMEWORK = {
    "app.draining",
    "app.server",
    *(module for module in RANK if module.partition(".")[2].startswith("http")),
}
WEB_FRAMEWORK = {"fastapi", "starlette", "uvicorn"}

# Modules that are only imported once importing torch has been a stage, or in the child.
MAY_IMPORT_TORCH = {
    "app.child.blank",
    "app.child.build",
    "app.child.jit",
    "app.child.reference",
    "app.devices.cpu",
    "app.engines._compiler",
    "app.engines._container",
    "app.engines._inductor",
    "app.engines.aot",
    "app.engines.eager",
    "app.engines.jit",
    "app.weights.aliases",
    "app.weights.attributes",
    "app.weights.assigning",
    "app.weights.randomness",
    "app.weights.converting",
    "app.weights.factory",
    "app.weights.dtypes",
    "app.weights.install",
    "app.weights.ordinary",
    "app.weights.skeleton",
}
MAY_READ_ENVIRONMENT = {"app.configure", "app.environment"}
MAY_NAME_ACCELERATORS = {"app.devices", "app.devices.cpu"}


@dataclass(frozen=True)
class Source:
    module: str
    file: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @cached_property
    def imports(self) -> tuple["Import", ...]:
        return tuple(imports_of(self))


@dataclass(frozen=True)
class Import:
    """One name that is imported; `at_load`: importing the module runs it."""

    line: int
    name: str
    at_load: bool


def read_sources() -> tuple[Source, ...]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Source(module, str(path.relative_to(ROOT.parent)), path.read_text()))
    return tuple(found)


SOURCES = read_sources()


def imports_of(source: Source) -> Iterator[Import]:
    """Yield what a module imports; `from package import name` gives the package and, where it is one, the module."""

    def visit(nodes: Sequence[ast.AST], at_load: bool) -> Iterator[Import]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (Import(node.lineno, alias.name, at_load) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{source.file}:{node.lineno}: a relative import"
                base = node.module or ""
                below = [f"{base}.{alias.name}" for alias in node.names]
                modules = [name for name in below if name in RANK]
                if len(modules) < len(below) or base not in RANK:
                    yield Import(node.lineno, base, at_load)
                yield from (Import(node.lineno, name, at_load) for name in modules)
                if base not in RANK:
                    yield from (Import(node.lineno, name, at_load) for name in below)
            else:
                inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_typing_only(node)
                yield from visit(list(ast.iter_child_nodes(node)), at_load and not inside)

    yield from visit(source.tree.body, at_load=True)


def _is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def dotted(node: ast.Attribute | ast.Name) -> str:
    """Return `a.b` of a plain attribute of a name, `a` of a name, nothing of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else ""


def is_of(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def unplaced(source: Source) -> Iterator[str]:
    if source.module not in RANK:
        yield f"{source.file}:1: {source.module} has no place in the table of ranks"


def upward(source: Source) -> Iterator[str]:
    mine = RANK.get(source.module, -1)
    for one in source.imports:
        if is_of(one.name, "app") and RANK.get(one.name, len(RANKS)) > mine:
            yield f"{source.file}:{one.line}: {source.module} imports {one.name}, which stands above it"


def web_framework(source: Source) -> Iterator[str]:
    for one in source.imports:
        if is_of(one.name, *WEB_FRAMEWORK) and source.module not in MAY_NAME_WEB_FRAMEWORK:
            yield f"{source.file}:{one.line}: {source.module} imports {one.name}"


def torch_at_load(source: Source) -> Iterator[str]:
    for one in source.imports:
        if one.at_load and is_of(one.name, "torch", "safetensors.torch") and source.module not in MAY_IMPORT_TORCH:
            yield f"{source.file}:{one.line}: {source.module} imports {one.name} when it is loaded"


def accelerators(source: Source) -> Iterator[str]:
    if source.module in MAY_NAME_ACCELERATORS:
        return
    for one in source.imports:
        if is_of(one.name, "torch.cuda", "torch.npu", "torch_npu"):
            yield f"{source.file}:{one.line}: {source.module} imports {one.name}"
    for node in source.nodes:
        if isinstance(node, ast.Attribute | ast.Name) and dotted(node) in {"torch.cuda", "torch.npu", "torch_npu"}:
            yield f"{source.file}:{node.lineno}: {source.module} names {dotted(node)}"


def environment(source: Source) -> Iterator[str]:
    if source.module in MAY_READ_ENVIRONMENT:
        return
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for one in source.imports:
        if one.name in {f"os.{name}" for name in names}:
            yield f"{source.file}:{one.line}: {source.module} imports {one.name}"
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and node.attr in names and dotted(node) == f"os.{node.attr}":
            yield f"{source.file}:{node.lineno}: {source.module} reads {dotted(node)}"


Rule = Callable[[Source], Iterator[str]]


def violations(rule: Rule) -> list[str]:
    return [violation for source in SOURCES for violation in rule(source)]


def test_every_module_has_its_place_in_the_table() -> None:
    assert violations(unplaced) == []


def test_the_table_names_no_module_that_is_gone() -> None:
    assert sorted(RANK.keys() - {source.module for source in SOURCES}) == []


def test_imports_point_down() -> None:
    assert violations(upward) == []


def test_modules_of_one_rank_do_not_import_each_other_in_a_circle() -> None:
    edges = {
        source.module: {one.name for one in source.imports if one.at_load and one.name in RANK} - {source.module}
        for source in SOURCES
    }

    order = list(graphlib.TopologicalSorter(edges).static_order())

    assert sorted(order) == sorted(edges)


def test_the_web_framework_is_named_only_at_the_edge() -> None:
    assert violations(web_framework) == []


def test_torch_is_imported_at_load_only_below_the_stage_that_imports_it() -> None:
    assert violations(torch_at_load) == []


def test_accelerators_are_named_only_by_devices() -> None:
    assert violations(accelerators) == []


def test_the_environment_is_read_only_where_configuration_and_children_are_made() -> None:
    assert violations(environment) == []


@pytest.mark.parametrize(
    ("rule", "module", "text", "found"),
    [
        (unplaced, "app.utils", "", ["x.py:1: app.utils has no place in the table of ranks"]),
        (
            upward,
            "app.errors",
            "import json\nfrom app.settings import Settings\n",
            ["x.py:2: app.errors imports app.settings, which stands above it"],
        ),
        (
            upward,
            "app.weights",
            "def late():\n    from app import engines, plugins\n",
            ["x.py:2: app.weights imports app.engines, which stands above it"],
        ),
        (upward, "app.http", "import app.nowhere\n", ["x.py:1: app.http imports app.nowhere, which stands above it"]),
        (web_framework, "app.metrics", "from fastapi import FastAPI\n", ["x.py:1: app.metrics imports fastapi"]),
        (web_framework, "app.sidecar", "import uvicorn.config\n", ["x.py:1: app.sidecar imports uvicorn.config"]),
        (torch_at_load, "app.server", "import torch\n", ["x.py:1: app.server imports torch when it is loaded"]),
        (
            torch_at_load,
            "app.stages",
            "try:\n    from torch.nn import Module\nexcept ImportError: ...\n",
            ["x.py:2: app.stages imports torch.nn when it is loaded"],
        ),
        (
            torch_at_load,
            "app.http",
            "from safetensors.torch import load\n",
            ["x.py:1: app.http imports safetensors.torch when it is loaded"],
        ),
        (torch_at_load, "app.http", "if TYPE_CHECKING:\n    import torch\ndef late():\n    import torch\n", []),
        (
            accelerators,
            "app.engines",
            "def f():\n    return torch.cuda.is_available()\n",
            ["x.py:2: app.engines names torch.cuda"],
        ),
        (accelerators, "app.engines", "import torch_npu\n", ["x.py:1: app.engines imports torch_npu"]),
        (environment, "app.child", "x = os.environ['A']\n", ["x.py:1: app.child reads os.environ"]),
        (environment, "app.child", "x = os.getenv('A')\n", ["x.py:1: app.child reads os.getenv"]),
        (environment, "app.child", "from os import environ\n", ["x.py:1: app.child imports os.environ"]),
    ],
)
def test_each_rule_finds_what_it_forbids_by_file_and_line(rule: Rule, module: str, text: str, found: list[str]) -> None:
    violations_found = list(rule(Source(module, "x.py", text)))

    assert violations_found[:1] == found


TORCH_FREE = ("app.stages", "app.child", "app.sidecar", "app.server", "app.endings", "app.commands", "app.__main__")


def test_importing_the_server_and_the_stages_does_not_import_torch() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {TORCH_FREE}:\n"
        "    importlib.import_module(name)\n"
        "    print(name, 'torch' in sys.modules)"
    )

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.splitlines() == [f"{name} False" for name in TORCH_FREE]
