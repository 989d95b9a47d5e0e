"""The HADS study on one GPU: SmolLM2 under every method, budget and text, from a folder of prepared inputs.

    python -m benchmarks.hads_study INPUTS --out DIR                       everything, in the order of importance
    python -m benchmarks.hads_study INPUTS --out DIR --minutes 4           as far as four minutes go
    python -m benchmarks.hads_study INPUTS --out DIR --length 4096 --stage screen,full

INPUTS holds the model's GGUF file, whole (`*.gguf`) or in pieces (`*.gguf.00`, `*.gguf.01`, ...), and `texts.npz` of
`benchmarks.hads_texts`. What a run leaves in DIR (a profile, records, summaries) may be put back into INPUTS: the next
run goes on from there. Needs `gguf`, and neither `tokenizers` nor the command line.

Stages: `calibrate` (skipped where INPUTS has the profile), `first` (HADS, oracles and the strongest rivals on the first
texts), `screen` (every method on 16 texts), `tasks`, `seed` (the project's first table), `full` (HADS, the three best
rivals and the oracles on all texts). Programs are compiled side by side while the model is calibrated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import xsake
from benchmarks import record
from benchmarks.hads_texts import CALIBRATION, EVALUATION
from xsake import _atomic
from xsake.hads.calibration import observe
from xsake.hads.calibration.calibrate import calibrate
from xsake.hads.calibration.fit import STEPS, fit_weights
from xsake.hads.calibration.layerwise import Layers
from xsake.hads.calibration.sensitivity import cost_of_dropping
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.profile import HadsProfile, profile_shape
from xsake.hads.study import layerwise
from xsake.hads.study.divergence import compare_states, usual_chunk
from xsake.hads.study.evaluation import evaluate
from xsake.hads.study.methods import ABLATIONS, METHODS, ORACLES, OURS, PUBLISHED, STRENGTHENED, MethodMask
from xsake.hads.study.portrait import portrait
from xsake.hads.study.records import Records
from xsake.hads.study.summary import Summary, as_json, retention, summarise
from xsake.hads.study.texts import Text, load_texts

BUDGETS = (0.2, 0.43, 0.1, 0.3, 0.15, 0.5)
STRONG = ("x_attention_8", "mean_top_k", "flash_prefill", "ada_kv", "cobs", "blasst", "sink_window")
FIRST = ("hads", "oracle_top_k", "oracle_gain", *(f"{name}+forced" for name in STRONG), *STRONG)
SCREENED = 16
TASK_METHODS = ("hads", "sink_window+forced", "mean_top_k+forced", "x_attention_8+forced", "x_attention_8")
TASK_BUDGETS = (0.2, 0.43, 0.1)
# The project's first table: each pattern at the share of blocks that it had there.
SEED = {"sliding_window": 0.28, "longformer": 0.32, "big_bird": 0.41, "random": 0.5, "hads": 0.43}
_CALIBRATION_PROGRAMS = ("observe", "forward", "touch", "likelihood", "cost", "fit")
STAGES = ("calibrate", "first", "screen", "tasks", "seed", "full")


@dataclasses.dataclass(frozen=True)
class Settings:
    length: int = 8192
    block: int = 64
    batch: int = 8
    calibration_sequences: int = 4  # of each domain
    sequences: int = 64  # of each domain
    name: str = "smollm2"
    methods: Sequence[str] = tuple(METHODS)
    budgets: Sequence[float] = BUDGETS
    attention_dtype: Any = None

    def __str__(self) -> str:
        return f"{self.length}-{self.block}"


class Study:
    """One model, one length, one block size; each stage goes on from the records that are there."""

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
        out.mkdir(parents=True, exist_ok=True)
        self.profile_path = out / f"profile-{settings.length}-{settings.block}.json"
        self.records_path = out / f"records-{settings}.jsonl"
        for path in (self.profile_path, self.records_path):
            if earlier is not None and not path.exists() and (earlier / path.name).exists():
                shutil.copy(earlier / path.name, path)
        self._pool = ThreadPoolExecutor(max_workers=12)
        self._compiled: dict[Any, Future] = {}
        self._records: Records | None = None

    # -- stages --------------------------------------------------------------------------------------------------------

    def calibrate(self) -> None:
        if self.profile_path.exists():
            self.say(f"{self.profile_path.name} is there")
            return
        s = self.settings
        self.compile_calibration()
        found = self.read(CALIBRATION, s.calibration_sequences)
        last = ""

        def report(what: str, done: int, of: int) -> None:
            nonlocal last
            if what != last:
                self.say(f"calibrating on {len(found)} texts: {what}")
            last = what

        tokens = np.stack([text.tokens for text in found])
        self.wait_for(*_CALIBRATION_PROGRAMS)
        profile = calibrate(
            self.model, tokens, name=s.name, block=s.block, sensitivity_sequences=len(CALIBRATION), progress=report
        )
        profile.save(self.profile_path)
        self.say(repr(profile))

    def first(self) -> None:
        texts = self.read(EVALUATION, self.settings.batch // len(EVALUATION) or 1)
        budgets = self.settings.budgets
        done = self.evaluate(texts, self.wanted(FIRST), budgets)
        # The oracle in which all heads of all layers are alike: against it the profile's division counts too.
        done = done and self.evaluate(texts, self.wanted(["oracle_top_k", "hads"]), budgets, layers="uniform")
        if done:  # and how far two kernels' rounding moves a model that leaves nothing out
            self.evaluate(texts, self.wanted(["sliding_window"]), [1.0])
        self.report()

    def screen(self) -> None:
        names = self.wanted([*OURS, *ABLATIONS, *ORACLES, *STRENGTHENED, *PUBLISHED])
        texts = self.read(EVALUATION, SCREENED // len(EVALUATION))
        if self.evaluate(texts, names, self.settings.budgets):
            # As published, methods know nothing of our division among layers: with it they are stronger than without.
            best = ["hads", "oracle_top_k", *self.best_rivals(among=PUBLISHED)]
            self.evaluate(texts, self.wanted(best), self.settings.budgets, layers="uniform")
        self.report()
        if not self.stop():
            self.picture()

    def tasks(self) -> None:
        names = [f"{name}-{self.settings.length}" for name in ("copy", "pairs", "needles")]
        texts = self.read(names, self.settings.sequences)
        self.evaluate(texts, self.wanted(TASK_METHODS), [b for b in TASK_BUDGETS if b in self.settings.budgets])
        for domain, method, budget, asked, share in sorted(retention(self.records)):
            self.say(f"{domain:14} {method:22} at {budget:.0%} keeps {share:6.1%} of {asked} answers")
        self.report(quiet=True)

    def seed(self) -> None:
        """At the first table's unequal shares, and all at HADS's; with the time that attention takes in each."""
        texts = self.read(EVALUATION, SCREENED // len(EVALUATION))
        pairs = [(name, budget) for name, budget in SEED.items()]
        pairs += [(name, SEED["hads"]) for name in SEED if name != "hads"]
        for name, budget in pairs:
            if not self.evaluate(texts, self.wanted([name]), [budget]):
                return
        times = self.attention_times(texts, [("dense", 1.0), *((n, b) for n, b in pairs if n in self.settings.methods)])
        rows = {(row.method, row.budget): row for row in summarise(self.records) if row.layers == "profile"}
        lines = []
        for (name, budget), (mask, attention) in times.items():
            row = rows.get((name, budget))
            kl, gap = (0.0, 0.0) if row is None else (row.kl, row.perplexity_gap)
            line = {"method": name, "active_blocks": budget, "mask_ms": mask, "attention_ms": attention, "kl": kl}
            lines.append(line | {"perplexity_gap": gap})
            self.say(f"{name:16} {budget:6.1%}  mask {mask:7.2f} ms  attention {attention:7.2f} ms  KL {kl:.4f}")
        record.save(f"seed-{self.settings}", lines, self.out, settings=self.about())

    def full(self) -> None:
        """Texts in the outer order, so that a run that is cut off has whole batches."""
        best = self.best_rivals()
        texts = self.read(EVALUATION, self.settings.sequences)
        done = self.evaluate(texts, self.wanted(["hads", *best]), self.settings.budgets)
        done = done and self.evaluate(texts, self.wanted(["oracle_top_k", "oracle_gain"]), self.settings.budgets)
        self.report()
        self.say("all texts are read" if done else "not all texts are read: run again")

    # -- parts ---------------------------------------------------------------------------------------------------------

    def wanted(self, names: Iterable[str]) -> list[str]:
        return [name for name in dict.fromkeys(names) if name in self.settings.methods]

    def read(self, domains: Iterable[str], count: int) -> list[Text]:
        """The first texts of each domain in turn, so that a batch has some of each."""
        found = load_texts([self.texts], length=self.settings.length, limit=count, domains=list(domains))
        return sorted(found, key=lambda text: int(text.name.rsplit("/", 1)[1]))

    def evaluate(
        self, texts: Sequence[Text], methods: Sequence[str], budgets: Sequence[float], layers: str = "profile"
    ) -> bool:
        """Budget by budget, methods in the order given; True if all was done."""
        s = self.settings
        self.wait_for("project", "dense", "sparse", "compare", *(METHODS[name].program for name in methods))
        start, seen = time.perf_counter(), len(self.records)

        def report(what: str, done: int, of: int) -> None:
            if what == "dense":
                speed = (time.perf_counter() - start) / max(len(self.records) - seen, 1)
                self.say(f"text {done + 1} of {of}; {1e3 * speed:.1f} ms a text and method so far")

        return evaluate(
            self.model,
            self.profile,
            texts,
            methods=methods,
            budgets=budgets,
            records=self.records,
            batch=min(s.batch, len(texts)),
            layers=layers,
            attention_dtype=s.attention_dtype,
            progress=report,
            stop=self.stop,
        )

    @property
    def profile(self) -> HadsProfile:
        return HadsProfile.load(self.profile_path)

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
            "block": s.block,
            "dtype": jnp.dtype(self.model.dtype).name,
            "attention_dtype": dtype,
        }

    def best_rivals(self, count: int = 3, among: Collection[str] = frozenset(PUBLISHED | STRENGTHENED)) -> list[str]:
        """By the mean over budgets of the logarithm of KL, on the screened texts."""
        logs: dict[str, list[float]] = defaultdict(list)
        for row in summarise(self.records):
            if row.method in among and row.layers == "profile" and row.budget in self.settings.budgets:
                logs[row.method].append(float(np.log(row.kl)))
        most = max(map(len, logs.values()), default=0)
        ranked = sorted((float(np.mean(x)), name) for name, x in logs.items() if len(x) == most)
        return [name for _, name in ranked[:count]]

    def report(self, quiet: bool = False) -> None:
        rows = summarise(self.records)
        found = {"environment": record.environment()} | as_json(self.about(), rows, retention(self.records))
        (self.out / f"summary-{self.settings}.json").write_text(json.dumps(found, indent=1) + "\n")
        if not quiet:
            print(*lines_of(rows), sep="\n", flush=True)

    def picture(self) -> None:
        """What the pictures of heads and of one mask are made from."""
        text = self.read(EVALUATION, 1)[0]
        seen = portrait(self.model, self.profile, text.tokens, self.settings.budgets[0])._asdict()
        np.savez_compressed(self.out / f"portrait-{self.settings}.npz", text=text.name, **seen)

    def attention_times(
        self, texts: Sequence[Text], pairs: Sequence[tuple[str, float]]
    ) -> dict[tuple[str, float], tuple[float, float]]:
        """Milliseconds a sequence for all layers, from one layer's inputs of a batch: (choice of blocks, attention)."""
        from xsake.hads.profile.budgets import layer_counts

        s = self.settings
        number = len(self.layers.weights) // 2
        some = texts[: s.batch]
        tokens = jnp.asarray(np.stack([text.tokens for text in some]), jnp.int32)
        x, rotation = self.layers.start(tokens)
        inputs = layerwise.project(self.layers.graph, self.layers.weights[number], x, rotation, s.attention_dtype)
        profile = jax.tree.map(jnp.asarray, dataclasses.replace(self.profile, digests=()))
        dense = jax.jit(lambda q, k, v: self.model.attention_fn(q, k, v, is_causal=True))
        sparse = jax.jit(lambda q, k, v, mask: self.model.attention_fn(q, k, v, mask=mask))
        to_mask = jax.jit(lambda blocks: layerwise.causal_mask(blocks, s.block, s.length))
        scale = 1e3 * len(self.layers.weights) / len(some)
        times = {}
        for name, budget in pairs:
            if name == "dense":
                times[name, budget] = 0.0, scale * seconds(dense, *inputs)
                continue
            counts = layer_counts(profile, budget, s.length)
            choice = MethodMask.of(name, profile, counts)
            blocks, _ = layerwise.choose_blocks(choice, jnp.int32(number), *inputs[:2])
            chosen = seconds(layerwise.choose_blocks, choice, jnp.int32(number), *inputs[:2])
            times[name, budget] = (
                scale * (chosen + seconds(to_mask, blocks)),
                scale * seconds(sparse, *inputs, to_mask(blocks)),
            )
        return times

    # -- compilation ---------------------------------------------------------------------------------------------------

    def compile_ahead(self, methods: Iterable[str]) -> None:
        """Begin with what every evaluation needs, and go on with the methods' own programs."""
        s, config = self.settings, self.model.config
        size = min(s.batch, s.sequences * len(EVALUATION))
        tokens = jax.ShapeDtypeStruct((size, s.length), jnp.int32)
        x, rotation = jax.eval_shape(self.layers.start, tokens)
        weights, graph, attention = self.layers.weights[0], self.layers.graph, self.model.attention_fn
        inputs = jax.eval_shape(
            lambda w, x, r: layerwise.project(graph, w, x, r, s.attention_dtype), weights, x, rotation
        )
        side = -(-s.length // s.block)
        blocks = jax.ShapeDtypeStruct((size, config.q_heads, side, side), jnp.bool_)
        attend, states = layerwise.attend, jax.ShapeDtypeStruct((size, s.length, config.width), x.dtype)
        self._compile("project", lambda: layerwise.project.lower(graph, weights, x, rotation, s.attention_dtype))
        self._compile("dense", lambda: attend.lower(graph, attention, weights, x, rotation, inputs))
        self._compile("sparse", lambda: attend.lower(graph, attention, weights, x, rotation, inputs, blocks, s.block))
        whole = nnx.split(self.model)
        self._compile("compare", lambda: compare_states.lower(*whole, states, states, tokens, usual_chunk()))
        number = jax.ShapeDtypeStruct((), jnp.int32)
        for name in methods:
            mask_fn = jax.eval_shape(
                lambda p, name=name: MethodMask.of(name, p, np.zeros(config.layers)), self.shape_of()
            )
            self._compile(
                METHODS[name].program,
                lambda m=mask_fn: layerwise.choose_blocks.lower(m, number, inputs[0], inputs[1]),
            )

    def compile_calibration(self) -> None:
        if self.profile_path.exists():
            return
        s, whole = self.settings, nnx.split(self.model)
        grid, count = CausalGrid(s.length, s.block), s.calibration_sequences * len(CALIBRATION)
        x, rotation = jax.eval_shape(self.layers.start, jax.ShapeDtypeStruct((1, s.length), jnp.int32))
        block = self.layers.graph, self.model.attention_fn
        args = self.layers.weights[0], x, rotation
        _, seen = jax.eval_shape(lambda *args: observe.observe_block(*block, *args, s.block), *args)
        _, touched = jax.eval_shape(lambda *args: observe.touch_block(*block, *args), *args, x)
        key = jax.eval_shape(lambda: jax.random.key(0))
        kept = jax.ShapeDtypeStruct(seen.statistics.mass.shape, jnp.bool_)
        many = jax.tree.map(lambda one: jax.ShapeDtypeStruct((count, *one.shape[1:]), one.dtype), seen)
        self._compile("observe", lambda: observe.observe_block.lower(*block, *args, s.block))
        self._compile("forward", lambda: observe.forward_block.lower(*block, *args))
        self._compile("touch", lambda: observe.touch_block.lower(*block, *args, x))
        self._compile("likelihood", lambda: observe.likelihood_gradient.lower(*whole, x, key, observe.CHUNK))
        self._compile("cost", lambda: cost_of_dropping.lower(touched, kept, grid))
        self._compile("fit", lambda: fit_weights.lower(many.pooled, many.statistics.mass, grid, STEPS))

    def shape_of(self) -> HadsProfile:
        """What the profile will look like to the compiler."""
        config, s = self.model.config, self.settings
        heads = dict(q_heads=config.q_heads, kv_heads=config.kv_heads, head_dim=config.head_dim)
        return profile_shape(layers=config.layers, **heads, model=s.name, block=s.block, length=s.length)

    def _compile(self, key: Any, lower: Callable[[], Any]) -> None:
        if key not in self._compiled:
            self._compiled[key] = self._pool.submit(lambda: lower().compile())

    def wait_for(self, *programs: Any) -> None:
        for key in programs:
            if key in self._compiled:
                self._compiled.pop(key).result()

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.start:6.1f} s] {text}", flush=True)


def lines_of(rows: Sequence[Summary]) -> list[str]:
    """KL of each method by budget, best first; where HADS is not surely better, a star."""
    out = []
    for layers in sorted({row.layers for row in rows}):
        mine = [row for row in rows if row.layers == layers]
        budgets = sorted({row.budget for row in mine})
        table: dict[str, dict[float, Summary]] = defaultdict(dict)
        for row in mine:
            table[row.method][row.budget] = row
        out.append(f"{'KL, layers by ' + layers:26}" + "".join(f"{b:>10.0%}" for b in budgets) + "   texts")
        for method, found in sorted(table.items(), key=lambda item: _standing(item[1])):
            cells = []
            for budget in budgets:
                one = found.get(budget)
                doubt = "" if one is None or one.against is None or one.against.high < 0 else "*"
                cells.append(f"{'' if one is None else f'{one.kl:.4f}{doubt}':>10}")
            texts = max(one.sequences for one in found.values())
            off = max(one.off_budget for one in found.values())
            out.append(
                f"{method:26}" + "".join(cells) + f"{texts:8}" + (f"  off budget {off:.2%}" if off > 1e-3 else "")
            )
    out.append("* the 95% interval of KL(HADS) - KL(method) is not below 0")
    return out


def _standing(found: dict[float, Summary]) -> float:
    """Geometric mean of KL over budgets: what orders the table."""
    logs = [np.log(max(one.kl, 1e-9)) for one in found.values() if one.budget < 1]
    return float(np.mean(logs)) if logs else 0.0


def seconds(run: Callable, *args: Any, repeats: int = 20) -> float:
    """Of one call among several that are waited for together."""
    jax.block_until_ready(run(*args))
    start = time.perf_counter()
    jax.block_until_ready([run(*args) for _ in range(repeats)][-1])
    return (time.perf_counter() - start) / repeats


def attention_16(query: Array, key: Array, value: Array, **options: Any) -> Array:
    """`xsake.attention` for a model in float32: inputs that are not in 16 bits are rounded to bfloat16."""
    if query.dtype != jnp.float32:
        return xsake.attention(query, key, value, **options)
    narrow = (x.astype(jnp.bfloat16) for x in (query, key, value))
    return xsake.attention(*narrow, **options).astype(jnp.float32)


def join(inputs: Path, work: Path) -> Path:
    """The model's file, put together where it came in pieces."""
    if whole := sorted(inputs.glob("*.gguf")):
        return whole[0]
    pieces = sorted(inputs.glob("*.gguf.[0-9][0-9]"))
    if not pieces:
        raise SystemExit(f"{inputs} has neither *.gguf nor *.gguf.00, ...")
    path = work / pieces[0].stem
    work.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with _atomic.replacing(path) as sink:
            for piece in pieces:
                with piece.open("rb") as source:
                    shutil.copyfileobj(source, sink, 1 << 24)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for profile, records and summaries")
    parser.add_argument("--work", type=Path, default=record.ROOT / "out" / "hads_study", help="folder for what is made")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--stage", default=",".join(STAGES), help="with commas between them")
    parser.add_argument("--methods", default=",".join(METHODS), help="only these, with commas between them")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)), help="shares of blocks, the first ones first")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="from the start; then what is left is left")
    parser.add_argument("--batch", type=int, default=8, help="sequences at a time")
    parser.add_argument("--sequences", type=int, default=64, help="of each domain at most")
    parser.add_argument("--calibration", type=int, default=4, help="sequences of each domain to calibrate on")
    args = parser.parse_args()
    stages = args.stage.split(",")
    if unknown := sorted(set(stages) - set(STAGES)):
        parser.error(f"unknown stages {unknown}; there are {', '.join(STAGES)}")
    start = time.perf_counter()
    jax.config.update("jax_compilation_cache_dir", str(args.work / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    from xsake.model import load_pretrained

    on_cpu = jax.default_backend() == "cpu"
    attention = xsake.attention if on_cpu else attention_16
    model = load_pretrained(
        join(args.inputs, args.work), dtype=jnp.float32, param_dtype=jnp.float32, attention_fn=attention
    )
    settings = Settings(
        length=args.length,
        block=args.block,
        batch=args.batch,
        sequences=args.sequences,
        calibration_sequences=args.calibration,
        budgets=tuple(map(float, args.budgets.split(","))),
        methods=tuple(args.methods.split(",")),
        # 10 bits of mantissa as in the other products (TF32): bfloat16's rounding would be seen beside small KL.
        attention_dtype=None if on_cpu else jnp.float16,
    )
    study = Study(
        model,
        args.inputs / "texts.npz",
        args.out,
        settings,
        earlier=args.inputs,
        stop=lambda: time.perf_counter() - start > 60 * args.minutes,
    )
    study.start = start
    study.say(f"model loaded; {jax.devices()[0].device_kind}, jax {jax.__version__}")
    if "calibrate" in stages:
        study.compile_calibration()
    if set(stages) - {"calibrate"}:
        study.compile_ahead(study.wanted([*FIRST, *OURS, *ABLATIONS, *ORACLES, *PUBLISHED]))
    for stage in STAGES:
        if stage in stages and not study.stop():
            study.say(f"-- {stage}")
            getattr(study, stage)()
    study.say("done")


if __name__ == "__main__":
    main()
