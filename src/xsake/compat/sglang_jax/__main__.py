"""`python -m xsake.compat.sglang_jax --model-path ...`: the engine's own server, with xsake in it."""

from __future__ import annotations

import dataclasses
import sys

from xsake.compat.sglang_jax import install
from xsake.compat.sglang_jax.settings import Settings

if __name__ == "__main__":  # the processes that the server starts import this module, too
    settings, rest = Settings.of_arguments(sys.argv[1:])
    install(**dataclasses.asdict(settings))
    sys.argv[1:] = rest
    from sgl_jax.launch_server import main

    main()
