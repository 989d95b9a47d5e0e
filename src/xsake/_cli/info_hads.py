"""`xsake info --hads`: what HADS runs for some sizes on this device, and why."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from xsake.hads import Attention, HadsProfile, explain

CHUNK = 1024
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


def show(
    *,
    budget: float,
    decode_budget: float,
    tokens: int | None,
    batch: int,
    model: str | None,
    profile: Path | None,
    console: Console | None = None,
) -> None:
    console = console or Console()
    found, where = _profile(model, profile, tokens or LENGTHS[-1])
    console.print(f"profile: {escape(where)}", soft_wrap=True)
    if found is None:
        return
    console.print(f"profile: {escape(repr(found))}", soft_wrap=True)
    attention = Attention(found, budget, decode=decode_budget)
    table = Table("tokens", "call", "runs", "why", title=f"{batch} sequences" if batch > 1 else None)
    for length in LENGTHS if tokens is None else (tokens,):
        calls = {
            "prompt": explain(attention, queries=length, batch=batch),
            "training": explain(attention, queries=length, batch=batch, training=True),
            "new token": explain(attention, queries=1, keys=length, batch=batch),
        }
        if length > CHUNK:
            calls[f"last {CHUNK} tokens"] = explain(attention, queries=CHUNK, keys=length, batch=batch)
        for call, decision in calls.items():
            runs = "dense" if decision.budget is None else f"{decision.budget:.1%} of the blocks"
            table.add_row(str(length), call, runs, escape(decision.why))
    console.print(table)
    console.print("`xsake autotune --hads` races sparse and dense attention on this device; Policy sets other limits")


def _profile(model: str | None, path: Path | None, length: int) -> tuple[HadsProfile | None, str]:
    """The profile, and where it was found."""
    if path is not None:
        return HadsProfile.load(path), f"read from {path}"
    if model is None:
        return HadsProfile.shipped("smollm2", length), "that of smollm2, which comes with xsake; --model names another"
    from xsake.hads.profile.find import folder
    from xsake.model import load_pretrained
    from xsake.model.weights.model_file import open_model

    found = HadsProfile.find(load_pretrained(open_model(model)), length)
    places = f"by the weights of {model}, in {folder()} and among those that come with xsake"
    if found is None:
        return None, f"none found {places}: `xsake generate --hads` calibrates once and keeps it, or xsake calibrate"
    return found, f"found {places}"
