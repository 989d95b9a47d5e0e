"""The calls that `gpu/peers.py` and `compare_trees.py` race: workloads by name, and the masks of each."""

from __future__ import annotations

import dataclasses

import numpy as np

import xsake
from benchmarks import record
from xsake.autotune.workloads import WORKLOADS, Workload

ODD = Workload(name="odd10k_d96", batch=1, q_heads=16, kv_heads=16, length=10000, head_dim=96, is_causal=True)
MLA = Workload(
    name="mla16k", batch=1, q_heads=16, kv_heads=16, length=16384, head_dim=192, value_dim=128, is_causal=True
)
HADS = Workload(name="smollm8k", batch=1, q_heads=72, kv_heads=24, length=8192, head_dim=64, is_causal=True)
CALLS = {name: WORKLOADS[name] for name in ("llama32k", "full16k", "gpt4k", "gpt4k_d64")} | {
    w.name: w for w in (ODD, MLA, HADS)
}
HADS_MASKS = record.ROOT / "benchmarks" / "data" / "hads_masks.npz"  # written by `gpu/hads_masks.py`


def masks_of(workload: Workload) -> dict[str, xsake.BlockMask]:
    if workload is ODD:
        return {"random 25%": workload.mask(0.25)}
    if workload is MLA:
        return {f"random {d:.0%}": workload.mask(d) for d in (1.0, 0.43)}
    if workload is HADS:
        chosen = {name: coarse(blocks) for name, blocks in hads_blocks().items()}
        chosen |= {f"random, as {name}": as_many(blocks) for name, blocks in chosen.items()}
        return {name: of_blocks(workload, blocks, workload.block) for name, blocks in chosen.items()}
    masks = {f"random {d:.0%}": workload.mask(d) for d in (1.0, 0.43, 0.1)}
    if workload.is_causal and workload.length > 8192:
        for sink, window in ((512, 4096), (128, 1024)):
            masks[f"sink {sink}, window {window}"] = xsake.patterns.sink_window(
                workload.length, workload.length, sink=sink, window=window
            )
        masks |= {f"lines {d:.0%}": lines(workload, d) for d in (0.43, 0.2, 0.1)}
    return masks


def lines(workload: Workload, density: float) -> xsake.BlockMask:
    """A sink, a window of four blocks, and vertical lines up to the density; lines differ between K/V heads."""
    n = workload.length // workload.block
    row, column = np.arange(n)[:, None], np.arange(n)[None]
    allowed = column <= row
    heads = []
    for head in range(workload.kv_heads):
        rng = np.random.default_rng(head)
        blocks = ((column == 0) | (row - column < 4)) & allowed
        for line in rng.permutation(n):
            if blocks.sum() >= density * allowed.sum():
                break
            blocks |= (column == line) & allowed
        heads.append(blocks)
    per_query_head = np.repeat(np.stack(heads), workload.q_heads // workload.kv_heads, axis=0)
    return of_blocks(workload, per_query_head, workload.block)


def hads_like(workload: Workload, density: float) -> xsake.BlockMask:
    """The first 128 keys, the 64 to 128 before the diagonal, and random blocks up to the density; a list per head."""
    block_q, block_kv, n = workload.block, workload.block_kv or workload.block, workload.length
    first = np.arange(0, n, block_q)[:, None], np.arange(0, n, block_kv)[None]
    allowed = first[1] < first[0] + block_q
    forced = allowed & ((first[1] < 128) | (first[1] + block_kv > first[0] - 64))
    rest = (density * allowed.sum() - forced.sum()) / (allowed & ~forced).sum()
    drawn = np.random.default_rng(0).random((workload.q_heads, *allowed.shape), np.float32) < rest
    return xsake.BlockMask.from_blocks(
        drawn & allowed | forced, block_q=block_q, block_kv=block_kv, q_len=n, kv_len=n, is_causal=workload.is_causal
    )


def hads_blocks() -> dict[str, np.ndarray]:
    """By names such as "HADS 43%": bool[heads of all layers, n, n] in blocks of 64."""
    with np.load(HADS_MASKS) as arrays:
        n = HADS.length // 64
        return {name: np.unpackbits(arrays[name], axis=-1).astype(bool)[..., :n] for name in arrays if name != "about"}


def coarse(blocks: np.ndarray) -> np.ndarray:
    """In blocks of 128: those that hold a block of 64."""
    heads, n, _ = blocks.shape
    return blocks.reshape(heads, n // 2, 2, n // 2, 2).any((2, 4))


def as_many(blocks: np.ndarray) -> np.ndarray:
    """Random causal blocks: every head keeps its diagonal, and as many other blocks as it has."""
    n, rng, found = blocks.shape[1], np.random.default_rng(0), []
    for head in blocks:
        rest = rng.permutation(np.flatnonzero(np.tri(n, k=-1)))[: np.tril(head).sum() - n]
        found.append(np.isin(np.arange(n * n), rest).reshape(n, n) | np.eye(n, dtype=bool))
    return np.stack(found)


def of_blocks(workload: Workload, blocks: np.ndarray, block: int) -> xsake.BlockMask:
    length = workload.length
    return xsake.BlockMask.from_blocks(
        blocks, block_q=block, block_kv=block, q_len=length, kv_len=length, is_causal=workload.is_causal
    )


def with_small_blocks(workload: Workload, name: str) -> xsake.BlockMask | None:
    """The mask of that name in blocks of 64, where such masks are raced."""
    kind, _, density = name.partition(" ")
    if kind == "HADS":
        return of_blocks(workload, hads_blocks()[name], 64)
    if kind not in ("random", "lines") or workload.length <= 8192 or workload in (ODD, MLA):
        return None
    at = dataclasses.replace(workload, block=64)
    part = float(density.rstrip("%")) / 100
    return lines(at, part) if kind == "lines" else at.mask(part)


def pairs(mask: xsake.BlockMask) -> float:
    """Keys that a query attends, on average over queries and heads."""
    token, first = np.arange(mask.q_len)[:, None], np.arange(mask.num_kv_blocks)[None] * mask.block_kv
    keys = np.clip(np.minimum(token + 1, mask.kv_len) - first, 0, mask.block_kv)
    of_blocks = np.add.reduceat(keys, np.arange(0, mask.q_len, mask.block_q), axis=0)
    return float((np.asarray(mask.to_blocks()) * of_blocks).sum() / (mask.batch * mask.heads * mask.q_len))
