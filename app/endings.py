"""How a start-up ends: kept records after ready, a told error with its exit code, a stall found from outside."""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from app import status
from app.artifacts import Compiled, Uncompiled, golden
from app.errors import StallError, WarmgateError
from app.logs import log
from app.sidecar import Sidecar
from app.stages.prove_answers import ProvenModel
from app.stages.prove_codec import ProvenCodec
from app.startup import settle
from app.weights import ResidentWeights

# What Kubernetes keeps of a termination message.
TERMINATION_LOG_BYTES = 4096


def after_ready(sidecar: Sidecar, proven: ProvenModel) -> None:
    """Keep what a later start can use; none of it is needed for serving."""
    code: Compiled | Uncompiled = sidecar.startup.values[Compiled | Uncompiled]
    to_keep = sidecar.startup.values[ProvenCodec].to_keep or proven.to_keep
    if isinstance(code, Compiled) and to_keep:
        try:
            golden.keep(code.artifact, sidecar.startup.values[ResidentWeights].fingerprint, to_keep)
        except OSError as error:
            log.warning("the proven answers could not be kept; the next start proves again", error=error.strerror)
    write_report(sidecar)


def write_report(sidecar: Sidecar) -> None:
    """Write the start report where the configuration asks for it; a full disk is logged, not fatal."""
    file = sidecar.settings.report.file
    if file is None:
        return
    try:
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        temporary.write_text(json.dumps(sidecar.start_report or sidecar.report(), indent=1, default=str))
        temporary.replace(file)
    except OSError as error:
        log.warning("the report could not be written", file=str(file), error=error.strerror)


_ended = threading.Lock()


def end_process(sidecar: Sidecar, error: WarmgateError) -> None:
    """Tell the fatal error where people look for it, then leave with its code (or stay, when that is configured).

    Called once, whoever comes first: the event loop, or the thread that looks for stalls. `os._exit`, because a thread
    that hangs in a driver or an import can be neither stopped nor waited for.
    """
    if not _ended.acquire(blocking=False):
        return
    failed = next((view.name for view in sidecar.startup.snapshot() if view.state == "failed"), None)
    with contextlib.suppress(OSError):
        sidecar.console.ended(None)
    tell_fatal(error, failed, sidecar.settings.startup.termination_log)
    write_report(sidecar)
    if sidecar.settings.startup.on_failure == "stay":
        return
    settle(sidecar.startup)
    leave(error.exit_code)


def tell_fatal(error: WarmgateError, stage: str | None, termination_log: Path) -> None:
    """Log the error as one line, and write the same to the termination log where that exists."""
    facts = status.failure(error, stage)
    with contextlib.suppress(OSError):
        log.error("fatal", **facts)
    with contextlib.suppress(OSError):
        if termination_log.exists():
            termination_log.write_text(_within(facts, TERMINATION_LOG_BYTES))


def _within(facts: dict[str, Any], limit: int) -> str:
    """Return the facts as JSON that fits, with a shortened message where it must be."""
    text = json.dumps(facts)
    while len(text.encode()) > limit:
        message = str(facts["message"])
        facts = {**facts, "message": message[: len(message) - max(16, len(text.encode()) - limit)] + " …"}
        text = json.dumps(facts)
    return text


def leave(code: int) -> None:
    """End the process now; threads that are still busy are not waited for."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def watch_for_stalls(sidecar: Sidecar) -> None:
    """Look for stages without a sign of life, on a thread of its own: the event loop may be what hangs."""
    limit = sidecar.settings.startup.stall_timeout_s

    def look() -> None:
        while not sidecar.startup.finished and not sidecar.startup.error:
            time.sleep(min(1.0, limit / 4))
            if error := sidecar.startup.find_stall(limit):
                _end_stalled(sidecar, error)
                return

    threading.Thread(target=look, name="stall-watch", daemon=True).start()


def _end_stalled(sidecar: Sidecar, error: StallError) -> None:
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    sidecar.startup.fail(error)
    end_process(sidecar, error)
