"""The study in a minute or two: SmolLM2 reads a page with HADS and with three rivals, at equal numbers of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from xsake._cli.demo import prompt
from xsake._ground.extras import missing
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.study.evaluation import evaluate
from xsake.hads.study.methods.shipped import GROUPS
from xsake.hads.study.records import Records
from xsake.hads.study.result import write
from xsake.hads.study.texts import Text

MODEL = "smollm2"
BUDGETS = (0.25, 0.43)
LENGTH = 2048


def show(folder: Path, console: Console | None = None) -> bool:
    """Print the table, and leave records, summary and pictures in `folder`.

    The model is fetched if it is missing. If it cannot be fetched or loaded, print why and return False.
    """
    console = console or Console()
    console.print(f"\n[bold]SmolLM2-135M reads {LENGTH} tokens: as itself, and with fewer blocks[/bold]")
    try:
        from xsake.model import load_pretrained, load_tokenizer, open_model
        from xsake.model.weights import fetch

        with console.status("fetching the model (93 MB, once)"):
            fetch.fetch(MODEL)
        with console.status("loading"):
            weights = open_model(MODEL)
            dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
            model, tokenizer = load_pretrained(weights, dtype=dtype, param_dtype=dtype), load_tokenizer(weights)
    except ModuleNotFoundError as error:
        console.print(f"left out: {missing(error.name, 'model')}", markup=False)
        return False
    except (OSError, ValueError) as error:
        console.print(f"left out: {error}", markup=False)
        return False
    text = Text("reference/0", "reference", np.asarray(prompt.page(tokenizer.encode, LENGTH), np.int32))
    compare(model, text, HadsProfile.shipped(MODEL, LENGTH), folder, console)
    console.print("\n[bold]How soon the first token comes[/bold]")
    prompt.show(model, tokenizer.encode, console)
    return True


def compare(model: Any, text: Text, profile: HadsProfile, folder: Path, console: Console) -> None:
    path = folder / "records.jsonl"
    path.unlink(missing_ok=True)
    dtype = jnp.dtype(model.dtype).name
    about = {"model": profile.model, "length": len(text.tokens), "block": profile.block, "dtype": dtype}
    records = Records(path, about)
    with console.status("") as status:
        evaluate(
            model,
            profile,
            [text],
            methods=GROUPS["short"],
            budgets=BUDGETS,
            records=records,
            progress=lambda what, done, of: status.update(what),
        )
    write(records, folder, model=model, profile=profile, text=text, console=console)
