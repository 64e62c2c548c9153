"""HTTP statuses and bodies of errors: for the server, and for handlers of your own.

FastAPI(exception_handlers=weft.serve.errors.handlers())
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InvalidArgumentError, OpError

Headers = Sequence[tuple[bytes, bytes]]

#: Seconds after which a client that was refused for lack of room should try again.
RETRY_AFTER = 1


class HttpError(Exception):
    """A request that is answered with this status and sentence."""

    def __init__(self, status: int, sentence: str, headers: Headers = ()) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.headers = status, sentence, headers


class TooLargeError(InvalidArgumentError):
    """A call that has too many rows at any time: it would be refused again."""

    http_status = 413


def status(error: BaseException) -> int:
    """Return the HTTP status of an error that a batched call raised: the `http_status` of weft's errors, 500 for others."""
    if isinstance(error, HttpError):
        return error.status
    return error.http_status if isinstance(error, OpError) else 500


def sentence(error: BaseException) -> str:
    """Return what a client may read of an error: the message of weft's errors, of others the class alone."""
    if isinstance(error, (HttpError, OpError)):
        text = str(error) or type(error).__name__
        return text.encode(errors="backslashreplace").decode()  # half of a surrogate pair has no form in JSON
    return f"the model failed with {type(error).__name__}; the server's log has the details"


def headers(error: BaseException) -> list[tuple[bytes, bytes]]:
    """Return the headers of the answer: Retry-After with 429 and 503."""
    found = list(error.headers) if isinstance(error, HttpError) else []
    if status(error) in (429, 503):
        found.append((b"retry-after", b"%d" % RETRY_AFTER))
    return found


def handlers() -> dict[Any, Any]:
    """Return the exception handlers that make a Starlette or FastAPI application answer weft's errors."""
    from starlette.responses import JSONResponse

    async def answer(_: Any, error: Exception) -> Any:
        named = {name.decode(): value.decode() for name, value in headers(error)}
        return JSONResponse({"error": sentence(error)}, status(error), named)

    return {OpError: answer}
