"""Documents: everything that a page can ask for by name, from a server or as files of the showcase."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xsake
from xsake.dashboard.read.benchmark_catalogue import catalogue
from xsake.dashboard.read.library import Library
from xsake.dashboard.read.stored import Shelf
from xsake.dashboard.serve.problems import NotFound
from xsake.dashboard.show import benchmark_documents, run_documents
from xsake.dashboard.show.tuning_documents import Tuning

_ENTRY = (
    "id",
    "title",
    "model",
    "length",
    "block",
    "side",
    "layers",
    "heads",
    "budgets",
    "methods",
    "text",
    "environment",
)
_REPLAY_ENTRY = ("id", "title", "environment", "runs", "steps", "checkpoints")


class Documents:
    """Reads runs, studies and records. `records` is a folder like benchmarks/results, or None."""

    def __init__(self, *, library: Library, tuning: Tuning, records: Path | None):
        self.library, self.tuning = library, tuning
        self.records = records.resolve() if records is not None and records.is_dir() else None
        self._recordings = Shelf(self.records and self.records / "explorer", "recording")
        self._replays = Shelf(self.records and self.records / "replays", "replay")
        self.own_recordings: dict[str, dict[str, Any]] = {}  # of texts that users gave, by id
        self.built = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    def site(self, *, static: bool, own_text_reason: str | None = None) -> dict[str, Any]:
        tuning = self.tuning.overview()
        return {
            "static": static,
            "version": xsake.__version__,
            "built": self.built,
            "commit": None,
            "features": {
                "live": not static,
                "own_text": not static and own_text_reason is None,
                "own_text_reason": "there is no server here" if static else own_text_reason,
            },
            "pages": {
                "runs": bool(run_documents.runs(self.library)["runs"]),
                "tuning": bool(tuning["studies"] or tuning["databases"]),
                "explorer": bool(self._recordings.names() or self.own_recordings),
                "benchmarks": self.records is not None and bool(catalogue(self.records)),
                "replay": bool(self._replays.names()),
            },
        }

    # -- explorer --------------------------------------------------------------------------------------------------

    def recordings(self) -> dict[str, Any]:
        every = [*self._recordings.about(), *(one["about"] for one in self.own_recordings.values())]
        return {"recordings": [{name: about.get(name) for name in _ENTRY} for about in every]}

    def _recording(self, identity: str) -> dict[str, Any]:
        return self.own_recordings.get(identity) or self._recordings.get(identity)

    def recording(self, identity: str) -> dict[str, Any]:
        return self._recording(identity)["about"]

    def recording_layer(self, identity: str, layer: int) -> dict[str, Any]:
        layers = self._recording(identity)["layers"]
        if not 0 <= layer < len(layers):
            raise NotFound(f"layer {layer} is not recorded; there are layers 0 to {len(layers) - 1}")
        return layers[layer]

    # -- replay ----------------------------------------------------------------------------------------------------

    def replays(self) -> dict[str, Any]:
        return {"replays": [{name: about.get(name) for name in _REPLAY_ENTRY} for about in self._replays.about()]}

    def replay(self, identity: str) -> dict[str, Any]:
        return self._replays.get(identity)["about"]

    def replay_frame(self, identity: str, frame: str) -> dict[str, Any]:
        frames = self._replays.get(identity)["frames"]
        if frame not in frames:
            raise NotFound(f"there is no frame {frame[:100]!r} in this replay; the replay lists its frames")
        return frames[frame]

    # -- all of it, for the showcase -------------------------------------------------------------------------------

    def everything(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, document) of every document that a static page may ask for."""
        yield "api/site", self.site(static=True)
        yield "api/runs", (listed := run_documents.runs(self.library))
        for one in listed["runs"]:
            yield f"api/runs/{one['id']}", run_documents.run(self.library, one["id"])
            yield f"api/runs/{one['id']}/series", run_documents.series(self.library, one["id"])
        yield "api/tuning", (tuning := self.tuning.overview())
        for one in tuning["studies"]:
            yield f"api/tuning/studies/{one['id']}", self.tuning.study(one["id"])
        for one in tuning["databases"]:
            yield f"api/tuning/databases/{one['id']}", self.tuning.database(one["id"])
        yield "api/recordings", (recordings := self.recordings())
        for one in recordings["recordings"]:
            whole = self._recording(one["id"])
            yield f"api/recordings/{one['id']}", whole["about"]
            yield from ((f"api/recordings/{one['id']}/layers/{n}", layer) for n, layer in enumerate(whole["layers"]))
        yield "api/benchmarks", (benchmarks := benchmark_documents.overview(self.records))
        for one in benchmarks["benchmarks"]:
            yield f"api/benchmarks/{one['id']}", benchmark_documents.benchmark(self.records, one["id"])
        yield "api/replays", (replays := self.replays())
        for one in replays["replays"]:
            whole = self._replays.get(one["id"])
            yield f"api/replays/{one['id']}", whole["about"]
            yield from ((f"api/replays/{one['id']}/frames/{name}", frame) for name, frame in whole["frames"].items())
