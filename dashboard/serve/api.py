"""The routes of the JSON API. `dashboard/API.md` describes the documents field by field, here and at /docs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute

from xsake.dashboard.read.run_events import to_json
from xsake.dashboard.serve.api_text import described
from xsake.dashboard.serve.guard import HEAD_ONLY, Receive, Scope, Send
from xsake.dashboard.serve.live import Live
from xsake.dashboard.serve.own_text import Texts
from xsake.dashboard.serve.problems import BadRequest
from xsake.dashboard.show import benchmark_documents, run_documents
from xsake.dashboard.show.documents import Documents

Id = Annotated[str, Path(max_length=200, description="An id from the list.")]
_ERRORS: dict[int | str, dict[str, Any]] = {
    404: {"description": '{"error": {"code": "not_found", "message": "..."}}; other errors look alike'}
}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "server-sent events"}
}


def answer(document: Any, status: int = 200) -> Response:
    return Response(to_json(document), status, media_type="application/json")


class EventStream(StreamingResponse):
    """Server-sent events. HEAD gets none of them: a stream may have no end."""

    def __init__(self, events: AsyncIterator[bytes]):
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if HEAD_ONLY in scope:
            self.body_iterator = _nothing()
        await super().__call__(scope, receive, send)


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield


def make_router(documents: Documents, live: Live, texts: Texts) -> APIRouter:
    api = APIRouter(prefix="/api", responses=_ERRORS, default_response_class=Response)
    library = documents.library

    @api.get("/site", tags=["site"], summary="What this site is, and what it can do")
    def site() -> Response:
        return answer(documents.site(static=False, own_text_reason=texts.unavailable()))

    # -- runs ------------------------------------------------------------------------------------------------------

    @api.get("/runs", tags=["runs"], summary="All runs, newest first")
    def runs() -> Response:
        if not library.searched:
            library.search()
            library.update(most=1 << 20)  # the rest follows
        return answer(run_documents.runs(library))

    @api.get("/runs/{run_id}", tags=["runs"], summary="A run: configuration, command, metrics, densities")
    def run(run_id: Id) -> Response:
        return answer(run_documents.run(library, run_id))

    @api.get("/runs/{run_id}/series", tags=["runs"], summary="A run's curves, thinned with their extremes kept")
    def series(
        run_id: Id,
        metrics: Annotated[str | None, Query(max_length=2000, description="Names, comma-separated.")] = None,
        points: Annotated[int, Query(description="Most points per series, 100 to 20000.")] = 2000,
        first: Annotated[int | None, Query(alias="from", description="First step of a zoom.")] = None,
        last: Annotated[int | None, Query(alias="to", description="Last step of a zoom.")] = None,
    ) -> Response:
        found = run_documents.series(library, run_id, metrics=metrics, points=points, first=first, last=last)
        return answer(found)

    @api.get("/runs/{run_id}/events", tags=["runs"], summary="A run's events as they happen", responses=_STREAM)
    async def run_events(
        run_id: Id,
        after: Annotated[str | None, Query(max_length=60, description="The id of the last event seen.")] = None,
        last_event_id: Annotated[str | None, Header(max_length=60)] = None,
    ) -> StreamingResponse:
        await run_in_threadpool(library.find, run_id)  # a search would hold up the other streams
        return EventStream(live.follow_run(run_id, last_event_id or after))

    @api.get(
        "/events", tags=["runs"], summary="The list of runs, whenever it changes, and events of some", responses=_STREAM
    )
    async def events(
        follow: Annotated[str, Query(max_length=8000, description="Runs to follow too: id@last_id,id@last_id")] = "",
    ) -> StreamingResponse:
        return EventStream(live.follow_list(follow))

    # -- tuning ----------------------------------------------------------------------------------------------------

    @api.get("/tuning", tags=["tuning"], summary="Studies and tuning databases")
    def tuning() -> Response:
        return answer(documents.tuning.overview())

    @api.get("/tuning/studies/{study_id}", tags=["tuning"], summary="A study: trials, best, failures")
    def study(study_id: Id) -> Response:
        return answer(documents.tuning.study(study_id))

    @api.get("/tuning/databases/{database_id}", tags=["tuning"], summary="A database: entries and what they gain")
    def database(database_id: Id) -> Response:
        return answer(documents.tuning.database(database_id))

    # -- explorer --------------------------------------------------------------------------------------------------

    @api.get("/recordings", tags=["explorer"], summary="Recorded texts, and those that were pasted")
    def recordings() -> Response:
        return answer(documents.recordings())

    @api.get("/recordings/{recording_id}", tags=["explorer"], summary="A recording: shares, results, texts of blocks")
    def recording(recording_id: Id) -> Response:
        return answer(documents.recording(recording_id))

    @api.get(
        "/recordings/{recording_id}/layers/{layer}", tags=["explorer"], summary="Masses and kept blocks of a layer"
    )
    def recording_layer(recording_id: Id, layer: int) -> Response:
        return answer(documents.recording_layer(recording_id, layer))

    @api.post("/texts", tags=["explorer"], summary="Compute the masks of your own text", status_code=202)
    async def post_text(request: Request) -> Response:
        try:
            body = json.loads(await request.body())
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is no JSON: {error}") from error
        return answer(texts.submit(body), 202)

    @api.get("/texts/{text_id}", tags=["explorer"], summary="How far a text is")
    async def text(text_id: Id) -> Response:
        return answer(texts.document(text_id))

    @api.delete("/texts/{text_id}", tags=["explorer"], summary="Cancel a text")
    async def delete_text(text_id: Id) -> Response:
        return answer(await texts.cancel(text_id))

    @api.get("/texts/{text_id}/events", tags=["explorer"], summary="A text's progress", responses=_STREAM)
    async def text_events(text_id: Id) -> StreamingResponse:
        live.check_room()
        return EventStream(texts.follow(text_id))

    # -- records ---------------------------------------------------------------------------------------------------

    @api.get("/benchmarks", tags=["benchmarks"], summary="All benchmarks, recorded or not run")
    def benchmarks() -> Response:
        return answer(benchmark_documents.overview(documents.records))

    @api.get("/benchmarks/{benchmark_id}", tags=["benchmarks"], summary="A record as plots and tables")
    def benchmark(benchmark_id: Id) -> Response:
        return answer(benchmark_documents.benchmark(documents.records, benchmark_id))

    @api.get("/replays", tags=["replay"], summary="Recorded training runs with masks")
    def replays() -> Response:
        return answer(documents.replays())

    @api.get("/replays/{replay_id}", tags=["replay"], summary="A replay: curves, densities, frames")
    def replay(replay_id: Id) -> Response:
        return answer(documents.replay(replay_id))

    @api.get("/replays/{replay_id}/frames/{frame}", tags=["replay"], summary="Masses and kept blocks at a checkpoint")
    def replay_frame(replay_id: Id, frame: Annotated[str, Path(max_length=200)]) -> Response:
        return answer(documents.replay_frame(replay_id, frame))

    for route in api.routes:
        if isinstance(route, APIRoute) and route.methods != {"DELETE"}:
            route.description = described(route.path)
    return api
