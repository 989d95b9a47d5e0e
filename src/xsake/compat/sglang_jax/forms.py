"""What the engine may ask of attention that xsake does not compute: refused when the engine starts, by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from sgl_jax.srt.layers.radix_attention import AttentionType, RadixAttention
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool

from xsake.compat.sglang_jax.settings import Settings
from xsake.hads import HadsProfile

_log = logging.getLogger("xsake")


def check_arguments(runner: Any, settings: Settings) -> None:
    """Before the weights are read."""
    given = runner.server_args
    _refuse(
        *(["attention to latent keys and values (MLA)"] if runner.use_mla_backend else []),
        *(["layers of linear attention beside attention"] if runner.linear_recurrent_config is not None else []),
        *([f"--speculative-algorithm {given.speculative_algorithm}"] if given.speculative_algorithm else []),
        *([f"--dp-size {given.dp_size}"] if given.dp_size > 1 else []),
        *(["--multimodal"] if given.multimodal else []),
        *(["--hads-profile with --tp-size"] if settings.profile is not None and runner.tp_size > 1 else []),
    )
    if not given.disable_hybrid_swa_memory:
        # The engine's pools of windowed layers are written by a kernel for TPUs alone.
        given.disable_hybrid_swa_memory = True
        _log.info("windowed layers keep all their tokens, as with --disable-hybrid-swa-memory")


def check_model(runner: Any, settings: Settings) -> None:
    """After the model and its pool are made."""
    _refuse(*dict.fromkeys(_unknown(runner)), *_of_profile(runner, settings.profile))


def _unknown(runner: Any) -> Iterator[str]:
    pool = runner.token_to_kv_pool
    if type(pool) is not MHATokenToKVPool:
        yield f"a pool of the kind {type(pool).__name__}"
        return
    for layer in _layers(runner):
        if layer.attn_type is not AttentionType.DECODER:
            yield f"layers of the kind {layer.attn_type.value}"
        if layer.v_head_dim != layer.head_dim:
            yield f"values of {layer.v_head_dim} channels beside keys of {layer.head_dim}"
        if layer.xai_temperature_len > 0:
            yield "temperatures that follow the position (xai_temperature_len)"
        if layer.softmax_dtype not in (None, jnp.float32):
            yield f"a softmax in {layer.softmax_dtype}; xsake's is in float32"
    stored, computed = jnp.dtype(pool.dtype), jnp.dtype(runner.dtype)
    if stored != computed:
        yield f"keys and values in {stored} (--kv-cache-dtype) beside queries in {computed}"


def _layers(runner: Any) -> list[Any]:
    return [layer for _, layer in nnx.iter_graph(runner.model) if isinstance(layer, RadixAttention)]


def _of_profile(runner: Any, profile: HadsProfile | None) -> Iterator[str]:
    """What of the profile is not this model's."""
    if profile is None:
        return
    layers = _layers(runner)
    if len(layers) != profile.model_layers:
        yield f"a profile of {profile.model_layers} layers beside {len(layers)} of the model"
    wanted = (profile.q_heads, profile.kv_heads, profile.head_dim)
    for layer in layers:
        found = (layer.q_head_num, layer.kv_head_num, layer.head_dim)
        if found != wanted:
            yield f"a profile for (query heads, KV heads, head_dim)={wanted} beside {found} of the model"
            return
        chosen = layer.layer_id < profile.model_layers and profile.row(layer.layer_id) is not None
        if chosen and layer.sliding_window_size != profile.window:
            yield f"a profile for a window of {profile.window} beside {layer.sliding_window_size} of the model"
            return


def _refuse(*unknown: str) -> None:
    if unknown:
        raise NotImplementedError(f"xsake cannot serve this model so: {'; '.join(unknown)}")
