"""How far each method moves a model from itself, when all keep equally many blocks in every layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake._ground.words import in_words
from xsake.hads.calibration.layerwise import Layers
from xsake.hads.profile.budgets import layer_counts, uniform_counts
from xsake.hads.profile.fingerprint import shared
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.study.carried import asking, carried, most_asking
from xsake.hads.study.divergence import Compared, compare
from xsake.hads.study.layerwise import run
from xsake.hads.study.methods.layer import TokenMask
from xsake.hads.study.methods.mask import MethodMask
from xsake.hads.study.methods.shipped import METHODS
from xsake.hads.study.records import Records, key_of
from xsake.hads.study.texts import Text

# Licences and other boilerplate are in many texts: different documents of one package shared up to 2.4% of their runs.
MOST_SHARED = 0.05


def evaluate(
    model: Any,
    profile: HadsProfile,
    texts: Sequence[Text],
    *,
    methods: Sequence[str],
    budgets: Sequence[float],
    records: Records,
    batch: int = 1,
    layers: str = "profile",
    last_rows: str = "own",
    attention_dtype: Any = None,
    knowledge: Mapping[str, Any] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> bool:
    """Run every method at every budget over every text, teacher-forced, and record each sequence's numbers.

    The dense model reads a text once; each method then chooses its masks from the sparse model's own queries and keys.
    Sequences that `records` has already are not run again. Texts that share more than MOST_SHARED of their content with
    the calibration's are refused; a profile that knows its texts only whole (`fingerprint.knows_runs`) misses parts.

    Args:
      methods: names of `METHODS`.
      budgets: shares of the model's causal blocks.
      batch: sequences at a time.
      layers: how a budget is divided among layers: "profile" by the profile's table, the same for every method, or
        "uniform".
      last_rows: which methods give the last rows of blocks more weight: "own", "every" or "none" (`MethodMask`).
      attention_dtype: queries, keys and values are rounded to this dtype, in the dense model too.
      knowledge: by a method's name, what the method must know of the model beyond the profile (`Layer.knowledge`).
      progress: called as progress(what, done, of).
      stop: asked before every method whether to leave the rest for another run.

    Returns whether all was done.
    """
    if unknown := sorted({*methods, *(knowledge or ())} - set(METHODS)):
        raise ValueError(f"unknown methods {unknown}; there are {', '.join(METHODS)}")
    if layers not in ("profile", "uniform"):
        raise ValueError(f'{layers=} must be "profile" or "uniform"')
    lengths = {len(text.tokens) for text in texts}
    if len(lengths) != 1:
        raise ValueError(f"texts must have one length; got {sorted(lengths)}")
    length = lengths.pop()
    overlap = {text.name: shared(text.tokens, profile.digests) for text in texts}
    if seen := [f"{name} ({share:.0%} of it)" for name, share in overlap.items() if share > MOST_SHARED]:
        raise ValueError(f"the profile was calibrated on {', '.join(seen[:3])}: evaluate on other texts")
    counts = {budget: _counts(profile, budget, length, layers) for budget in budgets}
    blocks = Layers(model)
    grid = profile.grid(length)
    total = profile.q_heads * profile.layers * grid.blocks
    on_device = profile.on_device()
    work = list(itertools.product(budgets, methods))
    beyond = {name: jax.tree.map(jnp.asarray, known) for name, known in (knowledge or {}).items()}
    report = progress or (lambda what, done, of: None)

    def finish(waiting: tuple[Sequence[Text], float, str, Any, Any, Any] | None) -> None:
        if waiting is None:
            return
        some, budget, method, active, compared, hang = waiting
        compared, density = jax.device_get(compared), np.asarray(active).sum((0, 2)) / total
        carriers = np.sum(jax.device_get(hang), 0) if hang else [None] * len(some)
        records.add(
            _line(
                text,
                (method, budget, layers, last_rows),
                float(density[n]),
                jax.tree.map(lambda x, n=n: x[n], compared),
                carriers[n],
            )
            for n, text in enumerate(some)
        )

    # One method's numbers are taken while the next one runs.
    waiting = None
    for first in range(0, len(texts), batch):
        some = texts[first : first + batch]
        left = [
            (budget, method)
            for budget, method in work
            if any(key_of(text.name, method, budget, layers, last_rows) not in records for text in some)
        ]
        if not left:
            continue
        tokens = jnp.asarray(np.stack([text.tokens for text in some]), jnp.int32)
        asked = asking(some, most_asking(texts))
        report("dense", first, len(texts))
        dense, _ = run(blocks, tokens, attention_dtype=attention_dtype)
        for budget, method in left:
            if stop is not None and stop():
                finish(waiting)
                return False
            report(f"{in_words(method)} at {budget:.0%}", first, len(texts))
            mask_fn = MethodMask.of(
                method, on_device, counts[budget], knowledge=beyond.get(method), last_rows=last_rows
            )
            hang: list[Array] = []

            def watch(kept: Any, query: Array, key: Array, hang: list[Array] = hang, asked: np.ndarray = asked) -> None:
                if asked.size and not isinstance(kept, TokenMask):
                    hang.append(carried(query, key, kept, asked, grid))

            sparse, active = run(blocks, tokens, mask_fn, attention_dtype=attention_dtype, watch=watch)
            compared = compare(model, dense, sparse, tokens)
            finish(waiting)
            waiting = some, budget, method, active, compared, hang
    finish(waiting)
    return True


def _counts(profile: HadsProfile, budget: float, length: int, layers: str) -> np.ndarray:
    if layers == "profile":
        return layer_counts(profile, budget, length)
    return uniform_counts(profile.layers, profile.q_heads, budget, profile.grid(length))


def _line(
    text: Text, case: tuple[str, float, str, str], density: float, one: Compared, carriers: np.ndarray | None
) -> dict[str, Any]:
    divergence = np.asarray(one.divergence, np.float64)
    return {
        "sequence": text.name,
        "domain": text.domain,
        "digest": text.digest,
        "document": text.document or text.name,
        **dict(zip(("method", "budget", "layers", "last_rows"), case, strict=True)),
        "density": density,
        "kl": float(divergence.mean()),
        "kl_p99": float(np.quantile(divergence, 0.99)),
        "kl_quarters": [float(part.mean()) for part in np.array_split(divergence, 4)],
        "loss": _mean_loss(one.loss),
        "sparse_loss": _mean_loss(one.other_loss),
        "same_token": float(np.asarray(one.same).mean()),
        **_answers(text, one, carriers),
    }


def _answers(text: Text, one: Compared, carriers: np.ndarray | None) -> dict[str, int]:
    """For a text that asks something: the numbers of its items, of answers by the dense run, of answers by both; of the
    blocks that answers hang on (`carried`), and of those that the masks leave out."""
    if text.items is None:
        return {}
    asked, dense, both = 0, 0, 0
    for item in range(1, int(text.items.max()) + 1):
        at = text.items == item
        right = bool(np.asarray(one.right)[at].all())
        asked, dense = asked + 1, dense + right
        both += right and bool(np.asarray(one.other_right)[at].all())
    found = {"asked": asked, "dense_right": dense, "both_right": both}
    return found if carriers is None else found | dict(zip(("carriers", "dropped"), carriers.tolist(), strict=True))


def _mean_loss(loss: Array | np.ndarray) -> float:
    return float(np.asarray(loss, np.float64).sum() / (len(loss) - 1))
