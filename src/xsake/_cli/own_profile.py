"""The HADS profile of a model that no profile was named for: found by the model's weights, or made once and kept."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any

import typer

from xsake._cli.progress import shown_progress

if TYPE_CHECKING:
    from xsake.hads import HadsProfile

LENGTHS = (2048, 4096, 8192, 16384, 32768)  # tokens of a text, where the device is fast
BLOCKS = (64, 32, 16)
MOST_SLOWLY = 2048, 4  # tokens of a text, and texts, on a CPU
TEXTS = 8


def own_profile(model: Any, encode: Any, *, name: str, length: int, budget: float) -> HadsProfile:
    """Of the model with these weights, for prompts of `length` tokens: from the user's cache, or shipped with xsake, or
    calibrated on texts that come with xsake. The standard error says which."""
    import jax

    from xsake.hads.profile.profile import HadsProfile

    found = HadsProfile.find(model, length)
    if found is None:
        slow = jax.default_backend() == "cpu"
        most = min(model.config.context, MOST_SLOWLY[0] if slow else LENGTHS[-1])
        tokens = next((one for one in LENGTHS if one >= min(length, most)), most)
        found = _calibrated(
            model,
            encode,
            name=name,
            length=min(tokens, most),
            texts=MOST_SLOWLY[1] if slow else TEXTS,
            prompt=length,
            budget=budget,
        )
    said = f"HADS chooses blocks of {found.block} by a profile from {len(found.digests)} texts of {found.length} tokens"
    if found.length < length:
        said += f"; what is farther than that in the prompt's {length} tokens counts as the farthest seen"
    typer.echo(said, err=True)
    return found


def _calibrated(
    model: Any, encode: Any, *, name: str, length: int, texts: int, prompt: int, budget: float
) -> HadsProfile:
    from xsake.hads import calibrate
    from xsake.hads.calibration.own_texts import own_texts
    from xsake.hads.profile import find
    from xsake.hads.profile.budgets import uniform_counts
    from xsake.hads.profile.causal_grid import CausalGrid
    from xsake.hads.profile.fingerprint import digest

    grids = (CausalGrid(length, one) for one in BLOCKS)
    block = next((grid.block for grid in grids if grid.rows >= grid.least_rows), BLOCKS[-1])
    grid = CausalGrid(prompt, block)
    uniform_counts(model.config.layers, model.config.q_heads, budget, grid)  # refuse a budget before minutes go into it
    start = time.perf_counter()
    typer.echo(f"{name} has no HADS profile yet: calibrating on {texts} texts of {length} tokens, once", err=True)
    tokens = own_texts(encode, length=length, count=texts)
    unfinished = find.folder() / f"{find.key_of(model)}-{block}-{digest(tokens)}.part"  # a stopped one goes on
    with shown_progress(err=True) as progress:
        options: dict[str, Any] = dict(block=block, sensitivity_sequences=texts // 2, progress=progress)
        profile = calibrate(model, tokens, name=name, steps_folder=unfinished, **options)
    path = profile.keep(model)
    shutil.rmtree(unfinished, ignore_errors=True)
    typer.echo(f"calibrated in {time.perf_counter() - start:.0f} s; kept in {path}", err=True)
    return profile
