"""What holds in a process that has imported torch the way a start does."""

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "GOMP_SPINCOUNT = '10000'"),
        ({"GOMP_SPINCOUNT": "77"}, "GOMP_SPINCOUNT = '77'"),
        ({"OMP_WAIT_POLICY": "passive"}, "GOMP_SPINCOUNT = '0'"),
    ],
    ids=["by itself", "as it is set", "as the policy says"],
)
def test_threads_with_nothing_to_do_soon_give_up_their_processor(given: Mapping[str, str], told: str) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}

    done = subprocess.run(
        [sys.executable, "-c", "from app.runtime import import_torch; import_torch()"],
        env={**kept, **given, "OMP_DISPLAY_ENV": "verbose"},
        check=True,
        capture_output=True,
        text=True,
    )

    assert told in done.stderr, "libgomp itself says what it goes by"
