"""Export the skeleton with dynamic dimensions and build AOTInductor packages with external constants."""

import inspect
import json
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.export.graph_signature import InputKind

from app.arrays import to_tensor
from app.artifacts import CONSTANTS
from app.buckets import FORWARD, Bucket
from app.child import Work
from app.child.blank import Blank
from app.engines._container import Container
from app.engines.eager import method_of
from app.errors import ArtifactError
from app.paths import ModelPath
from app.samples import example_sizes, sample_inputs
from app.settings import Settings
from app.weights import Skeleton
from app.weights.dtypes import same_bits

OPTIONS = {
    # External constants: the code is one for every set of weights, and the weights exist once in memory.
    "aot_inductor.package_constants_in_so": False,
    # Else vectors of up to eight elements are written into the code as numbers: here, as whatever the memory held.
    "always_keep_tensor_constants": True,
    # Else what is computed from a weight of one element alone (a temperature, a scale) is computed now, from nothing.
    "joint_graph_constant_folding": False,
    # Precompiled headers pay from the third compilation on; a build has two, on a machine that is new each time
    # (MiniLM: 38 s with them, 22 s without), and making them needs the openssl program.
    "aot_inductor.precompile_headers": False,
    "cpp_cache_precompile_headers": False,
}


def work(given: Work) -> dict[str, Any]:
    """Fill the directory with packages and the constants that no checkpoint holds; return the manifest's content."""
    settings, directory, tell = given.settings, given.directory, given.tell
    blank = Blank.build(settings)
    skeleton = blank.skeleton
    if views := sorted(alias.name for alias in skeleton.aliases if not alias.same):
        raise ArtifactError(
            f"{', '.join(views)} look(s) into weights, which code compiled without weights cannot follow"
        )
    constants = {n: b for n, b in skeleton.module.named_buffers(remove_duplicate=False) if not b.is_meta}
    constants |= {n: p for n, p in skeleton.module.named_parameters(remove_duplicate=False) if not p.is_meta}
    blank.give_memory()
    tell()
    packages: list[dict[str, Any]] = []
    for path, bucket in _wanted(settings):
        number = len(packages)
        program = _export(path, skeleton.module, bucket)
        tell()
        library = f"model-{number}.so"
        proxied = _compile(program, given.scratch / f"{number}.pt2", directory / library)
        lifted = {_in_the_model(name, path): value for name, value in program.constants.items()}
        names = {
            own: _kept(_in_the_model(name, path), lifted, constants, number)
            for own, name in Container.open(directory / library).constants().items()
        }
        packages.append(
            {
                "path": path.name,
                "bucket": bucket and bucket.name,
                "library": library,
                "constants": names,
                "proxied": proxied,
            }
        )
    tell()
    _check_known(skeleton, packages, constants)
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in constants.items()}, directory / CONSTANTS)
    tell()
    return blank.manifest(
        "aot",
        [{"name": "aot-package", "count": len(packages)}],
        packages=packages,
        constants=sorted(constants),
        constant_bytes=sum(constants[name].nbytes for name in constants.keys() - _names(skeleton)),
    )


def _wanted(settings: Settings) -> list[tuple[ModelPath, Bucket | None]]:
    """Return what is compiled: each path once for its whole range, or once a bucket."""
    if settings.compile.specialize == "bucket":
        return [(path, bucket) for path in settings.model_paths for bucket in path.buckets]
    return [(path, None) for path in settings.model_paths]


class _Method(nn.Module):  # type: ignore[misc]
    """A method of a module as the forward of another, since only a forward is exported."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.module = module
        self._name = name

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Call the method."""
        return method_of(self.module, self._name)(*inputs)


def _in_the_model(name: str, path: ModelPath) -> str:
    """Return what the model itself calls a tensor that an exported program names."""
    return name if path.name == FORWARD else name.removeprefix("module.")


def _kept(name: str, lifted: Mapping[str, Any], constants: dict[str, torch.Tensor], number: int) -> str:
    """Keep a value that export has lifted out of the code, if the name is of one; return the name it is kept by.

    Programs number what they lift, so the same name may stand for another value in another package.
    """
    if name in lifted and name in constants and not same_bits(constants[name], lifted[name]):
        name, lifted = f"{name}@{number}", {f"{name}@{number}": lifted[name]}
    if name in lifted:
        constants.setdefault(name, lifted[name])
    return name


def _export(path: ModelPath, model: nn.Module, bucket: Bucket | None) -> Any:
    module = model if path.name == FORWARD else _Method(model, path.name)
    sizes = dict(bucket.sizes) if bucket else example_sizes(path.dimensions)
    arrays = sample_inputs(path.inputs, sizes, seed="export")
    arguments = tuple(to_tensor(array) for array in arrays.values())
    symbols = (
        {}
        if bucket
        else {d.name: torch.export.Dim(d.name, min=d.min, max=d.max) for d in path.dimensions if not d.fixed}
    )
    dynamic = tuple(
        {axis: symbols[size] for axis, size in enumerate(spec.shape) if isinstance(size, str) and size in symbols}
        for spec in path.inputs
    )
    with torch.no_grad():
        shapes = _as_the_forward_takes(module, dynamic) if symbols else None
        program = torch.export.export(module, arguments, dynamic_shapes=shapes, strict=False)
    if changed := _changed_state(program):
        names = ", ".join(_in_the_model(name, path) for name in changed)
        raise ArtifactError(f"the model's {path.name} changes its own state ({names}), which lies in mapped files")
    _take_for_buffers(program)
    return program


def _take_for_buffers(program: Any) -> None:
    """Make buffers of tensors that stand in the code as numbers: compilation keeps the names of buffers alone."""
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR:
            spec.kind, spec.persistent = InputKind.BUFFER, False


def _changed_state(program: Any) -> list[str]:
    """Return buffers and parameters that a run writes to; only the functional form of the graph names them.

    Making that takes seconds, so it is made where an operator of the graph writes to anything at all.
    """
    schemas = [getattr(node.target, "_schema", None) for node in program.graph.nodes]
    if not any(schema is not None and schema.is_mutable for schema in schemas):
        return []
    signature = program.run_decompositions({}).graph_signature
    kinds = ("buffers_to_mutate", "parameters_to_mutate")  # the second is not in every version of torch
    return sorted({str(name) for kind in kinds for name in getattr(signature, kind, {}).values()})


def _as_the_forward_takes(module: nn.Module, dynamic: tuple[Any, ...]) -> tuple[Any, ...]:
    """Nest what `*tensors` collects: export wants the shapes as the forward's own signature groups the arguments."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    for position, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return (*dynamic[:position], dynamic[position:])
    return dynamic


def _compile(program: Any, package: Path, library: Path) -> bool:
    """Write the shared library beside which an executor's node list stands where one is needed; return whether."""
    import torch._inductor

    torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=OPTIONS)
    with zipfile.ZipFile(package) as archive:
        # Unpacked once here: package loaders unzip into a temporary directory at every start.
        members = [name for name in archive.namelist() if name.endswith(".wrapper.so")]
        if len(members) != 1:
            raise ArtifactError(f"the package holds {len(members)} libraries, expected one: {archive.namelist()}")
        with archive.open(members[0]) as source, library.open("wb") as target:
            shutil.copyfileobj(source, target)
        nodes = members[0].removesuffix(".so") + ".json"
        if nodes not in archive.namelist():
            return False
        content = archive.read(nodes)
    _check_operators(content)
    library.with_suffix(".json").write_bytes(content)
    return True


def _check_operators(nodes: bytes) -> None:
    """Refuse operators that torch does not bring: nothing imports the library that registers them on a restart."""
    targets = {row["node"]["target"] for row in json.loads(nodes)["nodes"]}
    if foreign := sorted(target for target in targets if not target.startswith("aten::")):
        raise ArtifactError(
            f"the model calls custom operators ({', '.join(foreign)}), which compiled code cannot restore"
        )


def _names(skeleton: Skeleton) -> frozenset[str]:
    return frozenset(tensor.name for tensor in skeleton.table.tensors)


def _check_known(skeleton: Skeleton, packages: list[dict[str, Any]], constants: Mapping[str, Any]) -> None:
    known = _names(skeleton) | constants.keys()
    for package in packages:
        if unknown := sorted(set(package["constants"].values()) - known):
            raise ArtifactError(f"the compiled code wants {', '.join(unknown)}, which neither model nor export holds")
