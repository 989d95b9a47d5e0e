"""Study: one model, one length, one block size, and the files that its stages share."""

from __future__ import annotations

import json
import lzma
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks import record
from benchmarks.hads.knowledge import KINDS
from benchmarks.hads.methods import METHODS, RIVALS, RIVALS_VERSION, STRENGTHENED
from benchmarks.hads.programs import Programs
from benchmarks.hads.settings import Settings
from benchmarks.hads.summaries import extras
from benchmarks.hads.table import lines_of
from xsake._ground import atomic
from xsake.hads.calibration.layerwise import Layers
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.study.evaluation import evaluate
from xsake.hads.study.records import Records
from xsake.hads.study.summary import as_json, retention, summarise
from xsake.hads.study.texts import Text, load_texts


class Study:
    """Files and records that the stages (`benchmarks.hads.stages`) share. A stage goes on from the records there are.

    `out` receives the study's files; files in the folder `earlier` that `out` does not have yet are copied to `out`.
    `stop()` is called before every method; if it returns True, the rest is left for another run.
    """

    def __init__(
        self,
        model: Any,
        texts: Path,
        out: Path,
        settings: Settings,
        *,
        earlier: Path | None = None,
        stop: Callable[[], bool] = lambda: False,
    ):
        self.model, self.texts, self.out, self.settings = model, texts, out, settings
        self.layers, self.stop, self.start = Layers(model), stop, time.perf_counter()
        self.programs = Programs()
        out.mkdir(parents=True, exist_ok=True)
        self.profile_path = out / f"profile-{settings}.json"
        self.known_paths = {kind.file: out / f"{kind.file}-{settings}.npz" for kind in KINDS}
        self.records_path = out / f"records-{settings}.jsonl"
        for path in (self.profile_path, *self.known_paths.values(), self.records_path):
            _take_over(path, [out] if earlier is None else [out, earlier])
        self._records: Records | None = None

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.start:6.1f} s] {text}", flush=True)

    # -- what stages read ----------------------------------------------------------------------------------------------

    def wanted(self, names: Iterable[str]) -> list[str]:
        """The `names` that the settings ask for, each once."""
        return [name for name in dict.fromkeys(names) if name in self.settings.methods]

    def read(self, domains: Iterable[str], count: int) -> list[Text]:
        """The first texts of each domain in turn, so that a batch has some of each domain."""
        found = load_texts([self.texts], length=self.settings.length, limit=count, domains=list(domains))
        return sorted(found, key=lambda text: int(text.name.rsplit("/", 1)[1]))

    @property
    def profile(self) -> HadsProfile:
        return HadsProfile.load(_calibrated(self.profile_path))

    def knowledge(self, methods: Iterable[str]) -> dict[str, Any]:
        """The knowledge of each method beyond the profile; most have none."""
        wanted, known = set(methods), {}
        for kind in KINDS:
            if mine := kind.methods & wanted:
                known |= dict.fromkeys(mine, kind.type.load(_calibrated(self.known_paths[kind.file])))
        return known

    @property
    def records(self) -> Records:
        if self._records is None:
            self._records = Records(self.records_path, self.about())
        return self._records

    def about(self) -> dict[str, Any]:
        s = self.settings
        dtype = jnp.dtype(s.attention_dtype or self.model.dtype).name
        return {
            "model": s.name,
            "length": s.length,
            **s.grid.shape,
            "dtype": jnp.dtype(self.model.dtype).name,
            "attention_dtype": dtype,
            "rivals": RIVALS_VERSION,
        }

    # -- what stages do ------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        texts: Sequence[Text],
        methods: Sequence[str],
        budgets: Sequence[float],
        layers: str = "profile",
        last_rows: str = "own",
    ) -> bool:
        """Budget by budget, methods in the order given; True if all was done."""
        s = self.settings
        self.programs.wait_for("project", "dense", "sparse", "compare")
        for program in dict.fromkeys(METHODS[name].program for name in methods):
            self.programs.wait_for(program, (program, "attend"), (program, "again"))
        start, seen = time.perf_counter(), len(self.records)

        def report(what: str, done: int, of: int) -> None:
            if what == "dense":
                speed = (time.perf_counter() - start) / max(len(self.records) - seen, 1)
                self.say(f"text {done + 1} of {of}; {1e3 * speed:.1f} ms per text and method so far")

        return evaluate(
            self.model,
            self.profile,
            texts,
            methods=methods,
            budgets=budgets,
            records=self.records,
            batch=min(s.batch, len(texts)),
            layers=layers,
            last_rows=last_rows,
            attention_dtype=s.attention_dtype,
            knowledge=self.knowledge(methods),
            progress=report,
            stop=self.stop,
        )

    def best_rivals(self, count: int = 3, among: Collection[str] = (*RIVALS, *STRENGTHENED)) -> list[str]:
        """The `count` best methods by the mean over budgets of the logarithm of KL, on the screened texts."""
        logs: dict[str, list[float]] = defaultdict(list)
        for row in summarise(self.records):
            if row.method in among and row.layers == "profile" and row.budget in self.settings.budgets:
                logs[row.method].append(float(np.log(row.kl)))
        most = max(map(len, logs.values()), default=0)
        ranked = sorted((float(np.mean(x)), name) for name, x in logs.items() if len(x) == most)
        return [name for _, name in ranked[:count]]

    def report(self, quiet: bool = False) -> None:
        """Write the summary of all records, and unless `quiet` print its table."""
        rows = summarise(self.records)
        found = {"environment": record.environment()} | as_json(self.about(), rows, retention(self.records))
        found |= extras(self.records)
        atomic.write_text(self.out / f"summary-{self.settings}.json", json.dumps(found, indent=1) + "\n")
        if not quiet:
            print(*lines_of(rows), sep="\n", flush=True)


def _take_over(path: Path, folders: Sequence[Path]) -> None:
    """Copy an earlier run's file to `path` unless it is there, from the first folder that has it; records may be
    compressed, as they are in `benchmarks/results`."""
    for folder in folders:
        plain, compressed = folder / path.name, folder / f"{path.name}.xz"
        if path.exists():
            return
        if plain.exists():
            shutil.copy(plain, path)
        elif compressed.exists():
            with lzma.open(compressed, "rt", encoding="utf-8") as file:
                atomic.write_text(path, file.read())


def _calibrated(path: Path) -> Path:
    if not path.exists():
        raise SystemExit(f"{path} is missing: run the stage calibrate, or put the file into INPUTS")
    return path
