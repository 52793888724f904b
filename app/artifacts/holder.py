"""Who holds a lease: a process, described so that another can tell for certain that it is gone."""

import json
import os
import re
import secrets
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path

from app.errors import printable

_TOKEN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Holder:
    """A process, so that another can tell whether it is gone; the host's name is the pod's in Kubernetes."""

    host: str
    boot: str
    namespace: str
    pid: int
    started: int
    token: str = field(default_factory=lambda: secrets.token_hex(16))

    @classmethod
    def this_process(cls) -> "Holder":
        """Describe this process, with a token of its own for each call."""
        return cls(socket.gethostname(), *_here(), os.getpid(), _started(os.getpid()) or 0)

    def is_known_dead(self) -> bool:
        """The process is gone for certain: its number was given in this process's own namespace of numbers."""
        here = (socket.gethostname(), *_here())
        return all(here) and (self.host, self.boot, self.namespace) == here and _started(self.pid) != self.started

    @classmethod
    def parse(cls, text: bytes) -> "Holder | None":
        """Return what a file says, or None where it is not what `as_json` writes: anybody may have written it."""
        try:
            found = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None
        texts, numbers = (found.host, found.boot, found.namespace, found.token), (found.pid, found.started)
        typed = all(isinstance(one, str) for one in texts) and all(type(one) is int for one in numbers)
        return found if typed and _TOKEN.fullmatch(found.token) else None

    def as_json(self) -> bytes:
        """Return what `parse` reads."""
        return json.dumps(asdict(self)).encode()

    def __str__(self) -> str:
        return f"{printable(self.host[:80])} (process {self.pid})"


def _here() -> tuple[str, str]:
    """Return this boot of this machine, and the namespace in which process numbers are given; empty: not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "", ""


def _started(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; None where it has ended, also when nobody took its code."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in {"Z", "X"} else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
