"""The loader against plain reading and against the reference library, on files of its own; prints one JSON object.

A process of its own for each figure, so that none inherits another's memory: `python -m benchmarks.loading NAME DIR`.
"""

import gc
import json
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from app.checkpoints import open_checkpoint
from app.progress import Progress
from app.settings import Model
from app.weights import LoadedModel, ResidentWeights, Skeleton
from app.weights.install import install
from app.weights.layout import Mode, plan_layout
from app.weights.memory import POPULATE_READ, POPULATE_WRITE, address_of, populate, prefer_huge_pages
from app.weights.plan import plan_weights
from app.weights.reading import read_resident
from app.weights.skeleton import build_skeleton

LAYERS, WIDTH = 48, 4096  # 48 matrices of 64 MiB
SMALL, SHARDS = 10_000, 40
THREADS, STEP = 4, 8 << 20
ROUNDS = 5


def large() -> nn.Module:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))


def small() -> nn.Module:
    return nn.ModuleList(nn.Linear(16, 8) for _ in range(SMALL // 2))


def make_files(directory: Path) -> None:
    """Write 3 GiB in one file, and ten thousand tensors in forty."""
    torch.manual_seed(0)
    (directory / "large").mkdir()
    (directory / "small").mkdir()
    save_file({f"{n}.weight": torch.rand(WIDTH, WIDTH) for n in range(LAYERS)}, directory / "large/model.safetensors")
    state = list(small().state_dict().items())
    weight_map = {}
    for number in range(SHARDS):
        name = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        part = dict(state[number * SMALL // SHARDS : (number + 1) * SMALL // SHARDS])
        save_file(part, directory / "small" / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "small/model.safetensors.index.json").write_text(json.dumps(index))
    os.sync()


def load(directory: Path, factory: str, mode: Mode) -> tuple[float, ResidentWeights, LoadedModel]:
    """Open, plan, read and install; the seconds of that, without the building of the skeleton."""
    return prepare(directory, factory, mode)()


def prepare(directory: Path, factory: str, mode: Mode) -> Callable[[], tuple[float, ResidentWeights, LoadedModel]]:
    """Build the skeleton and return what loads it."""
    model = Model(name="bench", factory=f"benchmarks.loading:{factory}", checkpoint=directory / factory)
    return partial(_load, model, build_skeleton(model), mode)


def _load(model: Model, skeleton: Skeleton, mode: Mode) -> tuple[float, ResidentWeights, LoadedModel]:
    began = time.perf_counter()
    checkpoint = open_checkpoint(model.checkpoint)
    plan = plan_weights(skeleton.table, checkpoint, model)
    resident = read_resident(checkpoint, plan_layout(checkpoint, mode, "bench", None), Progress(), 256 << 20, {})
    loaded = install(skeleton, checkpoint, resident.memory, plan)
    return time.perf_counter() - began, resident, loaded


def plain_read(file: Path) -> float:
    """Read a file by preadv on four threads into scratch memory that is used again: nothing can read it faster."""
    fd = os.open(file, os.O_RDONLY)
    size = os.fstat(fd).st_size
    steps = iter(range(0, size, STEP))
    lock = threading.Lock()

    def drain() -> None:
        scratch = memoryview(bytearray(STEP))
        while True:
            with lock:
                offset = next(steps, None)
            if offset is None:
                return
            count = 0
            while count < min(STEP, size - offset):
                count += os.preadv(fd, [scratch[count : min(STEP, size - offset)]], offset + count)

    began = time.perf_counter()
    threads = [threading.Thread(target=drain) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    os.close(fd)
    return seconds


def forget(directory: Path) -> None:
    """Drop a directory's files from the page cache."""
    for file in directory.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def touch(size: int) -> None:
    """Take memory and give it back, so that a virtual machine has it: otherwise its host's work is measured too."""
    with prefer_huge_pages(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)) as memory:
        populate(address_of(memory), size, POPULATE_WRITE)


def cold(directory: Path) -> dict[str, Any]:
    """Both ways of reading against plain reading, page cache dropped before each, in turns."""
    file = directory / "large/model.safetensors"
    ways: dict[str, Callable[[], float]] = {
        "plain_s": lambda: plain_read(file),
        "map_s": lambda: load(directory, "large", "map")[0],
        "read_s": lambda: load(directory, "large", "read")[0],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for _ in range(2 * len(ways)):
        for name in order:
            gc.collect()
            forget(file.parent)
            touch(2 * file.stat().st_size)
            times[name].append(ways[name]())
        order.append(order.pop(0))
    return {"bytes": file.stat().st_size, **{name: statistics.median(found) for name, found in times.items()}}


def warm(directory: Path) -> dict[str, Any]:
    """The page cache holds the file, from an earlier load or from anybody's reading.

    Our loader, populating alone, and the reference library into a built model.
    """
    file = directory / "large/model.safetensors"
    forget(file.parent)
    _, *again = [load(directory, "large", "map")[0] for _ in range(ROUNDS + 1)]
    forget(file.parent)
    plain_read(file)
    ours = [load(directory, "large", "map")[0] for _ in range(ROUNDS)]
    alone = [_populate_alone(file) for _ in range(ROUNDS)]
    built = large()
    theirs = []
    for _ in range(3):
        began = time.perf_counter()
        built.load_state_dict(load_file(file))
        theirs.append(time.perf_counter() - began)
    return {
        "again_s": statistics.median(again),
        "map_s": statistics.median(ours),
        "populate_s": statistics.median(alone),
        "library_s": statistics.median(theirs),
    }


def _populate_alone(file: Path) -> float:
    """Fault in the whole file with as few calls as there are threads."""
    with file.open("rb") as opened:
        memory = prefer_huge_pages(mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))
    address, share = address_of(memory), -(-len(memory) // THREADS)
    parts = [(address + n * share, min(share, len(memory) - n * share), POPULATE_READ) for n in range(THREADS)]
    threads = [threading.Thread(target=populate, args=part) for part in parts]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def many(directory: Path) -> dict[str, Any]:
    """Ten thousand small tensors in forty shards."""
    plain = [plain_read(file) for file in (directory / "small").glob("*.safetensors")]
    times = [load(directory, "small", "map")[0] for _ in range(ROUNDS)]
    return {"map_s": statistics.median(times), "plain_s": sum(plain)}


def memory(directory: Path) -> dict[str, Any]:
    """The largest anonymous memory while mapping, beyond what the process had before."""
    with watching(_anonymous_bytes, 0.002) as seen:
        before = _anonymous_bytes()
        _, resident, loaded = load(directory, "large", "map")
        held = len(loaded.tensors)
    assert held == LAYERS
    return {"beyond_bytes": max(seen) - before, "resident_bytes": resident.resident_bytes}


def _anonymous_bytes() -> int:
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("RssAnon")) * 1024


def stall(directory: Path) -> dict[str, Any]:
    """How long a thread that wakes every millisecond, and takes new memory each time, has to wait at most.

    `idle_s`: the same thread with nothing else to do, which is what the machine itself costs.
    """
    found = {}
    plain_read(directory / "large/model.safetensors")
    warm = prepare(directory, "large", "map")
    cold = prepare(directory, "large", "map")
    for name, work in {
        "idle_s": lambda: time.sleep(1.0),
        "warm_s": warm,
        "cold_s": lambda: (forget(directory / "large"), cold()),
    }.items():
        last = [time.perf_counter()]

        def late(last: list[float] = last) -> float:
            mmap.mmap(-1, 1 << 20).close()
            now = time.perf_counter()
            waited, last[0] = now - last[0], now
            return waited

        with watching(late, 0.001) as seen:
            kept = work()
        del kept  # unmapping 3 GiB is no part of loading
        found[name] = max(seen) - 0.001
    return found


@contextmanager
def watching(look: Callable[[], float], every_s: float) -> Iterator[list[Any]]:
    """Call `look` again and again on another thread while the block runs; yields what it returned."""
    seen: list[Any] = []
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            seen.append(look())
            time.sleep(every_s)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


FIGURES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "cold": cold,
    "warm": warm,
    "many": many,
    "memory": memory,
    "stall": stall,
}

if __name__ == "__main__":
    gc.disable()  # as `serve` does until it is ready
    print(json.dumps(FIGURES[sys.argv[1]](Path(sys.argv[2]))))
