"""One step (or prefill) on one mesh with one exchange: seconds, traffic and memory of a device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from xsake._plan.attention import AttentionTime, attention_time, blocks_per_row, forward_flops
from xsake._plan.exchanges import Traffic, exchange_traffic, heads_per_piece, kv_bytes
from xsake._plan.groups import all_reduce_seconds, collective_seconds, share_of_others
from xsake._plan.memory import USABLE, prefill_memory, training_memory
from xsake._plan.meshes import Mesh
from xsake._plan.models import block_weights, matmul_weights
from xsake._plan.question import Question
from xsake._plan.rates import Point, Rate, choice_seconds, shipped_prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Times, traffic and memory of one device in a whole step; sizes in bytes.

    Args:
      exchange: how K and V get to the queries.
      mesh: data x model x sequence.
      remat: whether activations are recomputed in the backward.
      attention: seconds of attention, with the sums between a ring's hops.
      choice: seconds in which HADS chooses blocks.
      matmuls: seconds of all other work.
      traffic: by what it is for: the exchange of K and V, the model axis, weights and gradients.
      memory: by what it holds.
      other_memory: the sum of memory if `remat` were the other way; None for a prefill.
      fits: whether the memory is enough.
      rates: of attention, forward and both directions.
    """

    exchange: str
    mesh: Mesh
    remat: bool
    attention: float
    choice: float
    matmuls: float
    traffic: dict[str, Traffic]
    memory: dict[str, float]
    other_memory: float | None
    fits: bool
    rates: tuple[Rate, Rate]

    @property
    def exposed(self) -> float:
        return math.fsum(part.exposed for part in self.traffic.values())

    @property
    def hidden(self) -> float:
        return math.fsum(part.hidden for part in self.traffic.values())

    @property
    def seconds(self) -> float:
        return self.attention + self.choice + self.matmuls + self.exposed

    @property
    def shares(self) -> dict[str, float]:
        """What the time goes to, the longest first."""
        parts = {"attention": self.attention, "choosing blocks": self.choice, "other products": self.matmuls}
        parts["transfers"] = self.exposed
        return {name: part / self.seconds for name, part in sorted(parts.items(), key=lambda x: -x[1]) if part}

    @property
    def total_memory(self) -> float:
        return math.fsum(self.memory.values())


def predict(
    question: Question, mesh: Mesh, exchange: str, *, remat: bool, points: Sequence[Point], rest: Rate
) -> Prediction:
    """`rest` is the throughput of all work beside attention."""
    q = question
    sequences, layers = q.batch // mesh.data, q.config.layers
    time = _attention(q, mesh, exchange, points)
    forwards = 1 if q.prefill or not remat else 2
    exchanged = _exchange(q, mesh, exchange, time, backward=False) * forwards
    attention = forwards * (time.forward + time.forward_sums)
    if not q.prefill:
        exchanged += _exchange(q, mesh, exchange, time, backward=True)
        attention += time.backward + time.backward_sums
    matmuls = matmul_flops(q, remat) / (mesh.model * mesh.sequence) / (rest.tflops * 1e12)
    traffic = {"exchange": exchanged * layers, "model": _model_axis(q, mesh, remat)}
    if not q.prefill:
        traffic["weights"] = _weights(q, mesh, matmuls)
    memory, other = _memory(q, mesh, exchange, remat)
    return Prediction(
        exchange=exchange,
        mesh=mesh,
        remat=remat,
        attention=sequences * layers * attention,
        choice=sequences * layers * _choice(q, mesh),
        matmuls=sequences * matmuls,
        traffic={name: part * sequences for name, part in traffic.items()},
        memory=memory,
        other_memory=other,
        fits=sum(memory.values()) <= USABLE * q.device.memory * 1e9,
        rates=time.rates,
    )


def matmul_flops(question: Question, remat: bool) -> int:
    """Operations of one sequence's other matrix products; of a prefill without the output projection."""
    blocks = question.config.layers * block_weights(question.config)
    if question.prefill:
        return 2 * blocks * question.tokens
    return (6 * matmul_weights(question.config) + (2 * blocks if remat else 0)) * question.tokens


def _attention(q: Question, mesh: Mesh, exchange: str, points: Sequence[Point]) -> AttentionTime:
    """One layer of one sequence on the busiest device."""
    c, n = q.config, mesh.sequence
    q_heads, kv_heads = c.q_heads // mesh.model, c.kv_heads // mesh.model
    flops = forward_flops(tokens=q.tokens, block=q.block, density=q.density, q_heads=q_heads, head_dim=c.head_dim)
    by_piece = exchange in ("gather", "sparse")
    hops = n if exchange == "ring" else 1
    return attention_time(
        points,
        q.device,
        flops=flops / n * (q.imbalance if n > 1 else 1.0),
        rows=q.tokens // n,
        q_heads=q_heads,
        kv_heads=kv_heads,
        q_heads_per_call=heads_per_piece(kv_heads, n) * (q_heads // kv_heads) if by_piece else q_heads,
        head_dim=c.head_dim,
        block=q.block,
        keys=q.tokens // hops,
        blocks_per_row=blocks_per_row(q.tokens, q.block, q.density) / hops,
        hops=hops,
    )


def _choice(q: Question, mesh: Mesh) -> float:
    """One layer of one sequence: a device chooses for its own rows and heads, among the keys of all devices."""
    if not q.hads:
        return 0.0
    heads = q.config.q_heads // mesh.model
    whole = choice_seconds(shipped_prompts(), device=q.device.recorded_as, tokens=q.tokens, q_heads=heads)
    return whole / mesh.sequence


def _exchange(q: Question, mesh: Mesh, exchange: str, time: AttentionTime, *, backward: bool) -> Traffic:
    """One layer's exchange for one sequence."""
    kv_heads = q.config.kv_heads // mesh.model
    return exchange_traffic(
        exchange,
        backward=backward,
        kv=kv_bytes(q.tokens, kv_heads, q.config.head_dim),
        kv_heads=kv_heads,
        group=mesh.sequence_group(q.device.links.domain),
        links=q.device.links,
        attention=time.backward if backward else time.forward,
        overlap=q.overlap,
        union=q.union,
    )


def _model_axis(q: Question, mesh: Mesh, remat: bool) -> Traffic:
    """Sums of activations over the model axis, none hidden: two per block and pass, two of embedding and logits."""
    group = mesh.model_group(q.device.links.domain)
    size = 2.0 * (q.tokens // mesh.sequence) * q.config.width
    per_pass = 2 * q.config.layers
    count = per_pass + 1 if q.prefill else (3 if remat else 2) * per_pass + 2
    each = Traffic(
        bytes=2 * share_of_others(group.size) * size, seconds=all_reduce_seconds(size, group, q.device.links)
    )
    return each * count


def _weights(q: Question, mesh: Mesh, matmuls: float) -> Traffic:
    """Weights gathered in bfloat16 for the forward and again for the backward, gradients reduced in float32.

    One sequence of each device at a time. Transfers of all layers but one may hide behind the matrix products.
    """
    links, layers = q.device.links, q.config.layers
    parameters = q.config.param_count() / mesh.model
    every, data = mesh.weights_group(links.domain), mesh.data_group(links.domain)
    # (the group, how many bytes per parameter, the parameters): each an all-gather or a reduce-scatter.
    if q.fsdp == "none":
        moves = [(every, 4, parameters)] * 2
    elif q.fsdp == "all":
        moves = [(every, size, parameters) for size in (2, 2, 4)]
    else:
        moves = [(data, size, parameters) for size in (2, 2, 4)]
        moves += [(mesh.sequence_group(links.domain), 4, parameters / data.size)] * 2
    sizes = [(group, share_of_others(group.size) * size * count) for group, size, count in moves]
    received = sum(size for _, size in sizes)
    seconds = sum(layers * collective_seconds(size / layers, group, links) for group, size in sizes)
    hidden = q.overlap * min(seconds * (layers - 1) / layers, matmuls)
    return Traffic(bytes=received, seconds=seconds, hidden=hidden)


def _memory(q: Question, mesh: Mesh, exchange: str, remat: bool) -> tuple[dict[str, float], float | None]:
    if q.prefill:
        return prefill_memory(q, mesh, exchange), None
    both = {r: training_memory(q, mesh, exchange, remat=r) for r in (False, True)}
    return both[remat], sum(both[not remat].values())
