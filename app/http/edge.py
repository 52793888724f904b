"""What holds for every request: no redirects, errors as the protocol has them, closing connections while draining."""

from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.answers import as_error
from app.logs import frames, log
from app.servable import Rejected


class Edge:
    """Serves `/path/` as `/path` (a redirect would break clients and please probes) and ends kept connections.

    While draining every answer says `Connection: close`, so that no client sends its next request on a connection
    that is about to be closed.
    """

    def __init__(self, app: ASGIApp, draining: Callable[[], bool]) -> None:
        self._app, self._draining = app, draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if path != "/" and path.endswith("/"):
            scope = {**scope, "path": path.rstrip("/") or "/", "raw_path": None}

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._draining():
                message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
            await send(message)

        try:
            await self._app(scope, receive, closing)
        except Exception as error:  # noqa: BLE001 - the framework has answered; it raises for whoever logs
            # Kind and place only: uvicorn would log the message, which may hold what was asked.
            log.error("a request failed", error=type(error).__name__, frames=frames(error))


def install_errors(app: FastAPI) -> None:
    """Answer every error as the protocol does: `{"error": …}`."""

    @app.exception_handler(Rejected)
    async def rejected(request: Request, error: Rejected) -> Response:
        del request
        return as_error(error)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        response = as_error(Rejected(error.status_code, f"{error.detail}: {request.method} {request.url.path}"))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        del request
        return as_error(Rejected(400, "; ".join(str(row.get("msg")) for row in error.errors())))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        del request
        # The kind only: the message of an arbitrary exception may hold what a client must not see; the log has it.
        return as_error(Rejected(500, f"the inference failed: {type(error).__name__}; the log has the details"))
