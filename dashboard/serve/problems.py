"""Errors that answer a request: each has a status, a code, and a message that says what to do."""

from __future__ import annotations


class Problem(Exception):
    status, code = 500, "internal"

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message

    def document(self) -> dict[str, dict[str, str]]:
        return {"error": {"code": self.code, "message": self.message}}


class BadRequest(Problem):
    status, code = 400, "bad_request"


class Forbidden(Problem):
    status, code = 403, "forbidden"


class NotFound(Problem):
    status, code = 404, "not_found"


class Gone(Problem):
    status, code = 410, "gone"


class TooLarge(Problem):
    status, code = 413, "too_large"


class Busy(Problem):
    status, code = 429, "busy"


class Unavailable(Problem):
    status, code = 503, "unavailable"
