"""Damage checkpoints of every format at random, for a time, and load them: `python -m tests.weights.fuzz SECONDS SEED`.

Whatever is in the files, the loader gives tensors or a CheckpointError. Anything else ends this program with the seed
of the file; a signal ends it for whoever watches.
"""

import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from app.checkpoints import open_checkpoint
from app.errors import CheckpointError
from app.inspection import inspect, render
from app.progress import Progress
from app.weights.install import stored_tensors
from app.weights.layout import Mode, plan_layout
from app.weights.plan import ModelTable, ModelTensor, WeightsPlan
from app.weights.reading import read_resident

STATE = {
    "layer.weight": torch.arange(40.0).reshape(5, 8),
    "layer.bias": torch.ones(5, dtype=torch.bfloat16),
    "turned": torch.arange(12.0).reshape(3, 4).t(),
    "count": torch.tensor(7),
    "flags": torch.tensor([True, False, True]),
}
CONTIGUOUS = {name: tensor.contiguous() for name, tensor in STATE.items()}


def shards(path: Path) -> None:
    save_file({"a": CONTIGUOUS["layer.weight"]}, path / "one.safetensors")
    save_file({"b": CONTIGUOUS["count"]}, path / "two.safetensors")
    (path / "model.safetensors.index.json").write_text(
        '{"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
    )


def distributed(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(dict(CONTIGUOUS), checkpoint_id=path, no_dist=True)


WRITERS: tuple[Callable[[Path], object], ...] = (
    lambda path: save_file(CONTIGUOUS, path / "model.safetensors", metadata={"format": "pt"}),
    shards,
    lambda path: torch.save(STATE, path / "pytorch_model.bin"),
    distributed,
)


def damage(data: bytearray, chance: random.Random) -> None:
    """Change bytes, drop or repeat a stretch, or write a number somewhere that counts or points at something."""
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        begin, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
        kind = chance.randrange(6)
        if kind == 0 and data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[begin : min(end, begin + chance.choice((1, 4, 64, 4096)))]
        elif kind == 2:
            data[begin:begin] = data[begin : min(end, begin + 64)]
        elif kind == 3:
            size = chance.choice((1, 2, 4, 8))
            data[begin : begin + size] = chance.choice((0, 1, 255, 1 << 31, 1 << 62, (1 << 64) - 1)).to_bytes(
                8, "little"
            )[:size]
        elif kind == 4:
            data[begin : begin + 1] = bytes([chance.choice(b'0123456789-{}[]",:e.\\')])
        elif kind == 5:
            del data[begin:]


def load(path: Path, mode: Mode, cast: str | None) -> int:
    """Load everything that is found and touch it; returns the number of tensors."""
    checkpoint = open_checkpoint(path, trust_pickle=True)
    try:
        layout = plan_layout(checkpoint, mode, "fuzz", cast)
        resident = read_resident(checkpoint, layout, Progress(), 1 << 20, {})
        rows = []
        for entry in checkpoint.tensors.values():
            _, place = resident.memory.find(entry) if entry.nbytes else (None, None)
            dtype = place.dtype if place else entry.dtype
            rows.append(
                ModelTensor(entry.name, dtype, entry.shape, torch.empty(entry.shape, device="meta").stride(), True)
            )
        plan = WeightsPlan({row.name: row.name for row in rows}, (), {}, {}, ())
        tensors, _ = stored_tensors(ModelTable(tuple(rows), ()), checkpoint, resident.memory, plan)
        for tensor in tensors.values():
            tensor.clone()
        return len(tensors)
    finally:
        checkpoint.close()


def attempt(template: Path, directory: Path, seed: int) -> bool:
    """Damage one file of a copy and load it; returns whether that succeeded."""
    chance = random.Random(seed)
    path = directory / "damaged"
    shutil.copytree(template, path)
    try:
        victim = chance.choice(sorted(file for file in path.iterdir() if file.is_file()))
        data = bytearray(victim.read_bytes())
        damage(data, chance)
        victim.write_bytes(data)
        try:
            render(inspect(path, trust_pickle=True))
            load(path, chance.choice(("map", "read")), chance.choice((None, None, "F16", "F64")))
        except CheckpointError:
            return False
        return True
    finally:
        shutil.rmtree(path)


def main(seconds: float, seed: int) -> None:
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as temporary:
        templates = []
        for number, write in enumerate(WRITERS):
            templates.append(Path(temporary) / f"template-{number}")
            templates[-1].mkdir()
            write(templates[-1])
            load(templates[-1], "map", None)
        loaded = 0
        first = seed
        while time.monotonic() < until:
            print(seed, flush=True)
            loaded += attempt(templates[seed % len(templates)], Path(temporary), seed)
            seed += 1
    print(f"{seed - first} files, {loaded} of them loaded", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
