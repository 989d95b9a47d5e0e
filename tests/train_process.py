"""A training run in a process of its own, to be killed, or to be one of several.

python train_process.py '{"data": ..., "run": ..., "join": [address, processes, process] or null, ...}'
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


def environment(devices: int) -> dict[str, str]:
    """The variables of a process with this checkout's packages and as many simulated devices."""
    paths = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"]),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def start(
    *,
    data: Path,
    run: Path,
    changes: dict[str, Any],
    devices: int = 1,
    mesh: tuple[int, ...] = (1, 1),
    join: list[Any] | None = None,
    checkpoint_every: int = 3,
) -> subprocess.Popen[bytes]:
    """Start such a process, with `devices` simulated devices."""
    given = {"data": str(data), "run": str(run), "changes": changes, "mesh": mesh, "join": join}
    return subprocess.Popen(
        [sys.executable, __file__, json.dumps(given | {"checkpoint_every": checkpoint_every})],
        env=os.environ | environment(devices),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def main() -> None:
    """Prints the losses that this process saw, as JSON."""
    from training import make_config

    from xsake.model.training import loop
    from xsake.model.training.distributed import initialize
    from xsake.model.training.trainer import Trainer

    given = json.loads(sys.argv[1])
    if given["join"] is not None:
        initialize(*given["join"])
    seen = []

    class Watched(Trainer):
        def step(self) -> dict[str, Any]:
            metrics = super().step()
            seen.append(metrics["loss"])
            return metrics

    loop.Trainer = Watched
    loop.train(
        make_config(**given["changes"]),
        data=Path(given["data"]),
        run=Path(given["run"]),
        mesh=tuple(given["mesh"]),
        checkpoint_every=given["checkpoint_every"],
        quiet=True,
    )
    print(json.dumps([float(loss) for loss in seen]))


if __name__ == "__main__":
    main()
