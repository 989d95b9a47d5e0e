"""The races of sparse and dense attention that recorded benchmarks hold, as entries of the tuning database.

    python -m benchmarks.hads.races            write them to tuning_db/nvidia_h200.json

`hads_mask_cost.json` timed a layer's attention, with the choice of its blocks; the others timed whole models. Dense is
the fastest dense contestant. Sparse attention wins where its upper quartile is below dense's lower one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from benchmarks import record
from xsake import tuning_db
from xsake.autotune.write import writer
from xsake.tuning_db import Database, Entry, Key

DEVICE = "NVIDIA H200"
PATH = record.ROOT / "tuning_db" / tuning_db.file_name(DEVICE)
_HEADS = {"qwen2.5-1.5b": (12, 2, 128), "smollm2-135m": (9, 3, 64)}  # query heads, KV heads, head_dim
Row = dict[str, Any]
Race = tuple[str, str, tuple[int, int, int], Row]  # kind, workload, heads; sizes, block, density, dense, sparse


def entries() -> tuple[list[Entry], dict[str, Any]]:
    """The entries, and their environments."""
    found, environments = [], {}
    for name, races in (
        ("hads_mask_cost", _layers),
        ("gpu_prompt", _prompts),
        ("gpu_prompt_long", _prompts),
        ("gpu_generate", _written),
        ("train_gpu", _trained),
    ):
        one = json.loads((record.ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        where = one["environment"]
        versions = {"xsake": where["commit"][:12]} | {k: where["versions"][k] for k in ("jax", "jaxlib", "triton")}
        environment = {"versions": versions} | {k: where[k] for k in ("python", "machine", "cores")}
        identity = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:8]
        environments[identity] = environment
        about = {
            "source": "record",
            "record": f"benchmarks/results/{name}.json at {where['commit'][:12]}",
            "date": where["date"],
            "environment": identity,
        }
        found += [_entry(*race, about) for race in races(one["results"])]
    return found, environments


def _entry(kind: str, workload: str, heads: tuple[int, int, int], row: Row, about: Row) -> Entry:
    q_heads, kv_heads, head_dim = heads
    key = Key.of(
        operation=tuning_db.HADS,
        implementation="mosaic_gpu",
        direction=kind,
        dtype="bfloat16",
        head_dim=head_dim,
        value_dim=head_dim,
        group=q_heads // kv_heads,
        block_q=row["blocks"][0],
        block_kv=row["blocks"][1],
        causal=True,
        q_len=row["queries"],
        kv_len=row["keys"],
        heads=row["batch"] * q_heads,
        density=row["density"],
    )
    dense, sparse = row["dense"], row["sparse"]
    times = {"default": _us(dense), "tuned": _us(sparse)}
    blocks = f"blocks of {row['blocks'][0]} x {row['blocks'][1]}"
    named = f"{workload}, {q_heads}/{kv_heads} heads of {head_dim}, {blocks}"
    more = {
        "speedup": round(dense["median"] / sparse["median"], 4),
        "measured": [{"workload": named, "density": round(row["density"], 4)} | times],
    }
    return Entry(key, {"sparse": sparse["high"] < dense["low"]}, about | more)


def _us(time: Row) -> Row:
    return {name: round(time[name] * 1e6, 2) for name in ("median", "low", "high")} | {"rounds": time.get("rounds", 1)}


def _layers(results: list[Row]) -> Iterator[Race]:
    dense = {row["length"]: row["seconds"] for row in results if row["what"] == "dense"}
    for row in results:
        if not row["what"].startswith("mask and attention: hads at "):
            continue
        length, density = row["length"], float(row["what"].split()[-1].rstrip("%")) / 100
        sizes = dict(queries=length, keys=length, batch=1, blocks=(row["block"],) * 2, density=density)
        heads = row["q_heads"], row["kv_heads"], row["head_dim"]
        yield "prompt", f"a prompt of {length} tokens", heads, sizes | dict(dense=dense[length], sparse=row["seconds"])


def _prompts(results: list[Row]) -> Iterator[Race]:
    for row in results:
        if row["model"] not in _HEADS or "commit" in row:
            continue  # the rest is of parts of a model, or of an earlier revision
        heads, length, seconds = _HEADS[row["model"]], row["length"], row["seconds"]
        for name, time in seconds.items():
            if not name.startswith("HADS"):
                continue
            share, _, chunk = name.removeprefix("HADS ").partition(", chunks of ")
            queries = int(chunk) if chunk else length
            rivals = [f"dense, chunks of {chunk}"] if chunk else ["dense", "dense by cudnn"]
            dense = min((seconds[rival] for rival in rivals), key=lambda rival: rival["median"])
            sizes = dict(queries=queries, keys=length, batch=1, blocks=row.get("blocks", (64, 64)))
            how = f" in chunks of {chunk}" if chunk else ""
            what = f"{row['model']} reading a prompt of {length} tokens{how}"
            times = dict(density=float(share.rstrip("%")) / 100, dense=dense, sparse=time)
            yield "chunk" if chunk else "prompt", what, heads, sizes | times


def _written(results: list[Row]) -> Iterator[Race]:
    for row in results:
        sizes = dict(queries=1, keys=row["length"], batch=row["batch"], blocks=(64, 64), density=0.1)
        times = dict(dense=row["seconds"]["dense"], sparse=row["seconds"]["HADS 10%"])
        what = f"qwen2.5-1.5b writing after {row['batch']} x {row['length']} tokens"
        yield "decode", what, _HEADS["qwen2.5-1.5b"], sizes | times


def _trained(results: list[Row]) -> Iterator[Race]:
    dense = {(row["preset"], row["length"]): row["seconds"] for row in results if row["kind"] == "dense"}
    for row in results:
        if row["kind"] != "hads" or "beside" in row:  # "beside": something else ran on the device
            continue
        config, length = row["config"], row["length"]
        heads = tuple(config["model"][name] for name in ("q_heads", "kv_heads", "head_dim"))
        sizes = dict(queries=length, keys=length, batch=config["batch"], blocks=(config["block"],) * 2)
        times = dict(density=row["density"], dense=dense[row["preset"], length], sparse=row["seconds"])
        what = f"{row['preset']} training on {config['batch']} x {length} tokens"
        yield "training", what, heads, sizes | times  # type: ignore[misc]


def main() -> None:
    found, environments = entries()
    writer.prune(PATH, lambda entry: entry.about["source"] != "record")
    writer.merge(PATH, DEVICE, found, environments)
    print(f"{PATH}: {len(found)} races, {len(Database.read(PATH))} entries")


if __name__ == "__main__":
    main()
