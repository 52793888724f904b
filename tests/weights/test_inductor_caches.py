"""Caches that cannot be copied are told by one file, however many there are."""

from collections.abc import Callable
from pathlib import Path

import pytest

from app.engines import _inductor
from app.errors import ArtifactError


@pytest.mark.parametrize(
    ("copy", "told"),
    [
        (_inductor.collect, "torch's caches cannot be copied to"),
        (_inductor.restore, "torch's caches cannot be restored"),
    ],
)
def test_many_files_that_cannot_be_copied_are_one_short_error(
    tmp_path: Path, copy: Callable[[Path, Path], None], told: str
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / _inductor.DIRECTORY).mkdir(parents=True)
    target.mkdir()
    for number in range(400):
        (source / _inductor.DIRECTORY / f"{number}").symlink_to("/nowhere")

    with pytest.raises(ArtifactError, match=told) as caught:
        copy(source, target)

    assert "No such file or directory" in str(caught.value)
    assert len(str(caught.value)) < 700
