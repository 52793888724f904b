"""The weights are in memory once: as pages of the checkpoint's file, never as a copy."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.conftest import Start, configuration

ROWS, WIDTH = 4_000_000, 32
WEIGHTS = ROWS * WIDTH * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("wide") / "model.safetensors"
    table = torch.arange(ROWS, dtype=torch.float32).unsqueeze(1).expand(ROWS, WIDTH) / ROWS
    save_file(
        {"table.weight": table.contiguous(), "last.weight": torch.ones(4, WIDTH), "last.bias": torch.zeros(4)}, file
    )
    return file


def mapping_rows(process: int, file: Path) -> dict[str, int]:
    """Return the sums of a file's mappings in a process, in bytes, by the kernel's names."""
    sums: dict[str, int] = {}
    inside = False
    for row in Path(f"/proc/{process}/smaps").read_text().splitlines():
        name, *rest = row.split()
        if "-" in name and not name.endswith(":"):
            inside = row.endswith(str(file))
        elif inside and rest and rest[-1] == "kB":
            sums[name.rstrip(":")] = sums.get(name.rstrip(":"), 0) + int(rest[0]) * 1024
    return sums


@pytest.mark.parametrize("engine", [pytest.param("auto", marks=pytest.mark.slow), "eager"])
def test_the_weights_are_resident_once_and_never_copied(
    start: Start, checkpoint: Path, tmp_path: Path, engine: str
) -> None:
    config = configuration(
        "wide",
        checkpoint,
        tmp_path / "store",
        inputs=[{"name": "ids", "datatype": "INT64", "shape": ["batch", 3], "low": 0, "high": ROWS}],
        compile={"engine": engine},
    )
    server = start(config)
    server.wait()
    report = server.status()
    assert report["artifacts"]["engine"] == {"auto": "aot", "eager": "eager"}[engine], report["artifacts"]["why"]
    memory = {row["name"]: row for row in report["memory"]}
    size = checkpoint.stat().st_size
    assert size > WEIGHTS
    assert memory["checkpoint_mapped"]["planned_bytes"] == size
    assert memory["checkpoint_mapped"]["measured_bytes"] >= size
    assert memory["staging"]["peak_bytes"] == 0
    # A process with torch and its web server takes about 350 MB; a second copy would take the weights' 512 MB more.
    assert memory["host_anonymous"]["measured_bytes"] < 0.75 * WEIGHTS
    assert memory["host_resident"]["peak_bytes"] < 1.9 * WEIGHTS
    mapped = mapping_rows(server.process.pid, checkpoint)
    assert mapped["Rss"] >= size
    assert mapped["Anonymous"] == 0
