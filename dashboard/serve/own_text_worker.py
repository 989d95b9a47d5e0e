"""The process that computes users' texts: jobs come on its standard input, one JSON object per line, and progress and
recordings go to its standard output.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints goes to the standard error

    def tell(**answer: Any) -> None:
        answers.write(json.dumps(answer, allow_nan=False).encode() + b"\n")
        answers.flush()

    from xsake.dashboard.show.recorder import Recorder

    recorder: Recorder | None = None
    for line in sys.stdin.buffer:
        job = json.loads(line)
        try:
            if recorder is None:
                profile = Path(sys.argv[2]) if len(sys.argv) > 2 else None
                recorder = Recorder.load(sys.argv[1], profile)
            tell(
                recording=recorder.record_text(
                    job["text"],
                    identity=job["id"],
                    title="your own text",
                    length=job["length"],
                    budgets=job["budgets"],
                    methods=job["methods"],
                    progress=lambda stage, done, of: tell(stage=stage, done=done, of=of),
                )
            )
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            tell(error=f"{error}"[:1000] or type(error).__name__)


if __name__ == "__main__":
    main()
