"""Compressed bodies: inflated under a bound, deflated where a client asks for exactly one coding."""

import gzip
import zlib
from collections.abc import Callable, Mapping

from app.servable import Rejected

# zlib's window sizes for what the codings are (RFC 9110): gzip's own wrapper, and for deflate that of zlib.
_WINDOWS: Mapping[str, int] = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}

# Level 1: tensors hardly become smaller at higher ones, and take several times as long.
_COMPRESSORS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": lambda body: gzip.compress(body, 1, mtime=0),
    "deflate": lambda body: zlib.compress(body, 1),
}
# Less than this does not become smaller by more than its own headers.
LEAST_BYTES = 1024


def inflate(body: bytes, coding: str, limit: int) -> bytes:
    """Return what a body of this Content-Encoding holds.

    Raises Rejected: 415 for an unknown coding, 400 for data that is not of it, 413 for more than `limit` bytes.
    """
    name = coding.strip().lower()
    if name in ("", "identity"):
        return body
    window = _WINDOWS.get(name)
    if window is None:
        raise Rejected(415, f"Content-Encoding {coding!r} is unknown; known are gzip and deflate")
    inflating = zlib.decompressobj(window)
    try:
        found = inflating.decompress(body, limit + 1)
    except zlib.error as error:
        raise Rejected(400, f"the body is not {name}: {error}") from error
    if len(found) > limit:
        raise Rejected(413, f"the inflated body is larger than serving.max_body_bytes = {limit}", "too_large")
    if not inflating.eof or inflating.unused_data:
        told = "goes on after its end" if inflating.eof else "is cut off"
        raise Rejected(400, f"the {name} body {told}")
    return found


def coding_asked(accepted: str) -> str | None:
    """Return the coding for an answer, by the request's Accept-Encoding; None for an answer as it is.

    Libraries name all that they know in every request, though compressing tensors costs both sides more than sending
    them. A client that names exactly one has been told to.
    """
    names = [row.partition(";") for row in accepted.lower().split(",")]
    wanted = [name.strip() for name, _, weight in names if weight.replace(" ", "").rstrip("0.") != "q="]
    return wanted[0] if len(wanted) == 1 and wanted[0] in _COMPRESSORS else None


def deflate(body: bytes, coding: str) -> bytes:
    """Return the body in one of the codings that `coding_asked` gives."""
    return _COMPRESSORS[coding](body)
