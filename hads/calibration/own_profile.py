"""A model's own profile: found by the model's weights, or calibrated once and kept."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int

from xsake._ground.progress import shown_progress
from xsake.hads.calibration.calibrate import calibrate
from xsake.hads.calibration.own_texts import own_texts
from xsake.hads.profile import find
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.fingerprint import digest
from xsake.hads.profile.profile import HadsProfile

LENGTHS = (2048, 4096, 8192, 16384, 32768)  # tokens of a text, where the device is fast
BLOCKS = (64, 32, 16)
MOST_SLOWLY = 2048, 4  # tokens of a text, and texts, on a CPU
TEXTS = 8


def own_profile(
    weights: Any,
    model: Callable[[], Any],
    texts: Callable[[str], list[int]] | Int[np.ndarray, "N T"],
    *,
    name: str,
    length: int,
    context: int,
    slow: bool,
    check: Callable[[CausalGrid], object] = lambda prompt: None,
) -> HadsProfile:
    """The profile of the model with these weights, for prompts of `length` tokens: from the user's cache, or shipped
    with xsake, or calibrated now and kept in the cache. The standard error says which, how far it is and how long it
    took.

    Args:
      weights: a pytree of arrays, by which the profile is found.
      model: gives what `calibrate` takes.
      texts: an encoder, for the texts that come with xsake, or the tokens of texts.
      context: the most tokens that the model reads.
      slow: whether the model runs on a CPU: then fewer and shorter texts are read.
      check: raises ValueError, before minutes go into a calibration, if a prompt in such blocks cannot be served.
    """
    found = HadsProfile.find(weights, length)
    if found is None:
        if callable(texts):
            most = min(context, MOST_SLOWLY[0] if slow else LENGTHS[-1])
            tokens = min(next((one for one in LENGTHS if one >= min(length, most)), most), most)
            texts = own_texts(texts, length=tokens, count=MOST_SLOWLY[1] if slow else TEXTS)
        found = _calibrated(weights, model, texts, name=name, prompt=length, check=check)
    said = f"HADS chooses blocks of {found.block} by a profile from {len(found.digests)} texts of {found.length} tokens"
    if found.length < length:
        said += f"; what is farther than that in the prompt's {length} tokens counts as the farthest seen"
    _say(said)
    return found


def _calibrated(
    weights: Any,
    model: Callable[[], Any],
    tokens: np.ndarray,
    *,
    name: str,
    prompt: int,
    check: Callable[[CausalGrid], object],
) -> HadsProfile:
    count, length = tokens.shape
    grids = (CausalGrid(length, one) for one in BLOCKS)
    block = next((grid.block for grid in grids if grid.rows >= grid.least_rows), BLOCKS[-1])
    check(CausalGrid(prompt, block))
    start = time.perf_counter()
    _say(f"{name} has no HADS profile yet: calibrating on {count} texts of {length} tokens, once")
    unfinished = find.folder() / f"{find.key_of(weights)}-{block}-{digest(tokens)}.part"  # a stopped one goes on
    with shown_progress(err=True) as progress:
        options: dict[str, Any] = dict(block=block, sensitivity_sequences=max(count // 2, 1), progress=progress)
        profile = calibrate(model(), tokens, name=name, steps_folder=unfinished, **options)
    path = profile.keep(weights)
    shutil.rmtree(unfinished, ignore_errors=True)
    _say(f"calibrated in {time.perf_counter() - start:.0f} s; kept in {path}")
    return profile


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
