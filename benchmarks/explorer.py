"""A recording for the HADS explorer: SmolLM2 reads the project's own pages, with masks of several methods.

    python -m benchmarks.explorer                          compute and print
    python -m benchmarks.explorer --record                 also write benchmarks/results/explorer/
    python -m benchmarks.explorer --length 4096            another number of tokens

Some minutes on a CPU, after `xsake model fetch smollm2`.
"""

from __future__ import annotations

import argparse

from benchmarks import record
from xsake.dashboard.read import stored
from xsake.dashboard.show.recorder import Recorder

MODEL = "smollm2"
PAGES = ("docs/hads.md", "docs/masks.md", "docs/architecture.md", "README.md")
BUDGETS = (0.2, 0.3, 0.43)
METHODS = ("hads", "x_attention_8", "mean_top_k", "flash_prefill", "sink_window", "oracle_gain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/explorer/")
    parser.add_argument("--length", type=int, default=2048, help="tokens")
    options = parser.parse_args()
    text = "\n\n".join((record.ROOT / page).read_text() for page in PAGES)
    recorder = Recorder.load(MODEL)
    identity = f"{MODEL}-{options.length}-64"
    recording = recorder.record_text(
        text,
        identity=identity,
        title=f"SmolLM2-135M reads {options.length} tokens of this project's pages",
        length=options.length,
        budgets=BUDGETS,
        methods=METHODS,
        progress=lambda stage, done, of: print(f"{done}/{of} {stage}", flush=True) if done % 30 == 0 else None,
        about={"text": {"name": ", ".join(PAGES), "domain": "documentation"}, "environment": record.environment()},
    )
    for row in recording["about"]["results"]:
        print(f"{row['budget']:.0%} {row['method']:15} KL {row['kl']:.4f}  same token {row['same_token']:.1%}")
    if options.record:
        path = record.RESULTS / "explorer" / f"{identity}{stored.SUFFIX}"
        stored.write(path, recording)
        print(f"{path} ({path.stat().st_size:,} bytes)")


if __name__ == "__main__":
    main()
