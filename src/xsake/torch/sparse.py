"""HADS in a model of transformers: which of its calls of attention read a prompt sparsely."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import jax
import numpy as np
import torch
from jaxtyping import Int

from xsake.hads.attention.attention import Attention, check_options
from xsake.hads.attention.policy import Policy
from xsake.hads.attention.step import NEW_TOKENS
from xsake.hads.calibration.own_profile import own_profile
from xsake.hads.profile.profile import HadsProfile
from xsake.torch.crossing import say_once
from xsake.torch.of_tensors import Sparse, Where, bucket
from xsake.torch.watched import WatchedModel, is_watched, layers_of, weights_of

NAMES: set[str] = set()  # under which xsake is registered
_sparse: WeakKeyDictionary[torch.nn.Module, Attention] = WeakKeyDictionary()
_CHUNK = "_xsake_chunk"  # an attribute of masks


def hads(
    model: torch.nn.Module,
    budget: float | None = 0.2,
    *,
    profile: HadsProfile | None = None,
    texts: Any = None,
    length: int = 8192,
    policy: Literal["auto", "always"] | Policy = "auto",
) -> None:
    """From now on the model reads its prompts by HADS, and trains so; None as budget ends that.

    Without a profile the model's own is taken: kept in the user's cache, or shipped with xsake, or calibrated now, for
    some minutes, and kept. The standard error says which.

    Whole prompts are read sparsely, padded or not, and chunks of prompts without padding before them; sequences without
    padding are trained sparsely. Packed sequences, layers with a window where others have none, and new tokens attend
    to all that they see.

    Args:
      model: of transformers, loaded with `attn_implementation="xsake"`.
      budget: the share of the causal blocks that is read.
      profile: of this model, from an earlier calibration.
      texts: what to calibrate on: the model's tokenizer, for texts that come with xsake, or tokens [N, T]. By default
        the tokenizer that was saved with the model.
      length: tokens of the prompts to come, for which a profile is found or made.
      policy: as in `xsake.hads.Attention`: by default sparse only where that is faster.
    """
    layers = layers_of(model)
    if budget is None:
        for module in layers:
            _sparse.pop(module, None)
        return
    name = getattr(model.config, "_attn_implementation", None)
    if isinstance(name, str) and name not in NAMES:
        raise ValueError(
            f"the model attends by {name!r}, which knows no HADS: xsake.torch.register(), then "
            'model.set_attn_implementation("xsake")'
        )
    check_options(budget, None, policy)  # before minutes go into a calibration
    profile = _own_profile(model, texts, length) if profile is None else profile
    numbers = {module.layer_idx for module in layers}
    if not numbers <= set(range(profile.model_layers)):
        layers_of_profile = f"the profile of {profile.model!r} has {profile.model_layers} layers"
        raise ValueError(f"{layers_of_profile}, and the model {max(numbers) + 1}: calibrate this model")
    attention = Attention(profile.on_device(), budget, policy=policy)
    _sparse.update(dict.fromkeys(layers, attention))


def _own_profile(model: Any, texts: Any, length: int) -> HadsProfile:
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or length
    slow = next(model.parameters()).device.type == "cpu"
    about: dict[str, Any] = dict(length=min(length, context), context=context, slow=slow)
    about["name"] = model.name_or_path or type(model).__name__
    return own_profile(weights_of(model), lambda: WatchedModel(model), _texts(model, texts), **about)


def _texts(model: Any, texts: Any) -> Any:
    """Tokens [N, T], or an encoder: each as `own_profile` takes it. The tokenizer is not loaded before it is used."""
    if texts is not None and not hasattr(texts, "encode"):
        return _tokens(texts)

    def encode(text: str) -> list[int]:
        return (texts or _tokenizer(model)).encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    return encode


def _tokens(texts: Any) -> Int[np.ndarray, "N T"]:
    tokens = texts.cpu().numpy() if isinstance(texts, torch.Tensor) else np.asarray(texts)
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"texts must be a tokenizer or ints [N, T], got {tokens.dtype} {list(tokens.shape)}")
    return tokens.astype(np.int32)


def _tokenizer(model: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the model {model.name_or_path!r} has no HADS profile yet, and no tokenizer is saved with it: give "
            "hads(model, texts=) its tokenizer or tokens [N, T] to calibrate on, or a profile"
        ) from error


def sparse_prompt(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    where: Where | None,
    mask: torch.Tensor | None,
    window: int | None,
) -> Sparse | None:
    """How HADS reads this call, or None: whole prompts and their chunks, of the layers that the profile knows.

    `mask` is the tensor that `where` was read from: every layer of a forward gets the same.
    """
    attention = _sparse.get(module)
    b, tokens, slots = query.shape[0], query.shape[2], key.shape[2]
    if attention is None or is_watched(module) or tokens == 1 or (tokens < slots and tokens <= NEW_TOKENS):
        return None
    if attention.profile.row(module.layer_idx) is None:  # a layer with a window, where others have none
        return None
    learns = torch.is_grad_enabled() and query.requires_grad
    if where is None or mask is None:
        if learns or bucket(tokens) == tokens:
            return Sparse(attention, module.layer_idx)
        begins, ends = (torch.full((b,), at, dtype=torch.int32, device=query.device) for at in (0, tokens))
        segments = torch.zeros((b, tokens), dtype=torch.int32, device=query.device)
        return Sparse(attention, module.layer_idx, (begins, ends, segments))
    if learns:
        return None
    if tokens < slots or window is not None:
        chunk = _chunk_of(mask, where)
        if chunk.start:
            return _sparse_chunk(attention, module.layer_idx, query, where, chunk, window)
        if chunk.cut:
            return None
    there = (where.q_segments >= 0).int()
    begins = there.argmax(-1).int()
    ends = (tokens - there.flip(-1).argmax(-1)).int()
    return Sparse(attention, module.layer_idx, (begins, ends, where.q_segments))


class _Chunk(NamedTuple):
    """Where a chunk lies: its first token's number; whether keys before it are gone; whether each sequence is text from
    token 0 on, with padding only behind it."""

    start: int
    cut: bool
    solid: bool


def _chunk_of(mask: torch.Tensor, where: Where) -> _Chunk:
    """Read from the tensors, for which the host waits, and kept with the mask for the forward's other layers."""
    found: _Chunk | None = getattr(mask, _CHUNK, None)
    if found is None:
        start, cut = (int(x[0, 0]) for x in where[:2])
        there = where.k_segments[:, : start - cut + where.q_positions.shape[1]] >= 0
        solid = there[:, 0].all() & (there[:, 1:] <= there[:, :-1]).all()
        found = _Chunk(start, bool(cut), bool(solid))
        setattr(mask, _CHUNK, found)
    return found


def _sparse_chunk(
    attention: Attention, layer: int, query: torch.Tensor, where: Where, chunk: _Chunk, window: int | None
) -> Sparse | None:
    if chunk.cut or window is not None:
        return None
    end, rows = chunk.start + query.shape[2], attention.profile.block_q
    size: dict[str, Any] = dict(batch=query.shape[0], queries=query.shape[2], keys=end)
    size |= dict(device=jax.local_devices()[0].device_kind, dtype=str(query.dtype).removeprefix("torch."))
    if attention.decide("chunk" if chunk.start else "prompt", **size).budget is None:
        return None
    if not chunk.solid or chunk.start % rows:
        why = f"it does not begin at a multiple of {rows} tokens" if chunk.solid else "it has padding before a text"
        say_once(f"HADS leaves a chunk of a prompt dense: {why}")
        return None
    ends = (where.k_segments[:, :end] >= 0).sum(-1).int()
    return Sparse(attention, layer, (torch.zeros_like(ends), ends, where.q_segments), chunk.start)
