"""How much of the keys and values a shard of a long sequence needs: the union of what its rows attend.

A sequence is cut over 2, 4 and 8 shards by whole blocks, contiguously and in zigzag. A K/V block is needed by a shard
if some row of the shard lists it in the mask of some query head of the KV head. Masks are HADS's, chosen by SmolLM2
while it reads each text under these masks, and sink + window. `benchmarks.hads.shards` records them.

Four shares are recorded, each as a mean over texts, layers and KV heads, with quartiles over layers and KV heads:

    needed_of_all        needed blocks over all K/V blocks, mean of the shards
    needed_of_allowed    needed blocks over those that some row of the shard may attend by causality, mean of the shards
    received_of_all      needed blocks that another shard holds, over all blocks that another shard holds
    received_of_allowed  needed blocks that another shard holds, over the allowed ones among them

`sent` says what room a buffer of fixed size needs: of the blocks that a shard holds, those that another shard needs,
for every pair of shards and KV head; the same for all KV heads of a layer together; and for all that one shard receives
in a layer. Each with its mean, its 95th percentile and its largest value over texts, layers and the rest.

An exchange that sends only needed blocks pays if `needed_of_allowed` is well below 1. It is not built if HADS's mean is
above `MOST`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from xsake.hads.mask import patterns
from xsake.hads.mask.lists.order import OrderName, shard_of_rows

MOST = 0.60
SHARDS = (2, 4, 8)
ORDERS: tuple[OrderName, ...] = ("contiguous", "zigzag")
# (tokens, sink, window): the masks of the GPU benchmark at 32768 tokens, and the same sizes at the study's length.
WINDOWS = ((8192, 512, 4096), (8192, 128, 1024), (32768, 512, 4096), (32768, 128, 1024))
SHARES = ("needed_of_all", "needed_of_allowed", "received_of_all", "received_of_allowed")


def shares(needed_by_row: np.ndarray, shards: int, order: OrderName) -> dict[str, np.ndarray]:
    """The four shares for each head of bool[heads, n, n]; `by_shard`, needed_of_allowed of [heads, shards]; and `sent`,
    of the blocks of one shard those that another needs, [heads, from, to]."""
    n = needed_by_row.shape[-1]
    shard = shard_of_rows(n, shards, order)
    column = np.arange(n)
    needed = np.stack([needed_by_row[:, shard == s].any(1) for s in range(shards)], 1)  # [heads, shards, n]
    allowed = np.stack([column <= np.flatnonzero(shard == s).max() for s in range(shards)])
    elsewhere = np.stack([shard != s for s in range(shards)])
    if (needed & ~allowed).any():
        raise ValueError("a mask lists blocks that causality forbids")
    count, received = needed.sum(-1), (needed & elsewhere).sum((1, 2))
    by_shard = count / allowed.sum(-1)
    holds = np.stack([shard == s for s in range(shards)])
    sent = np.stack([(needed & holds[s]).sum(-1) / holds[s].sum() for s in range(shards)], 1)
    return {
        "needed_of_all": count.mean(-1) / n,
        "needed_of_allowed": by_shard.mean(-1),
        "received_of_all": received / elsewhere.sum(),
        "received_of_allowed": received / (allowed & elsewhere).sum(),
        "by_shard": by_shard,
        "sent": sent,
    }


def rows(name: dict[str, Any], needed: np.ndarray) -> Iterator[dict[str, Any]]:
    """Lines of the record for masks bool[texts, layers, KV heads, n, n], already united over query heads."""
    texts, layers, heads, n, _ = needed.shape
    density = needed.sum((-2, -1)).mean() / (n * (n + 1) / 2)
    for shards in SHARDS:
        for order in ORDERS:
            found = shares(needed.reshape(-1, n, n), shards, order)
            line: dict[str, Any] = {**name, "shards": shards, "order": order, "density_of_groups": _short(density)}
            for share in SHARES:
                by_head = found[share].reshape(texts, layers * heads).mean(0)
                line[share] = {
                    "mean": _short(by_head.mean()),
                    "quartiles": _short(np.quantile(by_head, (0.25, 0.5, 0.75))),
                    "least": _short(by_head.min()),
                    "most": _short(by_head.max()),
                }
            line["sent"] = _sent(found["sent"].reshape(texts, layers, heads, shards, shards))
            line["needed_of_allowed_by_shard"] = _short(found["by_shard"].mean(0))
            if layers * heads > 1:
                by_head = found["needed_of_allowed"].reshape(texts, layers, heads).mean(0)
                line["needed_of_allowed_by_layer_and_kv_head"] = _short(by_head)
            yield line


def _sent(shares: np.ndarray) -> dict[str, Any]:
    """Mean, 95th percentile and largest value of [texts, layers, KV heads, from, to]."""
    others = ~np.eye(shares.shape[-1], dtype=bool)
    kinds = {
        "between_two_shards_for_a_kv_head": shares[..., others],
        "between_two_shards_for_a_layer": shares.mean(2)[..., others],
        "to_a_shard_for_a_layer": shares.mean((2, 3), where=others),
    }
    return {
        name: {"mean": _short(x.mean()), "p95": _short(np.quantile(x, 0.95)), "most": _short(x.max())}
        for name, x in kinds.items()
    }


def by_kv_head(blocks: np.ndarray, kv_heads: int) -> np.ndarray:
    """bool[layers, KV heads, n, n] of bool[layers, H, n, n]: the blocks that some query head of a KV head keeps."""
    layers, heads, side, _ = blocks.shape
    return blocks.reshape(layers, kv_heads, heads // kv_heads, side, side).any(2)


def windows(block: int) -> Iterator[dict[str, Any]]:
    """Lines of the record for sink + window."""
    for tokens, sink, window in WINDOWS:
        mask = patterns.sink_window(tokens, tokens, sink=sink, window=window, block_q=block, block_kv=block)
        what = {"mask": "sink_window", "tokens": tokens, "sink": sink, "window": window}
        yield from rows(what | {"density": _short(mask.density())}, mask.to_blocks()[None, None, 0])


def describe(line: dict[str, Any]) -> str:
    what = f"{line['mask']} {line['tokens']} {line['density']:.1%} " + (
        f"sink {line['sink']} window {line['window']}" if "sink" in line else ""
    )
    means = "  ".join(f"{share} {line[share]['mean']:6.1%}" for share in SHARES)
    return f"{what:42} {line['shards']} shards, {line['order']:10}  {means}"


def _short(x: Any) -> Any:
    return np.round(np.asarray(x, float), 4).tolist()
