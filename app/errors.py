"""The one error tree; each class carries the exit code that the process leaves with.

WarmgateError
├── SettingsError      2   the configuration
│   └── PluginError        a device, format or engine that does not exist or cannot work
├── CheckpointError    3   the weights
├── ResourceError      4   memory, device, port
├── ArtifactError      5   compile artifacts and their build
├── WarmupError        6   warm-up and the proof of answers
├── StallError         7   no progress
└── DeviceLostError    8   the device is gone
"""

from collections.abc import Iterable


class WarmgateError(Exception):
    """Something an operator must know: the thing, the fact and the remedy, in one sentence or a list of them."""

    exit_code = 1

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        self.problems = tuple(printable(problem) for problem in problems)
        super().__init__("\n".join([message, *(f"  - {problem}" for problem in self.problems)]))


def printable(text: str) -> str:
    """Escape control characters: names come from files, and a line of a log or a probe must stay one line."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class SettingsError(WarmgateError):
    """The configuration cannot be used."""

    exit_code = 2


class PluginError(SettingsError):
    """No such plugin, or one that cannot work."""


class CheckpointError(WarmgateError):
    """The checkpoint cannot become the model."""

    exit_code = 3


class ResourceError(WarmgateError):
    """Memory, device or port are not to be had."""

    exit_code = 4


class ArtifactError(WarmgateError):
    """A compile artifact could not be built, published or opened."""

    exit_code = 5


class WarmupError(WarmgateError):
    """A bucket did not run, or its answers are not the reference's."""

    exit_code = 6


class StallError(WarmgateError):
    """A stage made no progress for longer than it may."""

    exit_code = 7


class DeviceLostError(WarmgateError):
    """The device stopped answering."""

    exit_code = 8
