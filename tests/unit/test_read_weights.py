"""The stage that reads: what the file cache held is looked up before anything of the files is brought in."""

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.checkpoints import Checkpoint
from app.progress import Progress
from app.settings import Settings
from app.stages.preflight import Preflight
from app.stages.read_weights import read_weights
from app.weights.choosing import Choice
from app.weights.layout import Layout, plan_layout
from tests.unit.written import filled, written

MODULE = importlib.import_module("app.stages.read_weights")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    made = written(tmp_path / "model", {"a": filled("F32", 5000)}, {"b": filled("F32", 5000)})
    yield made
    made.close()


def test_the_file_cache_is_looked_up_before_a_mapping_is_measured(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe reads up to 128 MiB: looked up after it, a cold file would be told as warm."""
    shares = [0.0, 0.0]
    layout = plan_layout(checkpoint, "map", "why", None)

    def probe(opened: Checkpoint, planned: Layout, cast: str | None) -> Layout:
        del opened, cast
        shares[:] = [1.0, 1.0]
        return replace(planned, why="probed")

    monkeypatch.setattr(MODULE, "cached_shares", lambda _: list(shares))
    monkeypatch.setattr(MODULE, "probe_mapping", probe)
    settings = Settings(
        model={"name": "tiny", "factory": "a:b", "checkpoint": checkpoint.path},
        inputs=[{"name": "x", "datatype": "FP32", "shape": [1]}],
        outputs=[{"name": "y", "datatype": "FP32", "shape": [1]}],
    )

    resident = read_weights.run(settings, checkpoint, Preflight(Choice(layout, measure=True), {}, 0), Progress())

    assert resident.memory.layout.why == "probed"
    assert (resident.file_cache, resident.cached_ratio) == ("cold", 0.0)
