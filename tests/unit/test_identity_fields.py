"""One table over all fields of a real identity: what changes a field gives a miss that names it, and nothing else does.

A field without a row fails, so a new one cannot be forgotten here.
"""

import ast
import fnmatch
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import app
from app.artifacts import Missed, Restored, collect
from app.artifacts.seal import seal
from app.artifacts.store import Store
from app.checkpoints import open_checkpoint
from app.devices.cpu import Cpu
from app.differences import flat
from app.identity import ArtifactIdentity
from app.numerics import numerics
from app.runtime import import_torch
from app.settings import DeviceSettings, Settings
from tests.unit.written import Tensors, filled, safetensors_bytes

VERSIONS = import_torch().versions
FACTORY = "from own_near import near\nimport yaml\n\ndef build(**kwargs):\n    raise RuntimeError('this was run')\n"
SHAPES: Tensors = {"a.weight": filled("F32", 4, 3), "a.bias": filled("F32", 4)}


class World:
    """A machine, a configuration and files, of which a test changes one thing."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.patch = root, monkeypatch
        self.checkpoint, self.settings_file, self.store = root / "model", root / "own.json", Store(root / "store")
        self.checkpoint.mkdir()
        self.write("own_factory.py", FACTORY)
        self.write("own_near.py", "near = 1\n")
        self.write("own.json", "{}")
        self.write("model/config.json", "{}")
        self.weights(SHAPES)
        self.device: dict[str, Any] = {"kind": "cpu", "index": 0, "threads": 2}
        self.versions: dict[str, str] = dict(VERSIONS)
        self.engine = "aot"
        self.settings: dict[str, Any] = {
            "model": {
                "name": "own",
                "factory": "own_factory:build",
                "kwargs": {"width": 3, "file": str(self.settings_file), "beside": str(self.checkpoint / "config.json")},
                "checkpoint": str(self.checkpoint),
                "waive": {"missing": ["x"]},
            },
            "inputs": [{"name": "x", "datatype": "FP32", "shape": ["batch", 3], "pad": 0}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": ["batch", 4]}],
            "paths": {
                "twin": {
                    "inputs": [{"name": "x", "datatype": "FP32", "shape": [3]}],
                    "outputs": [{"name": "y", "datatype": "FP32", "shape": [4]}],
                }
            },
            "dimensions": {"batch": {"max": 16, "buckets": [2, 8]}},
            "compile": {"artifacts": str(self.store.path)},
        }

    def write(self, name: str, text: str) -> None:
        (self.root / name).write_text(text)

    def weights(self, tensors: Tensors) -> None:
        (self.checkpoint / "model.safetensors").write_bytes(safetensors_bytes(tensors))

    def set(self, path: str, value: Any) -> None:
        *sections, name = path.split(".")
        place = self.settings
        for section in sections:
            place = place[int(section)] if isinstance(place, list) else place.setdefault(section, {})
        place[name] = value

    def identity(self) -> ArtifactIdentity:
        settings = Settings(**self.settings)
        checkpoint = open_checkpoint(settings.model.checkpoint)
        checkpoint.close()
        device = Cpu.acquire(DeviceSettings(**self.device))
        runtime = {**self.versions, "numerics": numerics()}
        return collect.collect(settings, checkpoint, runtime, device.fingerprint(), self.engine)

    def publish(self) -> None:
        identity = self.identity()
        with self.store.workspace() as workspace:
            payload = workspace / "payload"
            payload.mkdir()
            for name in ("code.so", "constants.safetensors"):
                (payload / name).write_bytes(b"code")
            seal(payload, identity, {"packages": [{"library": "code.so"}], "factory_files": {}})
            self.store.publish(payload, identity)

    def find(self) -> Restored | Missed:
        return self.store.find(self.identity(), self.checkpoint)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.syspath_prepend(tmp_path)
    for name in [n for n in os.environ if n.startswith(("TORCH", "AOT", "ONEDNN", "DNNL", "MKL", "ATEN"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "0")
    threads = torch.get_num_threads()
    yield World(tmp_path, monkeypatch)
    torch.set_num_threads(threads)


Change = Callable[[World], object]


def setting(path: str, value: Any) -> Change:
    return lambda world: world.set(path, value)


def version(name: str, value: str) -> Change:
    return lambda world: world.versions.update({name: value})


def told_by(owner: Any, name: str, value: Any) -> Change:
    """Another machine, whose standard library tells another value."""
    return lambda world: world.patch.setattr(owner, name, lambda *_: value)


def switch(name: str, value: Any) -> Change:
    """A switch of another processor: what torch or the processor's flags would tell there."""

    def change(world: World) -> None:
        found = {**Cpu(2).fingerprint(), name: value}
        world.patch.setattr(Cpu, "fingerprint", lambda _: found)

    return change


FEATURES = Cpu(2).fingerprint()["features"].split()


def flags(world: World) -> None:
    """A processor with one kind of instructions less and another more."""
    world.patch.setattr("app.devices.cpu._cpuinfo", lambda: {"flags": " ".join([*FEATURES[1:], "zzz"])})


def package(world: World) -> None:
    found = importlib.metadata.metadata("PyYAML")
    found.replace_header("Version", "0.1")
    world.patch.setattr("app.artifacts.sources._installed", lambda name: ("0.1", ()) if name == "PyYAML" else None)


def own_code(world: World) -> None:
    """Another version of one module of this program."""
    read = Path.read_bytes
    changed = Path(app.__file__).parent / "engines" / "aot.py"
    world.patch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" if path == changed else read(path))


def numeric(change: Callable[[], object], undo: Callable[[], object]) -> Change:
    """Throw one of torch's switches for the rest of the test."""

    def thrown(world: World) -> None:
        undone.append(undo)
        change()

    return thrown


undone: list[Callable[[], object]] = []


@pytest.fixture(autouse=True)
def switches_back() -> Iterator[None]:
    yield
    while undone:
        undone.pop()()


def backend(owner: Any, name: str, value: Any) -> Change:
    before = getattr(owner, name)
    return numeric(lambda: setattr(owner, name, value), lambda: setattr(owner, name, before))


def autocast(on: bool) -> None:
    torch.set_autocast_enabled("cpu", on)


def matmul_precision_back() -> None:
    """Undo it wholly: the old switch leaves its mark in the new ones."""
    torch.set_float32_matmul_precision("highest")
    for kind in ("cuda", "mkldnn"):
        torch._C._set_fp32_precision_setter(kind, "matmul", "none")


MATMUL = torch.backends.cuda.matmul

# fields (glob) → what changes them, and the words that the miss says
ROWS: dict[str, tuple[Change, str]] = {
    "torch": (version("torch", "2.14.1 (0)"), f"torch {VERSIONS['torch']} → 2.14.1 (0)"),
    "torch_code": (version("torch_code", "0" * 64), "torch's own code changed"),
    "triton": (version("triton", "3.9"), "triton absent → 3.9"),
    "numpy": (version("numpy", "9.0"), f"numpy {VERSIONS['numpy']} → 9.0"),
    "cxx_library": (
        version("cxx_library", "libstdc++.so.7"),
        f"C++ library {VERSIONS['cxx_library']} → libstdc++.so.7",
    ),
    "python": (told_by(platform, "python_version", "3.99.0"), f"python {platform.python_version()} → 3.99.0"),
    "python_implementation": (
        told_by(platform, "python_implementation", "PyPy"),
        f"python implementation {platform.python_implementation()} → PyPy",
    ),
    "python_abi": (
        told_by(sysconfig, "get_config_var", "cpython-399"),
        f"python ABI {sysconfig.get_config_var('SOABI')} → cpython-399",
    ),
    "c_library": (
        told_by(platform, "libc_ver", ("musl", "1.2")),
        f"C library {' '.join(platform.libc_ver())} → musl 1.2",
    ),
    "device.kind": (switch("kind", "cuda"), "device kind cpu → cuda"),
    "device.architecture": (
        told_by(platform, "machine", "riscv64"),
        f"processor architecture {platform.machine()} → riscv64",
    ),
    "device.capability": (
        switch("capability", "SVE"),
        f"processor capability {torch.backends.cpu.get_cpu_capability()} → SVE",
    ),
    "device.features": (flags, f"the processor lacks {FEATURES[0]} and has zzz"),
    "device.threads": (lambda world: world.device.update(threads=3), "threads 2 → 3"),
    "environment.*": (
        lambda world: world.patch.setenv("TORCHINDUCTOR_FREEZING", "1"),
        "variable TORCHINDUCTOR_FREEZING 0 → 1",
    ),
    "warmgate.version": (lambda world: world.patch.setattr(app, "__version__", "9"), f"warmgate {app.__version__} → 9"),
    "warmgate.code": (own_code, "warmgate's own code changed"),
    "compile.engine": (lambda world: setattr(world, "engine", "jit"), "engine aot → jit"),
    "compile.specialize": (setting("compile.specialize", "bucket"), "compile.specialize none → bucket"),
    "model.factory": (
        setting("model.factory", "own_factory:other"),
        "model.factory own_factory:build → own_factory:other",
    ),
    "model.kwargs.*": (setting("model.kwargs.width", 4), "argument width 3 → 4"),
    "model.kwargs_files.*": (lambda world: world.write("own.json", "[]"), "file {root}/own.json changed"),
    "model.waive_missing": (setting("model.waive.missing", ["y"]), "model.waive.missing x → y"),
    "model.dtype": (setting("model.dtype", "bfloat16"), "model.dtype null → bfloat16"),
    "model.config": (lambda world: world.write("model/config.json", "[]"), "config.json changed"),
    "model.sources.own_*": (lambda world: world.write("own_near.py", "near = 2\n"), "model source own_near changed"),
    "model.sources.yaml": (package, f"package yaml PyYAML {importlib.metadata.version('PyYAML')} → PyYAML 0.1"),
    "inputs": (setting("inputs.0.name", "z"), "inputs x FP32['batch', 3] → z FP32['batch', 3]"),
    "outputs": (setting("outputs.0.shape", ["batch", 5]), "outputs y FP32['batch', 4] → y FP32['batch', 5]"),
    "dimensions.*": (setting("dimensions.batch.max", 32), "dimension batch 1..16 → 1..32"),
    "example_sizes.*": (setting("dimensions.batch.buckets", [2, 16]), "example size of batch 8 → 16"),
    "buckets": (setting("compile.specialize", "bucket"), "buckets any → batch=2, batch=8"),
    "paths.*": (
        setting("paths.twin.inputs.0.shape", [5]),
        "path twin.inputs x FP32[3] → x FP32[5]",
    ),
    "tensors.*": (
        lambda world: world.weights({**SHAPES, "a.weight": filled("F32", 4, 5)}),
        "tensor a.weight F32[4,3] → F32[4,5]",
    ),
    "numerics.default_dtype": (
        numeric(lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
        "numerics default_dtype float32 → float64",
    ),
    "numerics.default_device": (
        numeric(lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
        "numerics default_device cpu → meta",
    ),
    "numerics.float32_matmul_precision": (
        numeric(lambda: torch.set_float32_matmul_precision("high"), matmul_precision_back),
        "numerics float32_matmul_precision highest → high",
    ),
    "numerics.deterministic": (
        numeric(lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)),
        "numerics deterministic false → true",
    ),
    "numerics.deterministic_warn_only": (
        numeric(
            lambda: torch.use_deterministic_algorithms(True, warn_only=True),
            lambda: torch.use_deterministic_algorithms(False),
        ),
        "numerics deterministic_warn_only false → true",
    ),
    "numerics.autocast": (
        numeric(lambda: autocast(True), lambda: autocast(False)),
        "numerics autocast off → torch.bfloat16",
    ),
    "numerics.flush_denormal": (
        numeric(lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
        "numerics flush_denormal false → true",
    ),
    "numerics.mkldnn": (
        numeric(lambda: torch._C._set_mkldnn_enabled(False), lambda: torch._C._set_mkldnn_enabled(True)),
        "numerics mkldnn True → False",
    ),
    "numerics.mkldnn_deterministic": (
        numeric(lambda: torch._C._set_mkldnn_deterministic(True), lambda: torch._C._set_mkldnn_deterministic(False)),
        "numerics mkldnn_deterministic False → True",
    ),
    "numerics.nnpack": (
        numeric(lambda: torch._C._set_nnpack_enabled(False), lambda: torch._C._set_nnpack_enabled(True)),
        "numerics nnpack True → False",
    ),
    "numerics.quantized_engine": (backend(torch.backends.quantized, "engine", "qnnpack"), "numerics quantized_engine "),
    # This processor may have no such arithmetic, and then refuses the switch.
    "numerics.fp16_reduction_cpu": (
        told_by(torch._C, "_get_cpu_allow_fp16_reduced_precision_reduction", True),
        "numerics fp16_reduction_cpu False → True",
    ),
    "numerics.fp16_reduction_gpu": (
        backend(MATMUL, "allow_fp16_reduced_precision_reduction", False),
        "numerics fp16_reduction_gpu (True, True) → (False, True)",
    ),
    "numerics.bf16_reduction_gpu": (
        backend(MATMUL, "allow_bf16_reduced_precision_reduction", False),
        "numerics bf16_reduction_gpu (True, True) → (False, True)",
    ),
    "numerics.fp16_accumulation_gpu": (
        backend(MATMUL, "allow_fp16_accumulation", True),
        "numerics fp16_accumulation_gpu False → True",
    ),
    **{
        f"numerics.attention_{name}": (
            numeric(lambda f=enable: f(False), lambda f=enable: f(True)),
            f"numerics attention_{name} True → False",
        )
        for name, enable in {
            "flash": torch.backends.cuda.enable_flash_sdp,
            "mem_efficient": torch.backends.cuda.enable_mem_efficient_sdp,
            "math": torch.backends.cuda.enable_math_sdp,
        }.items()
    },
    "numerics.attention_math_reduction": (
        numeric(
            lambda: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True),
            lambda: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False),
        ),
        "numerics attention_math_reduction False → True",
    ),
    "numerics.fill_uninitialized": (
        backend(torch.utils.deterministic, "fill_uninitialized_memory", False),
        "numerics fill_uninitialized True → False",
    ),
    **{
        f"numerics.fp32_precision_{kind}_{operator}": (
            numeric(
                lambda k=kind, o=operator, v=value: torch._C._set_fp32_precision_setter(k, o, v),
                lambda k=kind, o=operator, v=before: torch._C._set_fp32_precision_setter(k, o, v),
            ),
            f"numerics fp32_precision_{kind}_{operator} {before} → {value}",
        )
        for kind, operator, value in (
            ("generic", "all", "tf32"),
            ("cuda", "matmul", "tf32"),
            ("cuda", "conv", "ieee"),
            ("mkldnn", "matmul", "tf32"),
            ("mkldnn", "conv", "tf32"),
        )
        for before in [torch._C._get_fp32_precision_getter(kind, operator)]
    },
}


def test_every_field_of_a_real_identity_has_a_row(world: World) -> None:
    names = [name for name, _ in flat(world.identity().fields)]

    assert [name for name in names if not any(fnmatch.fnmatchcase(name, row) for row in ROWS)] == []
    assert [row for row in ROWS if not fnmatch.filter(names, row)] == []


@pytest.mark.parametrize("row", ROWS)
def test_a_change_of_one_field_is_a_miss_that_names_it(world: World, row: str) -> None:
    change, words = ROWS[row]
    world.publish()
    change(world)

    found = world.find()

    assert isinstance(found, Missed)
    told = words.format(root=world.root)
    assert [text for text in found.differences if text == told or (words.endswith(" ") and text.startswith(told))]


def moved(world: World) -> None:
    """The same checkpoint, mounted elsewhere."""
    elsewhere = world.root / "elsewhere"
    world.checkpoint.rename(elsewhere)
    world.checkpoint = elsewhere
    world.set("model.checkpoint", str(elsewhere))
    world.set("model.kwargs.beside", str(elsewhere / "config.json"))


def variable(name: str, value: str) -> Change:
    return lambda world: world.patch.setenv(name, value)


def another_processor(world: World) -> None:
    features = Cpu(2).fingerprint()["features"]
    flags = {"flags": f"{features} hypervisor ibrs", "model name": "Another"}
    world.patch.setattr("app.devices.cpu._cpuinfo", lambda: flags)


NOTHING: dict[str, Change] = {
    "values of weights": lambda world: world.weights(
        {name: filled(dtype, *shape, salt=1) for name, (dtype, shape, _) in SHAPES.items()}
    ),
    "order of tensors in the file": lambda world: world.weights(dict(reversed(SHAPES.items()))),
    "file name of the weights": lambda world: (world.checkpoint / "model.safetensors").rename(
        world.checkpoint / "other.safetensors"
    ),
    "mount of the checkpoint": moved,
    "model of the processor": another_processor,
    "threads that compile": variable("TORCHINDUCTOR_COMPILE_THREADS", "7"),
    "place of the caches": variable("TORCHINDUCTOR_CACHE_DIR", "/elsewhere"),
    "test of the instruction set": variable("TORCHINDUCTOR_VEC_ISA_OK", "0"),
    "threads of OpenMP, which the device's replace": variable("OMP_NUM_THREADS", "7"),
    "compiler": variable("CXX", "/nowhere/clang++"),
    "logs of torch": variable("TORCH_LOGS", "+inductor"),
    "name and version of the model": lambda world: (world.set("model.name", "b"), world.set("model.version", "2")),
    "port": setting("http.port", 9999),
    "queue": setting("serving.max_queue_items", 3),
    "smaller buckets of dynamic code": setting("dimensions.batch.buckets", [1, 4, 8]),
    "calls of the warm-up": setting("warmup.calls", 5),
    "tolerance": setting("warmup.tolerance.rtol", 0.5),
    "sample values": setting("inputs.0.high", 5),
    "way of reading": setting("model.reading", "read"),
    "waived surplus": setting("model.waive.unexpected", ["*"]),
    "miss policy": setting("compile.on_miss", "fail"),
    "stall timeout": setting("startup.stall_timeout_s", 1),
}


@pytest.mark.parametrize("change", NOTHING.values(), ids=NOTHING)
def test_what_compiled_code_does_not_depend_on_gives_a_hit(world: World, change: Change) -> None:
    world.publish()
    change(world)

    found = world.find()

    assert isinstance(found, Restored), found


def test_engines_other_than_aot_specialise_on_every_bucket(world: World) -> None:
    world.engine = "jit"
    world.publish()
    world.set("dimensions.batch.buckets", [1, 4, 8])

    found = world.find()

    assert isinstance(found, Missed)
    assert found.differences == ("buckets batch=2, batch=8 → batch=1, batch=4, batch=8",)


def test_a_file_with_other_strides_is_another_table(world: World) -> None:
    checkpoint = open_checkpoint(world.checkpoint)
    checkpoint.close()
    entry = checkpoint.tensors["a.weight"]

    assert collect._described(entry) == "F32[4,3]"
    turned = type(entry)(entry.name, entry.dtype, entry.shape, 0, 0, entry.nbytes, stride=(1, 4))
    assert collect._described(turned) == "F32[4,3] strides [1, 4]"


def test_an_identity_survives_the_manifest(world: World) -> None:
    identity = world.identity()

    assert ArtifactIdentity(json.loads(json.dumps(identity.fields))).key() == identity.key()


def imported_by(module: str, files: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(files[module].read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if name in files)


def test_everything_that_the_child_and_the_engines_import_counts_as_own_code() -> None:
    root = Path(app.__file__).parent
    files = {".".join(p.relative_to(root.parent).with_suffix("").parts): p for p in root.rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    reached: set[str] = set()
    todo = [name for name in files if name.startswith(("app.child", "app.engines", "app.serving.forward"))]
    while todo:
        if (name := todo.pop()) not in reached:
            reached.add(name)
            todo += imported_by(name, files)

    counted = [root / name for name in collect.OWN_CODE]
    assert [n for n in sorted(reached) if not any(files[n].is_relative_to(place) for place in counted)] == []
    assert [place for place in counted if not place.exists()] == []


def test_collecting_an_identity_imports_no_compiler() -> None:
    code = (
        "import sys\n"
        "from app.runtime import import_torch\n"
        "from app.artifacts.collect import machine\n"
        "from app.devices.cpu import Cpu\n"
        "machine(import_torch().fields, Cpu(1).fingerprint())\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'transformers') if name in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"
