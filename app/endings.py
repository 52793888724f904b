"""How a start-up ends: kept records after ready, a told error with its exit code, a stall found from outside."""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time

from app import status
from app.artifacts import Compiled, Uncompiled, golden
from app.errors import StallError, WarmgateError
from app.logs import log
from app.sidecar import Sidecar
from app.stages.prove_answers import ProvenModel
from app.weights import ResidentWeights


def after_ready(sidecar: Sidecar, proven: ProvenModel) -> None:
    """Keep what a later start can use; none of it is needed for serving."""
    code: Compiled | Uncompiled = sidecar.startup.values[Compiled | Uncompiled]
    if isinstance(code, Compiled) and proven.to_keep:
        try:
            golden.keep(code.artifact, sidecar.startup.values[ResidentWeights].digest, proven.to_keep)
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
        temporary.write_text(json.dumps(sidecar.report(), indent=1, default=str))
        temporary.replace(file)
    except OSError as error:
        log.warning("the report could not be written", file=str(file), error=error.strerror)


def end_process(sidecar: Sidecar, error: WarmgateError) -> None:
    """Tell the fatal error where people look for it, then leave with its code (or stay, when that is configured).

    `os._exit`, because a thread that hangs in a driver or an import can be neither stopped nor waited for.
    """
    failed = next((view.name for view in sidecar.startup.snapshot() if view.state == "failed"), None)
    facts = status.failure(error, failed)
    sidecar.console.ended(None)
    log.error("fatal", **facts)
    if sidecar.settings.startup.on_failure == "stay":
        return
    with contextlib.suppress(OSError):
        if sidecar.settings.startup.termination_log.exists():
            sidecar.settings.startup.termination_log.write_text(json.dumps(facts)[:4096])
    write_report(sidecar)
    sidecar.settle()
    leave(error.exit_code)


def leave(code: int) -> None:
    """End the process now; threads that are still busy are not waited for."""
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
