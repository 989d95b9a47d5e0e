"""The application: guard, JSON API, metrics, and the built pages."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import xsake
from xsake.dashboard.serve import metrics_page
from xsake.dashboard.serve.api import answer, make_router
from xsake.dashboard.serve.guard import Guard
from xsake.dashboard.serve.live import Live
from xsake.dashboard.serve.own_text import Texts
from xsake.dashboard.serve.problems import BadRequest, NotFound, Problem
from xsake.dashboard.show.documents import Documents

PAGES = Path(__file__).parents[1] / "static"
_DOCS = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>XSAKE dashboard: API</title>
<link rel="icon" href="/assets/icon.svg"><link rel="stylesheet" href="/docs/swagger-ui.css"></head>
<body><div id="swagger-ui"></div>
<script src="/docs/swagger-ui-bundle.js"></script><script src="/docs/start.js"></script></body></html>"""
_DOCS_START = 'SwaggerUIBundle({url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null});'
_ABOUT = "Runs, studies, records and masks as JSON. Times are in seconds, dates in UTC, losses and KL in nats."


def make_app(
    documents: Documents,
    *,
    texts: Texts | None = None,
    pages: Path = PAGES,
    names: Iterable[str] = (),
    any_address: bool = False,
) -> FastAPI:
    """The server as an ASGI application. `Guard` takes `names` and `any_address`."""
    began = time.monotonic()
    live = Live(documents.library)
    texts = Texts(documents) if texts is None else texts
    tasks: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks[:] = [asyncio.create_task(live.read_forever()), asyncio.create_task(texts.work_forever())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    app = FastAPI(
        title="XSAKE dashboard",
        version=xsake.__version__,
        description=_ABOUT,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.live, app.state.texts, app.state.documents = live, texts, documents
    app.add_middleware(Guard, names=list(names), any_address=any_address)
    app.include_router(make_router(documents, live, texts))
    _add_problems(app)

    @app.get("/health", tags=["server"], summary="Whether the server is well")
    def health() -> Response:
        uptime = round(time.monotonic() - began, 1)
        runs = len(documents.library.runs)
        ended = "a part of the server has ended: start it again" if any(task.done() for task in tasks) else None
        problem = live.problem or ended
        about = {"runs": runs, "followers": live.followers, "uptime": uptime}
        if problem:
            return answer({"status": "failing", "problem": problem} | about, 503)
        return answer({"status": "ok"} | about)

    @app.get("/metrics", tags=["server"], summary="Metrics in Prometheus' text format")
    def metrics() -> Response:
        return Response(metrics_page.render(documents.library, live), media_type=metrics_page.CONTENT_TYPE)

    _add_docs(app)
    _add_pages(app, pages)
    return app


def _add_problems(app: FastAPI) -> None:
    @app.exception_handler(ClientDisconnect)
    async def hung_up(request: Request, error: ClientDisconnect) -> Response:
        return answer(BadRequest("the body is not whole").document(), 400)  # to nobody

    @app.exception_handler(Problem)
    async def problem(request: Request, error: Problem) -> Response:
        return answer(error.document(), error.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first: Any = next(iter(error.errors()), {})
        place = ".".join(str(part) for part in first.get("loc", ()))
        return answer(BadRequest(f"{place}: {first.get('msg', 'is not right')}").document(), 400)

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return answer(
                NotFound(f"there is nothing at {request.url.path[:200]!r}; /docs lists the API").document(), 404
            )
        found = BadRequest(str(error.detail))
        return answer(found.document(), error.status_code)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return answer(Problem(f"the server made a mistake: {type(error).__name__}").document(), 500)


def _add_docs(app: FastAPI) -> None:
    """FastAPI's page of the API, with its scripts from this server: nothing is asked of another host."""

    @app.get("/docs", include_in_schema=False)
    def docs() -> Response:
        return HTMLResponse(_DOCS)

    @app.get("/docs/start.js", include_in_schema=False)
    def start() -> Response:
        return PlainTextResponse(_DOCS_START, media_type="text/javascript")

    @app.get("/docs/{name}", include_in_schema=False)
    def asset(name: str) -> Response:
        import fastapi_offline

        if name not in ("swagger-ui-bundle.js", "swagger-ui.css"):
            raise NotFound(f"there is nothing at /docs/{name[:60]}")
        return FileResponse(Path(fastapi_offline.__file__).parent / "static" / name)


def _add_pages(app: FastAPI, pages: Path) -> None:
    @app.get("/", include_in_schema=False)
    def index() -> Response:
        if not (pages / "index.html").is_file():
            return PlainTextResponse("The pages are not built: run `make web`. The API is at /docs.\n", 503)
        return FileResponse(pages / "index.html")

    if pages.is_dir():
        app.mount("/", StaticFiles(directory=pages, follow_symlink=False), name="pages")
