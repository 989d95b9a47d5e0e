"""Guard: what every request must pass before anything else sees it, and the headers that every answer carries.

A page of another site may send requests to a server on localhost. By DNS rebinding its own name can even be made to
lead there, and then the browser takes the answers for the page's own. The Host and Origin headers tell: a browser
always sends the name that the page used.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from xsake.dashboard.read.run_events import to_json
from xsake.dashboard.serve.problems import BadRequest, Forbidden, Problem, TooLarge

MOST_BODY = 1_100_000  # bytes: a text of a million bytes, and its JSON
MOST_DRAINED = 64 << 20  # bytes of a body that is refused: read and forgotten, so that the answer arrives
LOOPBACK = ("localhost", "127.0.0.1", "::1")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
HEAD_ONLY = "xsake.head_only"  # in the scope of a request whose answer needs no body
_HOST = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9.-]+))(?::(?P<port>\d{1,5}))?")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Guard:
    """ASGI middleware. `names` are further host names under which the server may be reached."""

    def __init__(self, app: Any, *, names: Iterable[str] = (), any_address: bool = False):
        self._app = app
        self._names = {*LOOPBACK, *(name.lower() for name in names)}
        self._any_address = any_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # there are no web sockets

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._check(scope)
            if scope["method"] == "HEAD":  # what GET would answer, of which uvicorn sends the head
                scope = {**scope, "method": "GET", HEAD_ONLY: True}
            await self._app(scope, _limited(receive), with_headers)
        except Problem as problem:
            headers = {}
            if problem.status == 413:
                await _drain(receive)
                headers["connection"] = "close"  # the rest of the body is not read
            answer = Response(to_json(problem.document()), problem.status, headers, "application/json")
            await answer(scope, receive, with_headers)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            raise Forbidden(
                f"Host {_shown(hosts)} is not this server: use localhost, or start it with --allow-host NAME"
            )
        for origin in headers.getlist("origin"):
            scheme, _, host = origin.partition("://")
            if scheme not in ("http", "https") or host.lower() != hosts[0].lower():
                raise Forbidden(f"Origin {_shown([origin])} is another site than {_shown(hosts)}: open the page itself")
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            raise Forbidden("a page of another site asked for this: open the dashboard's own page")
        if scope["method"] not in ("GET", "HEAD", "POST", "DELETE"):
            raise BadRequest(f"method {scope['method'][:20]!r} is not known here: use GET, HEAD, POST or DELETE")
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise BadRequest("send JSON, with the header Content-Type: application/json")
        for length in headers.getlist("content-length"):
            if length.isdecimal() and int(length) > MOST_BODY:
                raise TooLarge(f"the body has {int(length):,} bytes, and at most {MOST_BODY:,} are read")

    def _is_ours(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = (found["six"] or found["name"]).lower()
        if name in self._names:
            return True
        # An address cannot be rebound: only names can be made to lead elsewhere.
        return self._any_address and _is_address(name)


def check_name(name: str) -> None:
    """Raise ValueError unless a Host header can hold this name, without its port."""
    found = _HOST.fullmatch(name)
    if not _is_address(name) and (found is None or found["name"] is None or found["port"] is not None):
        raise ValueError(f"--allow-host {name[:80]!r} must be the name of a host alone, such as proxy.example")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _shown(values: list[str]) -> str:
    return ", ".join(repr(value[:80]) for value in values) or "(none)"


def _limited(receive: Receive) -> Receive:
    """A body whose length was not told, or was told wrongly, is cut off too."""
    read = 0

    async def limited() -> MutableMapping[str, Any]:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > MOST_BODY:
            raise TooLarge(f"the body has more than {MOST_BODY:,} bytes")
        return message

    return limited


async def _drain(receive: Receive) -> None:
    """Read the rest of the body and forget it: a client that is cut off while it sends never sees the answer."""
    left = MOST_DRAINED
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(30):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
