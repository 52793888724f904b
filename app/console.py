"""What a start-up shows: bars on a terminal, lines for people elsewhere, or one JSON event a change of state."""

import contextlib
import math
import shlex
import sys
import threading
import urllib.parse
from collections.abc import Callable
from typing import Any, Protocol

from app.http.wire import request_body
from app.logs import log
from app.samples import sample_inputs
from app.settings import Settings
from app.startup import FINISHED, StageView, State

Snapshot = Callable[[], tuple[StageView, ...]]
# A line for a running stage at most this often, where there is no terminal to draw on.
LINE_EVERY_S = 5.0
# Values in the command that is printed; a hundred kilobytes is the most that a shell passes on.
LARGEST_SAMPLE = 2000


class Console(Protocol):
    """Where a start-up is told."""

    def opened(self, address: str, command: str, snapshot: Snapshot) -> None:
        """The port is open."""

    def changed(self, view: StageView) -> None:
        """A stage has a new state; called on the stage's thread."""

    def ended(self, seconds: float | None) -> None:
        """Start-up has ended: ready after so many seconds since the process began, or (None) failed."""


class JsonConsole:
    """One JSON event a change."""

    def opened(self, address: str, command: str, snapshot: Snapshot) -> None:
        """Log the address and the command that asks the model."""
        del snapshot
        log.info("listening", address=address, then=command)

    def changed(self, view: StageView) -> None:
        """Log one change of state."""
        facts: dict[str, Any] = {"stage": view.name, "state": str(view.state)}
        if view.end_s is not None and view.start_s is not None:
            facts["seconds"] = round(view.end_s - view.start_s, 4)
        if view.detail:
            facts["detail"] = view.detail
        (log.error if view.state is State.FAILED else log.info)("stage", **facts)

    def ended(self, seconds: float | None) -> None:
        """Log that the model may be asked; a failure is logged with its reason by whoever ends the process."""
        if seconds is not None:
            log.info("ready", seconds=round(seconds, 3))


class TextConsole:
    """Bars on a terminal, lines elsewhere, and a command to paste at the end."""

    def __init__(self) -> None:
        self._bars = sys.stdout.isatty()
        self._over = threading.Event()
        self._command = ""
        self._drawing: threading.Thread | None = None

    def opened(self, address: str, command: str, snapshot: Snapshot) -> None:
        """Print the address and begin to show progress."""
        self._command = command
        _print(f"Warmgate on {address}; what is missing and why: {address}/readyz?verbose\n")
        draw = _draw_bars if self._bars else _print_running
        self._drawing = threading.Thread(target=draw, args=(snapshot, self._over), name="console", daemon=True)
        self._drawing.start()

    def changed(self, view: StageView) -> None:
        """Print one change of state, where no bar shows it."""
        if not self._bars and view.end_s is not None:
            _print(line(view))

    def ended(self, seconds: float | None) -> None:
        """Print when the model became ready and how to ask it."""
        self._over.set()
        if self._bars and self._drawing:
            self._drawing.join(1.0)
        if seconds is not None:
            _print(f"\nReady after {seconds:.2f} s. Ask it:\n\n{self._command}\n")


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # whoever read this may be gone; the server is not
        print(text, flush=True)  # noqa: T201 - this is the program's output for people


def line(view: StageView) -> str:
    """Return one stage as a line: name, state, seconds, progress, detail."""
    took = "" if view.end_s is None or view.start_s is None else f"{view.end_s - view.start_s:7.2f} s"
    share = f"{view.ratio:4.0%}" if view.ratio is not None and view.state is State.RUNNING else ""
    return f"  {view.name:<16} {view.state:<8} {took:>9} {share:>4} {view.detail}".rstrip()


def _print_running(snapshot: Snapshot, over: threading.Event) -> None:
    while not over.wait(LINE_EVERY_S):
        for view in snapshot():
            if view.state is State.RUNNING:
                _print(line(view))


def _draw_bars(snapshot: Snapshot, over: threading.Event) -> None:
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
    from rich.table import Column

    name = TextColumn("{task.description}", table_column=Column(min_width=17, no_wrap=True))
    columns = (name, BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.fields[said]}"))
    with Progress(*columns) as bars:
        tasks: dict[str, TaskID] = {}
        while not over.wait(0.1):
            for view in snapshot():
                _draw(bars, tasks, view)
        for view in snapshot():
            _draw(bars, tasks, view)


def _draw(bars: Any, tasks: dict[str, Any], view: StageView) -> None:
    if view.name not in tasks:
        tasks[view.name] = bars.add_task(view.name, total=None, start=False, said="")
    task = tasks[view.name]
    if view.state is not State.WAITING:
        bars.start_task(task)
    done = 1.0 if view.state in FINISHED else view.ratio
    bars.update(task, total=None if done is None else 1.0, completed=done or 0.0, said=f"{view.state} {view.detail}")
    if view.end_s is not None:
        bars.stop_task(task)


def curl_line(settings: Settings, address: str) -> str:
    """Return a command that asks the served model once, for its smallest bucket, and works when pasted.

    Inputs that are too large for a command line are left to a file that the user writes.
    """
    path = settings.model_paths[0]
    bucket = path.buckets[0]
    sizes = {d.name: max(d.min, min(size, 8)) for d, (_, size) in zip(path.dimensions, bucket.sizes, strict=True)}
    if settings.compile.specialize == "bucket" and settings.uncovered == "reject":
        sizes = dict(bucket.sizes)
    if sum(math.prod(spec.sized(sizes)) for spec in path.inputs) > LARGEST_SAMPLE:
        data = "@request.json"
    else:
        data = request_body(path, sample_inputs(path.inputs, sizes, seed="curl")).decode()
    key = settings.http.api_key_file
    wanted = "" if key is None else f""" -H "X-API-Key: $(head -n 1 {shlex.quote(str(key))})\""""
    # A certificate names the server as clients know it, not as this machine does.
    options = "-sk" if address.startswith("https:") else "-s"
    at = f"--unix-socket {address.removeprefix('unix:')} http://localhost" if address.startswith("unix:") else address
    route = f"/v2/models/{urllib.parse.quote(settings.model.name)}/infer"
    return f"curl {options} {at}{route}{wanted} -d {shlex.quote(data)}"
