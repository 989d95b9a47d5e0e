"""Settings: what `install` and the command line are told, and what a request may say for itself."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

from xsake._op import registry
from xsake.hads import HadsProfile, Policy
from xsake.hads.attention.policy import ALWAYS, AUTO

FIELD = "hads"  # a request's own budget is "hads=0.3" in its `extra_key`, among other words between semicolons


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `install`."""

    hads: float | None = None
    hads_profile: str | None = None
    hads_policy: Literal["auto", "always"] = "auto"
    implementation: str | None = None

    def __post_init__(self) -> None:
        registry.check_name(self.implementation)
        if self.hads_policy not in ("auto", "always"):
            raise ValueError(f'hads_policy={self.hads_policy!r} must be "auto" or "always"')
        if self.hads is not None:
            _check(self.hads)
            if self.hads_profile is None:
                raise ValueError(f"hads={self.hads} needs hads_profile, the file of this model's profile")

    @cached_property
    def profile(self) -> HadsProfile | None:
        return None if self.hads_profile is None else HadsProfile.load(self.hads_profile)

    @property
    def policy(self) -> Policy:
        return {"auto": AUTO, "always": ALWAYS}[self.hads_policy]

    def budget(self, extra_key: str | None) -> float | None:
        """The share of the blocks that a request's prompt keeps, None for all. ValueError where it is no budget."""
        said = [word.partition("=")[2] for word in (extra_key or "").split(";") if word.partition("=")[0] == FIELD]
        if not said:
            return self.hads
        if len(said) > 1:
            raise ValueError(f"extra_key={extra_key!r} has {len(said)} budgets of HADS: give one")
        if said[0] == "off":
            return None
        if self.hads_profile is None:
            raise ValueError(
                f"extra_key={extra_key!r} asks for HADS, and this server has no profile of its model: start it with "
                "--hads-profile"
            )
        try:
            budget = float(said[0])
        except ValueError:
            raise ValueError(f"{FIELD}={said[0]} must be a number above 0 and at most 1, or off") from None
        return _check(budget)

    @classmethod
    def of_arguments(cls, arguments: Sequence[str]) -> tuple[Settings, list[str]]:
        """The settings, and the arguments that are left to the engine."""
        parser = argparse.ArgumentParser(
            prog="python -m xsake.compat.sglang_jax",
            description="sglang-jax's server, whose attention is xsake's. All other options are the server's own: "
            "python -m sgl_jax.launch_server --help",
            allow_abbrev=False,
        )
        parser.add_argument("--hads", type=float, help="the share of the causal blocks that prompts keep; default: all")
        parser.add_argument("--hads-profile", help="the file of the model's profile, which HADS chooses by")
        parser.add_argument(
            "--hads-policy",
            default="auto",
            help="auto: dense where sparse attention does not pay; always: sparse wherever a block may be left out",
        )
        parser.add_argument("--implementation", help="of xsake.attention; by default the best one that can run")
        parser.add_argument("--attention-backend", help=argparse.SUPPRESS)
        given, rest = parser.parse_known_args(arguments)
        options: dict[str, Any] = vars(given)
        if options.pop("attention_backend") is not None:
            parser.error("--attention-backend: xsake is the backend; leave it out")
        try:
            settings = cls(**options)
            settings.profile  # noqa: B018 a file that is no profile ends the command, not a process that it starts
        except (OSError, ValueError) as error:
            parser.error(str(error))
        return settings, rest


def _check(budget: float) -> float:
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1:
        raise ValueError(f"{FIELD}={budget} must be above 0 and at most 1, a share of the blocks")
    return float(budget)
