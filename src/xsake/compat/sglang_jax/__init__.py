"""XSAKE inside sglang-jax, a server in JAX: `python -m xsake.compat.sglang_jax --model-path ...`, or `install()` before
its `Engine` is made.

The engine is not edited. It chooses a backend of attention in one method, and its scheduler is started by one function:
`install` puts others in their places.
"""

from __future__ import annotations

from typing import Any

from xsake.compat.sglang_jax.settings import Settings

__all__ = ["VERSIONS", "install"]

VERSIONS = ("0.1.0rc0",)  # of sglang-jax, that the tests ran with


def install(**settings: Any) -> None:
    """Engines and servers that this process makes from now on attend by xsake.

    Args:
      hads: the share of the causal blocks that prompts keep, by default all; new tokens attend to all tokens. A request
        may have a budget of its own: "hads=0.3", or "hads=off", in its `extra_key`, which also keeps its prefixes apart
        from those of other budgets.
      hads_profile: the file of the model's profile, from `hads.calibrate`, without which there is no HADS.
      hads_policy: "auto" reads prompts densely where sparse attention does not pay, as `hads.Attention` does, or
        "always" sparsely.
      implementation: as in `xsake.attention`.

    NotImplementedError if another version of sglang-jax is installed than those of `VERSIONS`.
    """
    from importlib import metadata

    try:
        version = metadata.version("sglang-jax")
    except metadata.PackageNotFoundError as error:
        raise ModuleNotFoundError("sglang-jax is not installed: docs/serving.md says how", name="sgl_jax") from error
    if version not in VERSIONS:
        raise NotImplementedError(
            f"sglang-jax {version} is installed, and xsake takes the place of parts of it that only "
            f"{' and '.join(VERSIONS)} are known to have: install one of these"
        )
    from xsake.compat.sglang_jax import places

    places.take(Settings(**settings))
