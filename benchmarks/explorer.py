"""Recordings for the HADS explorer: SmolLM2 reads the project's own pages, with masks of several methods.

    python -m benchmarks.explorer                          compute and print
    python -m benchmarks.explorer --record                 also write benchmarks/results/explorer/
    python -m benchmarks.explorer --length 4096            another number of tokens
    python -m benchmarks.explorer --needle --record        the pages hide a number, and their end asks for it

Some minutes on a CPU, after `xsake model fetch smollm2`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks import record
from benchmarks.ruler.fit import largest
from xsake.dashboard.read import stored
from xsake.dashboard.show.recorder import Recorder
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.profile.rule import RULE
from xsake.model import load_tokenizer

MODEL = "smollm2"
PAGES = ("docs/hads.md", "docs/masks.md", "docs/architecture.md", "README.md")
BUDGETS = (0.2, 0.3, 0.43)
METHODS = ("hads", "x_attention_8", "mean_top_k", "flash_prefill", "sink_window", "oracle_gain")
NEEDLE_LENGTH, NEEDLE_BUDGETS = 4096, (0.12, 0.2)
NEEDLE_METHODS = ("hads_no_exact_rows", "hads", "oracle_gain")
ASKED, ANSWER = "\nThe magic number of the castle is", " 40917358"


def needle(text: str, encode: Callable[[str], list[int]], length: int) -> str:
    """The text's beginning with a sentence in its first third that the end asks for: at most `length` tokens."""

    def made(characters: int) -> str:
        at = characters // 3
        return f"{text[:at]}{ASKED}{ANSWER}.\n{text[at:characters]}{ASKED}"

    return made(largest(lambda n: len(encode(made(n))), length, least=1, most=len(text)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/explorer/")
    parser.add_argument("--length", type=int, help="tokens; by default 2048, with --needle 4096")
    parser.add_argument("--needle", action="store_true", help="hide a number in the text and ask for it")
    options = parser.parse_args()
    text = "\n\n".join((record.ROOT / page).read_text() for page in PAGES)
    profile, name = HadsProfile.shipped(MODEL), "SmolLM2-135M"
    length = options.length or (NEEDLE_LENGTH if options.needle else 2048)
    if options.needle:
        text = needle(text, load_tokenizer(MODEL).encode, length)
        profile = dataclasses.replace(HadsProfile.shipped(MODEL, length), rule=RULE)
        identity, title = f"{MODEL}-needle-{length}", f"{name} is asked for a number that a page hides"
        chosen: dict[str, Any] = {"budgets": NEEDLE_BUDGETS, "methods": NEEDLE_METHODS}
    else:
        identity, title = (
            f"{MODEL}-{options.length}-64",
            f"{name} reads {options.length} tokens of this project's pages",
        )
        chosen = {"budgets": BUDGETS, "methods": METHODS}
    recording = Recorder.load(MODEL, profile).record_text(
        text,
        identity=identity,
        title=title,
        length=length,
        progress=lambda stage, done, of: print(f"{done}/{of} {stage}", flush=True) if done % 30 == 0 else None,
        about={"text": {"name": ", ".join(PAGES), "domain": "documentation"}, "environment": record.environment()},
        **chosen,
    )
    for row in recording["about"]["results"]:
        print(f"{row['budget']:.0%} {row['method']:15} KL {row['kl']:.4f}  same token {row['same_token']:.1%}")
    if options.record:
        path = record.RESULTS / "explorer" / f"{identity}{stored.SUFFIX}"
        stored.write(path, recording)
        print(f"{path} ({path.stat().st_size:,} bytes)")


if __name__ == "__main__":
    main()
