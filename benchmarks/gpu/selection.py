"""Tokens that choose their own blocks, beside dense attention by cuDNN: groups of query heads, lengths, directions.

    python -m benchmarks.gpu.selection                          all of it, measure and print
    python -m benchmarks.gpu.selection --record                 also write benchmarks/results/gpu_selection.json
    python -m benchmarks.gpu.selection --out DIR                write the run to DIR
    python -m benchmarks.gpu.selection --peers ejkernel         race ejkernel, too (see README.md for its installation)
    python -m benchmarks.gpu.selection --tokens 256 --heads 8 --groups 4 --dense xla    a small run, anywhere

64 query heads of 128 numbers; every token chooses 16 blocks of 64 keys, its own block among them. Two choices are
measured. `scored`: by native sparse attention's own scores, on inputs of which 16 neighbouring tokens share four fifths
of the variance. `uniform`: at random among the blocks so far, so that neighbours share next to nothing: no model
chooses like that, and it is the worst case for lists that neighbours have in common. `union` is how many blocks such a
list has for each block that a token chose. TFLOP/s count what is chosen: two products forward, seven with the backward.

The whole operation has the three branches of native sparse attention, with a window of 512 tokens. `--dense` is the
implementation of jax.nn.dot_product_attention that is raced, causal.

With 16 heads per K/V head our raw Triton kernels are raced, too, where jax-triton is installed. They and other
libraries are given the same blocks, and are compared with our results before they are timed. The record says in words
what failed or was wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import xsake
from benchmarks.harness import turns
from benchmarks.harness.contestants import Checked, fastest, told
from benchmarks.harness.kernel_times import kernel_times
from benchmarks.harness.race import timings
from benchmarks.harness.script import Record, Row, listed, parser, show, spread
from xsake import kernels_raw_triton
from xsake._race.contestants import dense
from xsake._race.course import DIRECTIONS, FORWARD, in_direction
from xsake._selection.choose import choose_blocks, pooled
from xsake._selection.selected import mask_of

BLOCK, COUNT, WINDOW, DIM = 64, 16, 512, 128
RAW_TRITON, RAW_TRITON_GROUP = "raw_triton", 16
EJKERNEL, MENDED = "ejkernel", "ejkernel, mended"
PEERS = {EJKERNEL: (EJKERNEL, MENDED)}  # of other libraries, and what is raced of them
CHOICES = ("scored", "uniform")
RESULTS = ("output", "dQ", "dK", "dV")
ALIKE = 16  # neighbouring tokens that share four fifths of the variance

Runs = dict[str, tuple[Any, ...]]  # by name: a function and its arguments


class Case(NamedTuple):
    """Inputs of one size."""

    tokens: int
    heads: int
    group: int
    choices: tuple[str, ...]
    with_whole: bool


def inputs(tokens: int, heads: int, kv_heads: int) -> tuple[Array, Array, Array, Array]:
    """(query, key, value, cotangent of the output)."""

    def array(seed: int, n: int) -> Array:
        shared, own = jax.random.split(jax.random.key(seed))
        common = jax.random.normal(shared, (1, -(-tokens // ALIKE), n, DIM), jnp.bfloat16).repeat(ALIKE, 1)[:, :tokens]
        noise = jax.random.normal(own, (1, tokens, n, DIM), jnp.bfloat16)
        return (common * 0.8**0.5 + noise * 0.2**0.5).astype(jnp.bfloat16)

    return array(0, heads), array(1, kv_heads), array(2, kv_heads), array(3, heads)


@partial(jax.jit, static_argnums=0)
def scored(scale: float, query: Array, key: Array) -> Array:
    options = dict(block_size=BLOCK, count=COUNT, scale=scale, by_weight=True, keep_first=True)
    return choose_blocks(query, pooled(key, BLOCK), **options)


@partial(jax.jit, static_argnums=(0, 1))
def uniform(tokens: int, kv_heads: int) -> Array:
    """A block that is drawn twice is -1, no block, the second time: not every library counts repeated blocks once."""
    own = jnp.arange(tokens, dtype=jnp.int32)[None, :, None, None] // BLOCK
    drawn = jax.random.uniform(jax.random.key(4), (1, tokens, kv_heads, COUNT - 1))
    others = (drawn * (own + 1).astype(drawn.dtype)).astype(jnp.int32)
    drawn = jnp.concatenate([jnp.broadcast_to(own, (1, tokens, kv_heads, 1)), others], -1)
    earlier = jnp.tril(jnp.ones((COUNT, COUNT), bool), -1)[None, None, None]
    return jnp.where(((drawn[..., None] == drawn[..., None, :]) & earlier).any(-1), -1, drawn)


def union(group: int, indices: Array) -> tuple[int, Array, Array]:
    """(tokens of a list, its blocks for each block that a token chose, keys that a token attends on average)."""
    mask = mask_of(indices, None, indices.shape[1], BLOCK, None, group)
    listed = jnp.diff(mask.kv_row_ptr).mean()
    token = jnp.arange(indices.shape[1])[None, :, None, None]
    different = jnp.sort(indices, -1)
    different = jnp.where(jnp.diff(different, axis=-1, prepend=-2) != 0, different, -1)
    keys = jnp.where(different < 0, 0, jnp.clip(token + 1 - different * BLOCK, 0, BLOCK)).sum(-1)
    return mask.block_q, listed / (different >= 0).sum(-1).mean(), keys.mean()


def selected(query: Array, key: Array, value: Array, indices: Array, *, implementation: str | None = None) -> Array:
    return xsake.selected_attention(query, key, value, indices, block_size=BLOCK, implementation=implementation)


def whole(query: Array, key: Array, value: Array) -> Array:
    gate = jnp.full(query.shape[:3], 0.5, query.dtype)
    gates = dict(gate_compressed=gate, gate_selected=gate, gate_window=gate)
    options = dict(block_size=BLOCK, num_selected=COUNT, window=min(WINDOW, query.shape[1]))
    return xsake.native_sparse_attention(query, key, value, **gates, **options)


def error(query: Array, key: Array, value: Array, indices: Array) -> Array:
    """The relative error of the first 4096 tokens against XLA in float32."""
    n = min(query.shape[1], 4096)
    few = [x[:, :n] for x in (query, key, value)]
    exact = xsake.selected_attention(
        *(x.astype(jnp.float32) for x in few), indices[:, :n], block_size=BLOCK, implementation="xla"
    )
    found = selected(*few, indices[:, :n]).astype(jnp.float32)
    return jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)


def variants_of(peer: str, group: int) -> dict[str, Callable[..., Array]] | str:
    """Functions like `selected`, of which the fastest is raced, or why there are none."""
    if peer == RAW_TRITON:
        return kernels_raw_triton.unavailable() or {"as shipped": partial(selected, implementation=RAW_TRITON)}
    try:
        from benchmarks.contestants import ejkernel as ejkernel_peer
    except Exception as error:  # whatever an import of another library raises
        return f"it cannot be imported: {told(error)}"
    of = {EJKERNEL: ejkernel_peer.variants, MENDED: ejkernel_peer.mended}[peer]
    return ejkernel_peer.unsupported(group) or of(BLOCK)


def checked_peers(peers: Sequence[str], group: int, runs: Runs, ours: dict[str, Any]) -> dict[str, Checked]:
    """By name and direction, on the arguments of our own runs."""
    found = {}
    for peer in peers:
        variants = variants_of(peer, group)
        for direction in DIRECTIONS:
            if peer == MENDED and direction == FORWARD:
                continue  # only its backward differs
            name, (_, *given) = f"{peer}, {direction}", runs[f"selected, {direction}"]
            if isinstance(variants, str):
                found[name] = Checked(None, variants)
            else:
                results = dict(zip(RESULTS, jax.tree.leaves(ours[direction]), strict=False))
                functions = {how: in_direction(attend, direction) for how, attend in variants.items()}
                found[name] = fastest(functions, given, results)
    return found


def runs_of(arrays: tuple[Any, Any, Any, Any], indices: Any, choice: str, by: str, with_whole: bool) -> Runs:
    """Our contestants and dense attention on these inputs; dense attention runs with one choice only."""
    attends: dict[str, tuple[Callable[..., Array], tuple[Any, ...]]] = {"selected": (selected, (indices,))}
    if choice == "scored":
        attends[f"dense {by}"] = dense(by), ()
        if with_whole:
            attends["whole"] = whole, ()
    return {
        f"{who}, {direction}": (
            in_direction(attend, direction),
            *(arrays[:3] if direction == FORWARD else arrays),
            *rest,
        )
        for who, (attend, rest) in attends.items()
        for direction in DIRECTIONS
    }


def chosen(choice: str, query: Array, key: Array) -> Array:
    if choice == "scored":
        return scored(DIM**-0.5, query, key)
    tokens = query.shape[1]
    return uniform(tokens, key.shape[2])[..., : -(-tokens // BLOCK)]  # as few as there are blocks


def around(arrays: tuple[Any, Any, Any, Any], indices: Any, choice: str, group: int) -> Runs:
    """Programs that run beside the races."""
    query, key, value, _ = arrays
    return {
        choice: (partial(chosen, choice), query, key),
        "union": (partial(union, group), indices),
        "error": (error, query, key, value, indices),
    }


def compile_all(cases: Sequence[Case], by: str) -> dict[tuple[Case, str], Any]:
    """The program of every run, compiled side by side; both choices of a case share theirs."""
    with ThreadPoolExecutor() as pool:
        jobs = {}
        for case in cases:
            arrays = jax.eval_shape(partial(inputs, case.tokens, case.heads, case.heads // case.group))
            for choice in case.choices:
                indices = jax.eval_shape(partial(chosen, choice), *arrays[:2])
                runs = runs_of(arrays, indices, choice, by, case.with_whole)
                for name, (function, *given) in (runs | around(arrays, indices, choice, case.group)).items():
                    if (case, name) not in jobs:
                        jobs[case, name] = pool.submit(compiled, function, given)
        return {of: job.result() for of, job in jobs.items()}


def compiled(function: Callable[..., Any], given: Sequence[Any]) -> Any:
    return jax.jit(function).lower(*given).compile()


def measure(
    case: Case, programs: dict[tuple[Case, str], Any], by: str, rounds: int, peers: Sequence[str] = ()
) -> list[Row]:
    tokens, heads, group = case.tokens, case.heads, case.group
    query, key, value, d_out = inputs(tokens, heads, heads // group)
    rows = []
    for choice in case.choices:
        indices = programs[case, choice](query, key)
        list_tokens, listed, keys = (x.item() for x in programs[case, "union"](indices))
        runs = runs_of((query, key, value, d_out), indices, choice, by, case.with_whole)
        contestants = {name: partial(programs[case, name], *given) for name, (_, *given) in runs.items()}
        ours = {direction: contestants[f"selected, {direction}"]() for direction in DIRECTIONS}
        checked = checked_peers([*([RAW_TRITON] if group == RAW_TRITON_GROUP else []), *peers], group, runs, ours)
        del ours
        contestants |= {name: peer.run for name, peer in checked.items() if peer.run is not None}
        rows.append(
            {
                "tokens": tokens,
                "heads": heads,
                "group": group,
                "choice": choice,
                "list_tokens": list_tokens,
                "union": listed,
                "keys": keys,
                "error": float(programs[case, "error"](query, key, value, indices)),
                "memory": {name: _temporary(programs[case, name]) for name in runs if "dense" not in name},
                "seconds": timings(contestants, rounds),
                "kernels": {name: kernel_times(contestants[name]) for name in runs if "dense" not in name},
                "peers": {name: peer.recorded() for name, peer in checked.items()},
            }
        )
    return rows


def _temporary(program: Any) -> int | None:
    """Bytes beside inputs and outputs."""
    found = program.memory_analysis()
    return None if found is None else found.temp_size_in_bytes


def lines_of(row: Row) -> list[list[Any]]:
    about = [row["tokens"], row["group"], row["choice"], f"{row['union']:.2f}", f"{row['error']:.1e}"]
    lines = []
    for name, time in row["seconds"].items():
        flops = (4 if name.endswith(" forward") else 14) * row["tokens"] * row["heads"] * row["keys"] * DIM
        speed = "" if name.startswith(("dense", "whole")) else f"{flops / time['median'] / 1e12:.0f}"
        lines.append([*about, name, *spread(time), speed])
    return lines


def main() -> None:
    options = parser(__doc__, rounds=7, dense=True)
    options.add_argument("--tokens", type=listed(int), default=[65536, 32768, 8192])
    options.add_argument("--groups", type=listed(int), default=[16, 8, 4, 1], help="query heads per K/V head")
    options.add_argument("--heads", type=int, default=64, help="query heads")
    options.add_argument("--choices", type=listed(among=CHOICES), default=[*CHOICES])
    options.add_argument("--whole", type=listed(int), default=[16], help="groups of the whole operation")
    options.add_argument("--peers", type=listed(among=PEERS), default=[], help="other libraries to race")
    args = options.parse_args()
    peers = [contestant for name in args.peers for contestant in PEERS[name]]
    cases = [
        Case(tokens, args.heads, group, tuple(args.choices), group in args.whole)
        for tokens in args.tokens
        for group in args.groups
    ]
    programs = compile_all(cases, args.dense)
    turns.begin()
    rows = Record("gpu_selection", args.out)
    for case in cases:
        rows.add(*measure(case, programs, args.dense, args.rounds, peers))
    columns = ["tokens", "group", "choice", "union", "error", "what", "ms", "quartiles", "TFLOP/s"]
    show(columns, [line for row in rows for line in lines_of(row)])
    for row in rows:
        for name, peer in row["peers"].items():
            if peer["words"]:
                print(f"{row['tokens']} tokens, group {row['group']}, {row['choice']}: {name}: {peer['words']}")


if __name__ == "__main__":
    main()
