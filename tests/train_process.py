"""A training run in a process of its own, to be killed, or to be one of several.

python train_process.py '{"data": ..., "run": ..., "join": [address, processes, process] or null, ...}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from training import make_config

from xsake.model.distributed import initialize
from xsake.model.train import train


def main() -> None:
    given = json.loads(sys.argv[1])
    if given["join"] is not None:
        initialize(*given["join"])
    train(
        make_config(**given["changes"]),
        data=Path(given["data"]),
        run=Path(given["run"]),
        mesh=tuple(given["mesh"]),
        checkpoint_every=given["checkpoint_every"],
        quiet=True,
    )


if __name__ == "__main__":
    main()
