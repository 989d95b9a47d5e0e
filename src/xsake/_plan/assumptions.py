"""Everything that a plan takes for granted, in words and with its numbers."""

from __future__ import annotations

from xsake._plan.attention import TILE
from xsake._plan.memory import LOSS_CHUNK, USABLE
from xsake._plan.plan import Plan
from xsake._plan.question import Question
from xsake._plan.rates import shipped, shipped_points, shipped_prompts, shipped_rest

CHECKED = (
    "Checked, for the H200 alone: attention throughputs are recorded runs, and whole training steps on one device come "
    "out near the recorded ones (docs/plan.md). Checked without a device: kept activations, against what JAX keeps. "
    "Not checked: every number of communication and overlap, and the sum of memory. No run on several accelerators "
    "was ever recorded."
)
STATE = {
    "all": "split over the data and sequence axes; gathered in bfloat16 for the forward and again for the backward, "
    "gradients reduce-scattered in float32 (`xsake train --fsdp` splits over the data axis alone: --fsdp data)",
    "data": "split over the data axis, as by `xsake train --fsdp`; gathered in bfloat16 for the forward and again for "
    "the backward, gradients reduce-scattered in float32 and summed over the sequence axis",
    "none": "on every device; gradients all-reduced in float32 over the data and sequence axes",
}
TRAINING_MEMORY = (
    "float32 weights 4, gradients 4 (8 with several sequences per device) and Adam 8 bytes per parameter; per token "
    "and block, without rematerialisation, 28 * width + 16 + ((6 * q_heads + 4 * kv_heads) * head_dim + 4 * q_heads + "
    "12 * mlp_width) / model bytes, an upper bound; with it 2 * width, and one block in full; logits of "
    f"{LOSS_CHUNK} tokens; bfloat16 copies of two blocks and of the output projection; of K and V, gather holds 4 "
    "pieces, ring the next shard, two of float32 gradients and a float32 sum"
)
PREFILL_MEMORY = (
    "bfloat16 weights, 2 bytes per parameter, over model; the cache of K and V; activations of one block as in "
    "training; of K and V, gather holds 2 pieces, ring the next shard and a float32 sum"
)


def assumptions(plan: Plan) -> list[str]:
    """One sentence or more per assumption."""
    note = [plan.question.device.note] if plan.question.device.note else []
    said = [*note, CHECKED, *_compute(plan), *_links(plan), *_exchanges(plan)]
    if not plan.question.prefill:
        said += _weights(plan)
    return [*said, _memory(plan)]


def _compute(plan: Plan) -> list[str]:
    q = plan.question
    used = dict.fromkeys(rate for p in plan.predictions[:8] for rate in p.rates[: 1 if q.prefill else 2])
    rates = "; ".join(f"{rate.tflops:.0f} TFLOP/s ({rate.source})" for rate in used)
    names = {point.record for point in shipped_points() if point.device == q.device.recorded_as}
    names |= set() if q.mfu else {rest.record for rest in (shipped_prompts() if q.prefill else shipped_rest())}
    records = shipped()["records"]
    dates = ", ".join(f"{name} {records[name]['date'][:10]} at {records[name]['commit']}" for name in sorted(names))
    flattered = " Runs of gpu_attention are short and in a fixed order, which may flatter by a tenth."
    flattered = flattered if "gpu_attention" in names else ""
    share = plan.rest.tflops * 1e12 / q.device.peak
    return [
        f"Attention: 4 * q_heads * head_dim operations per active pair of query and key, 3.5 times as many with the "
        f"backward. Throughput by blocks per row of queries, from the recorded call nearest in head_dim and, of "
        f"those with such rows, in length; for the best meshes: {rates}. Recorded: {dates}.{flattered}",
        f"A device with fewer tiles of {TILE} queries than its {q.device.cores} cores is slower in that proportion. A "
        f"ring also adds up partial results: 10 bytes of memory traffic per number and hop, at "
        f"{q.device.bandwidth:.0f} GB/s.",
        f"Shards are balanced (zigzag, or equal counts): the busiest device walks {q.imbalance:g} times the mean "
        f"(--imbalance).",
        _choosing(q),
        f"All other work runs at {plan.rest.tflops:.0f} TFLOP/s of matrix products, {share:.0%} of the peak: "
        f"{plan.rest.source} (--mfu). That is the same on every mesh. Models wider than the recorded ones are likely "
        f"faster, and matrices split over many devices slower.",
    ]


def _choosing(q: Question) -> str:
    if not q.hads:
        return "The masks are given: the time in which HADS would choose blocks is not in the plan (--hads, --prefill)."
    here = [p for p in shipped_prompts() if p.device == q.device.recorded_as]
    lengths = sorted({p.length for p in here})
    return (
        f"HADS chooses blocks for a device's own rows and heads among all keys, in a time that grows with the pairs of "
        f"tokens: {here[0].record}.json, prompts of {' and '.join(map(str, lengths))} tokens in blocks of 128 x 32. "
        "Longer prompts would take blocks of more keys, and less time."
    )


def _links(plan: Plan) -> list[str]:
    device = plan.question.device
    links, (inside, outside) = device.links, device.link_names
    return [
        f"Links of {device.name}, GB/s per device and direction (--link): {inside} {links.inside:g} in collectives and "
        f"{links.hop:g} from one neighbour, among {links.domain} neighbouring devices; {outside} {links.outside:g} "
        f"beyond (inside=, hop=, domain=, outside=). Transfers reach {links.reach:.0%} of that (reach=) and begin "
        f"after {links.latency:g} microseconds (latency=).",
        "Neighbouring devices lie along model, then sequence, then data. A collective over several nodes enters a node "
        "once, by the adapters of all its devices in the group; a hop of a ring, and an all-to-all, by one adapter.",
    ]


def _exchanges(plan: Plan) -> list[str]:
    q = plan.question
    backward = "" if q.prefill else "; in the backward, K and V again and as much of dK and dV"
    ring = "" if q.prefill else "; in the backward again, and dK and dV in float32 n hops"
    return [
        f"gather: a device receives (n-1)/n of the bytes of K and V{backward}; a piece is kv_heads/n heads, at least "
        f"one. ring: K and V travel n-1 hops, (n-1)/n of their bytes{ring}. sparse (a what-if): {q.union:.0%} of "
        f"gather's bytes, as an all-to-all (--union). K and V: 2 * tokens * kv_heads * head_dim * 2 bytes per layer.",
        f"Overlap: {q.overlap:.0%} (--overlap) of what could travel beside the attention of another piece or hop, or, "
        f"for weights, beside other matrix products, does. The first piece and the last gradients never do.",
        "Model axis: per block and direction two all-reduces of tokens * width * 2 bytes, none of it hidden.",
    ]


def _weights(plan: Plan) -> list[str]:
    return [
        f"Weights, gradients and optimiser: {STATE[plan.question.fsdp]}. A device computes its sequences one after the "
        f"other, and moves weights and gradients for each.",
        "Rematerialisation (--remat), where activations do not fit without it, computes every block's forward a second "
        "time, its exchange and its all-reduces too.",
    ]


def _memory(plan: Plan) -> str:
    device = plan.question.device
    return (
        f"Memory: {PREFILL_MEMORY if plan.question.prefill else TRAINING_MEMORY}. Lists of blocks are left out. A mesh "
        f"fits if this is at most {USABLE:.0%} of the device's {device.memory:g} GB."
    )
