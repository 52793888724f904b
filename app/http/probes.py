"""`/healthz`, `/livez`, `/startupz`, `/readyz`: answered from memory, in the grammar of the Kubernetes API server."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.http.answers import as_json, as_text, retry_after
from app.readiness import Readiness, Result, Verdict

# The kubelet reads 10 KiB of a probe's answer.
REASON_LIMIT = 200


@dataclass(frozen=True, slots=True)
class Probes:
    """What the probes answer from: readiness by its checks, liveness and start-up by one reason each."""

    readiness: Readiness
    not_alive: Callable[[], str | None]
    not_started: Callable[[], str | None]
    phase: Callable[[], str]
    elapsed_s: Callable[[], float]
    eta_s: Callable[[], float | None]


def routes(probes: Probes) -> APIRouter:
    """Return the probe routes."""
    router = APIRouter(tags=["probes"])
    reads: dict[str, Any] = {"methods": ["GET", "HEAD"]}

    @router.api_route("/healthz", **reads)
    @router.api_route("/livez", **reads)
    async def live() -> Response:
        """Alive while the process can still become or stay ready."""
        return _simple("livez", probes.not_alive())

    @router.api_route("/startupz", **reads)
    async def started() -> Response:
        """Start-up has finished; stays true."""
        return _simple("startupz", probes.not_started())

    @router.api_route("/readyz", **reads)
    async def ready(request: Request) -> Response:
        """Every check holds."""
        verdict = probes.readiness.verdict(request.query_params.getlist("exclude"))
        return _answer(probes, verdict, request)

    @router.api_route("/readyz/{check}", **reads)
    async def ready_check(check: str) -> Response:
        """One check holds."""
        if check not in probes.readiness.checks:
            return as_json(
                {"error": f"no check {check[:REASON_LIMIT]}; there are {', '.join(probes.readiness.checks)}"}, 404
            )
        others = [name for name in probes.readiness.checks if name != check]
        return _simple(check, probes.readiness.verdict(others).reasons.get(check), retry_after(probes.eta_s()))

    return router


def _simple(name: str, reason: str | None, headers: dict[str, str] | None = None) -> Response:
    if reason is None:
        return as_text("ok")
    return as_text(
        f"[-]{name} failed: {reason[:REASON_LIMIT]}\n{name} check failed\n", 503, headers or retry_after(None)
    )


def _answer(probes: Probes, verdict: Verdict, request: Request) -> Response:
    status = 200 if verdict.holds else 503
    headers = {} if verdict.holds else retry_after(probes.eta_s())
    if "application/json" in request.headers.get("accept", ""):
        return as_json(_document(probes, verdict), status, headers)
    if verdict.holds and "verbose" not in request.query_params:
        return as_text("\n".join(["ok", *_warnings(verdict)]), status)
    return as_text(text(verdict), status, headers)


def text(verdict: Verdict) -> str:
    """Return one line a check and the closing line, as the Kubernetes API server writes them."""
    closing = f"readyz check {'passed' if verdict.holds else 'failed'}"
    return "\n".join([*_warnings(verdict), *(_line(result) for result in verdict.results), closing]) + "\n"


def _line(result: Result) -> str:
    if result.excluded:
        return f"[+]{result.name} excluded: ok"
    return f"[+]{result.name} ok" if result.ok else f"[-]{result.name} failed: {(result.reason or '')[:REASON_LIMIT]}"


def _warnings(verdict: Verdict) -> list[str]:
    names = " ".join(f'"{name}"' for name in verdict.unmatched)[:REASON_LIMIT]
    return [f"warn: some health checks cannot be excluded: no matches for {names}"] if names else []


def _document(probes: Probes, verdict: Verdict) -> dict[str, Any]:
    checks = [
        {"name": r.name, "ok": r.ok, "reason": r.reason and r.reason[:REASON_LIMIT], "progress": r.progress}
        for r in verdict.results
    ]
    return {
        "ready": verdict.holds,
        "phase": probes.phase(),
        "checks": checks,
        "elapsed_s": round(probes.elapsed_s(), 3),
        "eta_s": probes.eta_s(),
    }
