"""No file, however damaged, ends the process or gets past the loader with anything but its own error."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_damaged_checkpoints_end_in_tensors_or_in_the_loaders_own_error() -> None:
    """`WARMGATE_FUZZ_SECONDS` and `WARMGATE_FUZZ_SEED` make it long and other files; `make fuzz` does."""
    seconds, seed = os.environ.get("WARMGATE_FUZZ_SECONDS", "6"), os.environ.get("WARMGATE_FUZZ_SEED", "0")
    done = subprocess.run(
        [sys.executable, "-m", "tests.weights.fuzz", seconds, seed],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=float(seconds) + 120,
    )
    *seeds, told = done.stdout.splitlines() or [""]
    assert done.returncode == 0, f"the file of seed {told}: {done.returncode}\n{done.stderr[-3000:]}"
    loaded = int(told.split()[2])
    assert len(seeds) > 50
    assert 0 < loaded < len(seeds), "some damage is harmless, most is not"
