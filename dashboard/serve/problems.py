"""Errors that answer a request: each has a status, a code, and a message that says what to do."""

from __future__ import annotations


class Problem(Exception):
    status, code = 500, "internal"

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message

    def document(self) -> dict[str, dict[str, str]]:
        return {"error": {"code": self.code, "message": self.message}}


def _kind(status: int, code: str) -> type[Problem]:
    return type(code, (Problem,), {"status": status, "code": code})


BadRequest = _kind(400, "bad_request")
Forbidden = _kind(403, "forbidden")
NotFound = _kind(404, "not_found")
Gone = _kind(410, "gone")
TooLarge = _kind(413, "too_large")
Busy = _kind(429, "busy")
Unavailable = _kind(503, "unavailable")
