"""HADS in a model of transformers: which of its calls of attention read a prompt sparsely."""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from xsake.hads.attention.attention import Attention
from xsake.hads.attention.policy import Policy
from xsake.hads.profile.profile import HadsProfile
from xsake.torch.of_tensors import Sparse, Where

NAMES: set[str] = set()  # under which xsake is registered
_sparse: WeakKeyDictionary[torch.nn.Module, Attention] = WeakKeyDictionary()


def hads(
    model: torch.nn.Module,
    profile: HadsProfile | None,
    budget: float = 0.2,
    *,
    policy: Literal["auto", "always"] | Policy = "auto",
) -> None:
    """From now on the model reads its prompts by HADS, and trains so; None as profile ends that.

    Whole prompts are read sparsely, padded ones too, and sequences without padding are trained so. Chunks of prompts,
    packed sequences, layers with a window and new tokens attend to all that they see.

    Args:
      model: of transformers, loaded with `attn_implementation="xsake"`.
      profile: of this model, from `xsake.hads.calibrate` or `xsake calibrate`.
      budget: the share of the causal blocks that is read.
      policy: as in `xsake.hads.Attention`: by default sparse only where that is faster.
    """
    layers = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layers with a layer_idx, by which HADS knows them")
    name = getattr(model.config, "_attn_implementation", None)
    if profile is not None and isinstance(name, str) and name not in NAMES:
        raise ValueError(
            f"the model attends by {name!r}, which knows no HADS: xsake.torch.register(), then "
            'model.set_attn_implementation("xsake")'
        )
    attention = None if profile is None else Attention(profile.on_device(), budget, policy=policy)
    numbers = {module.layer_idx for module in layers}
    if profile is not None and not numbers <= set(range(profile.model_layers)):
        layers_of_profile = f"the profile of {profile.model!r} has {profile.model_layers} layers"
        raise ValueError(f"{layers_of_profile}, and the model {max(numbers) + 1}: calibrate this model")
    for module in layers:
        if attention is None:
            _sparse.pop(module, None)
        else:
            _sparse[module] = attention


def sparse_prompt(module: Any, query: torch.Tensor, key: torch.Tensor, where: Where | None) -> Sparse | None:
    """How HADS reads this call, or None: only whole prompts, of the layers that the profile knows."""
    attention = _sparse.get(module)
    b, tokens = query.shape[0], query.shape[2]
    if attention is None or tokens == 1 or key.shape[2] != tokens:
        return None
    if attention.profile.row(module.layer_idx) is None:  # a layer with a window, where others have none
        return None
    if torch.is_grad_enabled() and query.requires_grad:
        return Sparse(attention, module.layer_idx) if where is None else None
    if where is None:
        begins, ends = (torch.full((b,), at, dtype=torch.int32, device=query.device) for at in (0, tokens))
        segments = torch.zeros((b, tokens), dtype=torch.int32, device=query.device)
    else:
        segments = where.q_segments
        there = (where.q_segments >= 0).int()
        begins = there.argmax(-1).int()
        ends = (tokens - there.flip(-1).argmax(-1)).int()
    return Sparse(attention, module.layer_idx, (begins, ends, segments))
