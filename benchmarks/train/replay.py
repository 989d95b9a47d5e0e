"""A training replay for the dashboard: a small model learns the project's own text, densely and with HADS.

    python -m benchmarks.train.replay                      train both on this machine's CPU, and print
    python -m benchmarks.train.replay --record             also write benchmarks/results/replays/
    python -m benchmarks.train.replay --steps 40           a shorter run;  --work DIR: keep data and runs there, and
                                                           go on with what is there

At every checkpoint the model reads one held-out text: its dense attention by block, and the blocks that the run's own
attention keeps.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import record
from xsake.dashboard.read import stored
from xsake.dashboard.read.coding import encode_levels, encode_mask, lower_triangle
from xsake.dashboard.read.run import Run
from xsake.dashboard.read.thinning import fit
from xsake.dashboard.show.run_documents import as_lists
from xsake.hads.calibration.observe import observe
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.mask_function import mask_shape
from xsake.model.data.build import build
from xsake.model.data.shards import open_shards
from xsake.model.network.config import ModelConfig
from xsake.model.text.tokenizer import from_folder
from xsake.model.training.checkpoints import Checkpoints
from xsake.model.training.config import TrainConfig
from xsake.model.training.loop import CHECKPOINTS_FOLDER, train
from xsake.model.training.trainer import Trainer

MODEL = ModelConfig(
    vocab_size=1024,
    layers=3,
    width=96,
    q_heads=4,
    kv_heads=2,
    head_dim=24,
    mlp_width=256,
    context=512,
)
LENGTH, BLOCK, BATCH, CHECKPOINTS = 512, 16, 4, 8
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {"attention": "dense"}),
    "hads": ("HADS at 43%", {"attention": "hads", "density": 0.43, "block": BLOCK}),
}
SOURCES = ("docs", "hads", "model", "autotune", "kernels_pallas_gpu", "kernels_pallas_tpu", "kernels_xla_ref", "tests")
METRICS = ("loss", "held_out_loss", "learning_rate", "gradient_norm", "tokens_per_second", "seconds", "density")


def configuration(kind: str, steps: int) -> TrainConfig:
    every = max(1, steps // CHECKPOINTS)
    return TrainConfig(
        model=MODEL,
        length=LENGTH,
        batch=BATCH,
        steps=steps,
        warmup=max(1, steps // 20),
        learning_rate=3e-3,
        dtype="float32",
        **KINDS[kind][1],
        **({"recalibrate_every": every} if kind == "hads" else {}),
    )


def make_data(folder: Path) -> Path:
    """Tokens of the project's pages and sources."""
    if not (folder / "tokenizer.json").exists():
        files = [path for name in SOURCES for path in sorted((record.ROOT / name).rglob("*.py"))]
        files += [*sorted((record.ROOT / "docs").rglob("*.md")), record.ROOT / "README.md"]
        files = [path for path in files if "_build" not in path.parts]
        build(files, folder, vocab_size=MODEL.vocab_size, holdout=0.05)
    return folder


class Frames:
    """The attention of a run at its checkpoints, on one text."""

    def __init__(self, kind: str, config: TrainConfig, data: Path, tokens: np.ndarray):
        self._kind, self._config = kind, config
        self._tokens = jnp.asarray(tokens[None])
        self._program = Trainer(config, data=data, recalibrate=lambda *_: None).program

    def at(self, checkpoints: Checkpoints, step: int) -> dict[str, Any]:
        if step == 0:
            return self._frame(0, self._program.init().params, None)
        params = checkpoints.restore(step, "state", self._program.abstract_state()).params
        return self._frame(step, params, self._mask_fn(checkpoints, step))

    def _mask_fn(self, checkpoints: Checkpoints, step: int) -> Any:
        if self._kind == "dense":
            return None
        model = self._config.model
        heads = dict(layers=model.layers, q_heads=model.q_heads, kv_heads=model.kv_heads, head_dim=model.head_dim)
        shape = mask_shape(budget=self._config.density, block=BLOCK, length=LENGTH, **heads)
        everywhere = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        leaves = checkpoints.restore_leaves(step, "mask", everywhere)
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)

    def _frame(self, step: int, params: Any, mask_fn: Any) -> dict[str, Any]:
        model = self._program.model(params)
        seen = [
            lower_triangle(np.asarray(one.statistics.mass[0]))
            for one in observe(model, self._tokens, CausalGrid(LENGTH, BLOCK))
        ]
        kept = self._kept(model, mask_fn) if mask_fn is not None else [np.ones_like(mass, bool) for mass in seen]
        heads = [
            {
                "layer": layer,
                "head": head,
                "share": round(float(kept[layer][head].mean()), 4),
                "mass": encode_levels(seen[layer][head]),
                "kept": encode_mask(kept[layer][head]),
            }
            for layer in range(MODEL.layers)
            for head in range(MODEL.q_heads)
        ]
        density = round(float(np.mean([layer.mean() for layer in kept])), 4)
        return {"run": self._kind, "step": step, "side": LENGTH // BLOCK, "density": density, "heads": heads}

    def _kept(self, model: Any, mask_fn: Any) -> list[np.ndarray]:
        """The blocks that each layer keeps, bool[H, blocks], chosen from the sparse model's own queries and keys."""
        kept: list[np.ndarray] = []

        def watched(layer: int, query: jax.Array, key: jax.Array) -> Any:
            mask = mask_fn(layer, query, key)
            kept.append(lower_triangle(np.asarray(mask.to_blocks()[0])))
            return mask

        model.hidden(self._tokens, mask_fn=watched)
        return kept


def curves(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(series, densities by layer and head) of a run file."""
    root = file.parent.resolve()
    run = Run(identity="", name="", shown_path="", root=root, path=root / file.name)
    while run.update():
        pass
    names = [name for name in METRICS if name in run.state.curves]
    series = {name: as_lists(fit(run.state.curves[name].points, 2000)[0]) for name in names}
    return series, run.state.densities.all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/replays/")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        recording = make(options.work or Path(temporary), options.steps)
    print(f"{len(recording['frames'])} frames")
    if options.record:
        path = record.RESULTS / "replays" / f"{recording['about']['id']}{stored.SUFFIX}"
        stored.write(path, recording)
        print(f"{path} ({path.stat().st_size:,} bytes)")


def make(work: Path, steps: int) -> dict[str, Any]:
    data = make_data(work / "data")
    every = max(1, steps // CHECKPOINTS)
    tokens = np.asarray(open_shards(data, "held")[0].tokens[:LENGTH], np.int32)
    identity = f"small-{LENGTH}"
    frames: dict[str, Any] = {}
    listed: dict[str, list[dict[str, Any]]] = {}
    series: dict[str, Any] = {}
    densities: dict[str, Any] = {}
    for kind in KINDS:
        config = configuration(kind, steps)
        options: dict[str, Any] = dict(checkpoint_every=every, keep=CHECKPOINTS + 2, eval_every=every, eval_batches=4)
        file = train(config, data=data, run=work / kind, **options)
        series[kind], densities[kind] = curves(file)
        with Checkpoints(work / kind / CHECKPOINTS_FOLDER, read_only=True) as checkpoints:
            maker = Frames(kind, config, data, tokens)
            for step in [0] * (kind == "dense") + checkpoints.steps():
                frames[f"{kind}.{step}"] = maker.at(checkpoints, step)
                print(f"{kind}: step {step}, density {frames[f'{kind}.{step}']['density']}", flush=True)
                name = f"api/replays/{identity}/frames/{kind}.{step}"
                listed.setdefault(kind, []).append({"step": step, "name": name})
    decode = from_folder(data).decode
    about = {
        "id": identity,
        "title": f"A model of {MODEL.param_count():,} weights learns this project's own text: dense, and with HADS",
        "environment": record.environment(),
        "runs": [
            {"id": kind, "title": title, "attention": settings["attention"], "density": settings.get("density", 1.0)}
            for kind, (title, settings) in KINDS.items()
        ],
        "steps": steps,
        "checkpoints": sorted({one["step"] for some in listed.values() for one in some}),
        "length": LENGTH,
        "block": BLOCK,
        "side": LENGTH // BLOCK,
        "layers": MODEL.layers,
        "heads": MODEL.q_heads,
        "tokens_per_step": BATCH * LENGTH,
        "model": dataclasses.asdict(MODEL),
        "text": [decode(tokens[at : at + BLOCK].tolist()) for at in range(0, LENGTH, BLOCK)],
        "series": series,
        "densities": densities,
        "frames": listed,
    }
    return {"about": about, "frames": frames}


if __name__ == "__main__":
    main()
