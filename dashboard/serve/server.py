"""Server: uvicorn, which ends the open streams before it waits for connections to close."""

from __future__ import annotations

import socket

import uvicorn
from fastapi import FastAPI


class Server(uvicorn.Server):
    def __init__(self, app: FastAPI, **settings: object):
        options = dict(log_level="warning", timeout_graceful_shutdown=1, ws="none") | settings
        super().__init__(uvicorn.Config(app, **options))  # type: ignore[arg-type]
        self._state = app.state

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.live.close()
        self._state.texts.close()
        await super().shutdown(sockets)
