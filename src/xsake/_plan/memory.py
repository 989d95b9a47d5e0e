"""Bytes on one device, part by part."""

from __future__ import annotations

from xsake._plan.exchanges import heads_per_piece, kv_bytes
from xsake._plan.meshes import Mesh
from xsake._plan.models import block_weights
from xsake._plan.question import Question
from xsake.model.network.config import ModelConfig

LOSS_CHUNK = 8192  # tokens whose logits exist at a time, as in `xsake.model.TrainConfig`
USABLE = 0.9  # of a device's memory


def block_bytes_per_token(config: ModelConfig, model: int = 1) -> float:
    """Bytes that JAX keeps of one transformer block for its backward, per token, with the heads over `model` devices.

    28 * width + 16: two norms in float32 and their output; (6 * q_heads + 4 * kv_heads) * head_dim: q, k, v, the output
    twice; 4 * q_heads: lse; 12 * mlp_width: six arrays of SwiGLU. XLA may keep fewer of them.
    """
    heads = (6 * config.q_heads + 4 * config.kv_heads) * config.head_dim + 4 * config.q_heads
    return 28 * config.width + 16 + (heads + 12 * config.mlp_width) / model


def state_shards(fsdp: str, mesh: Mesh) -> int:
    """The number of devices, not counting `model`, over which weights, gradients and optimiser are split."""
    return {"none": 1, "data": mesh.data, "all": mesh.data * mesh.sequence}[fsdp]


def training_memory(q: Question, mesh: Mesh, exchange: str, *, remat: bool) -> dict[str, float]:
    config, local = q.config, q.tokens // mesh.sequence
    split = mesh.model * state_shards(q.fsdp, mesh)
    parameters = config.param_count()
    running_sum = q.batch > mesh.data  # sequences are computed one after the other
    per_block = local * block_bytes_per_token(config, mesh.model)
    kept = config.layers * local * 2 * config.width + per_block if remat else config.layers * per_block
    return {
        "weights": 4 * parameters / split,
        "gradients": 4 * parameters / split * (2 if running_sum else 1),
        "optimiser": 8 * parameters / split,
        "weights in use": _weights_in_use(config, mesh.model),
        "activations": kept,
        "logits": 8 * min(local, LOSS_CHUNK) * config.vocab_size / mesh.model,
        "exchange": exchange_bytes(q, mesh, exchange, backward=True),
    }


def prefill_memory(q: Question, mesh: Mesh, exchange: str) -> dict[str, float]:
    config, local = q.config, q.tokens // mesh.sequence
    kv = kv_bytes(local, config.kv_heads // mesh.model, config.head_dim)
    return {
        "weights": 2 * config.param_count() / mesh.model,
        "cache": q.batch / mesh.data * config.layers * kv,
        "activations": local * block_bytes_per_token(config, mesh.model),
        "exchange": exchange_bytes(q, mesh, exchange, backward=False),
    }


def exchange_bytes(q: Question, mesh: Mesh, exchange: str, *, backward: bool) -> float:
    """Bytes that an exchange holds beside the local K and V.

    gather: this piece and the next one, and in the backward as much of dK and dV. sparse: `union` of that. ring: the
    next K and V, and the float32 sum of the output; in the backward the next K and V, two dK and dV in float32, and the
    float32 sum of dQ.
    """
    config, n = q.config, mesh.sequence
    if exchange == "none" or n == 1:
        return 0.0
    kv_heads = config.kv_heads // mesh.model
    if exchange == "ring":
        local = kv_bytes(q.tokens // n, kv_heads, config.head_dim)
        sums = 4.0 * (q.tokens // n) * (config.q_heads // mesh.model) * config.head_dim
        return local + sums + (4 * local if backward else 0.0)
    piece = kv_bytes(q.tokens, heads_per_piece(kv_heads, n), config.head_dim)
    return piece * (4 if backward else 2) * (q.union if exchange == "sparse" else 1.0)


def _weights_in_use(config: ModelConfig, model: int) -> float:
    """bfloat16 copies of this block's matrices, of the next block's, and of the output projection."""
    return 2 * (2 * block_weights(config) + config.vocab_size * config.width) / model
