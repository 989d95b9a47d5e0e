"""The calls of HADS that are raced."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from xsake.hads import HadsProfile
from xsake.hads.attention.policy import Kind
from xsake.hads.attention.step import forced_share_of_step
from xsake.hads.profile.by_length import forced_share

KINDS: tuple[Kind, ...] = ("prompt", "chunk", "training", "decode")
CHUNK = 1024  # tokens

# By platform and kind: the tokens of a sequence, and the sequences.
_SIZES: dict[str, dict[Kind, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "cpu": {
        "prompt": ((1024, 2048, 4096, 8192), (1,)),
        "chunk": ((2048, 4096, 8192), (1,)),
        "training": ((1024, 2048, 4096), (1,)),
        "decode": ((2048, 8192, 32768), (1, 8)),
    },
    "gpu": {
        "prompt": ((2048, 4096, 8192, 16384, 32768), (1,)),
        "chunk": ((4096, 8192, 16384, 32768), (1,)),
        "training": ((2048, 4096, 8192, 16384), (1, 8)),
        "decode": ((8192, 32768), (1, 8, 32)),
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HadsCall:
    """A call of `hads.Attention` in a model of this profile, with this share of the blocks."""

    kind: Kind
    profile: HadsProfile
    batch: int
    queries: int
    keys: int
    budget: float
    dtype: str

    def __str__(self) -> str:
        sequences = "" if self.batch == 1 else f"{self.batch} x "
        what = {
            "prompt": f"a prompt of {sequences}{self.keys} tokens",
            "chunk": f"the last {self.queries} of {sequences}{self.keys} tokens",
            "training": f"training on {sequences}{self.keys} tokens",
            "decode": f"a new token after {sequences}{self.keys}",
        }[self.kind]
        p = self.profile
        return f"{what}, {p.q_heads}/{p.kv_heads} heads of {p.head_dim}, blocks of {p.block_q} x {p.block}"

    @property
    def leaves_a_choice(self) -> bool:
        """Whether the blocks that are always on are within the budget."""
        if self.kind == "decode":
            return forced_share_of_step(self.profile, self.keys, self.queries) <= self.budget
        return forced_share(self.profile.grid(self.keys)) <= self.budget


def default_profiles(platform: str) -> list[HadsProfile]:
    """Those of small and large models that come with xsake; a CPU runs small ones."""
    small = [HadsProfile.shipped("smollm2", 8192)]
    large = [HadsProfile.shipped("qwen2.5-coder-1.5b", length) for length in (8192, 32768)]
    return small if platform == "cpu" else [*small, *large]


def planned(platform: str, profiles: Iterable[HadsProfile], budgets: Iterable[float], dtype: str) -> list[HadsCall]:
    """The calls of this platform, short ones first."""
    sizes = _SIZES["cpu" if platform == "cpu" else "gpu"]
    calls = []
    for profile, kind, budget in itertools.product(profiles, KINDS, budgets):
        for keys, batch in itertools.product(*sizes[kind]):
            queries = {"chunk": CHUNK, "decode": 1}.get(kind, keys)
            shape = dict(batch=batch, queries=queries, keys=keys)
            calls.append(HadsCall(kind=kind, profile=profile, budget=budget, dtype=dtype, **shape))
    return sorted((c for c in calls if c.leaves_a_choice), key=lambda c: c.batch * c.keys)
