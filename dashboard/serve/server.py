"""Server: uvicorn that gives up half-sent requests, and ends open streams before it waits for connections to close."""

from __future__ import annotations

import asyncio
import socket

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_TIMEOUT = 20.0  # seconds in which a request must arrive whole


class Protocol(H11Protocol):
    """A connection that is closed when its next request does not arrive in time: uvicorn would wait for ever."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_TIMEOUT, self.transport.close)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Server(uvicorn.Server):
    def __init__(self, app: FastAPI, **settings: object):
        options = dict(log_level="warning", timeout_graceful_shutdown=1, http=Protocol, ws="none") | settings
        super().__init__(uvicorn.Config(app, **options))  # type: ignore[arg-type]
        self._state = app.state

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.live.close()
        self._state.texts.close()
        await super().shutdown(sockets)
