"""When sparse attention pays and keeps the answer: what a call runs, and why."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from xsake._ground.fields import check_fields, field
from xsake._ground.kinds import number, whole

Kind = Literal["prompt", "training", "decode"]
_MANY = 1 << 40


class Situation(NamedTuple):
    """What is known of a call when it is traced.

    - `kind`: a prompt or a chunk of it, training, or a few new tokens.
    - `batch`, `queries`, `keys`: sequences; tokens that ask; tokens of each sequence up to the last of them, or the
      slots of a cache.
    - `budget`: the share of the blocks that the user allows.
    - `forced`: the share of the blocks that is always on at this length.
    - `platform`: "gpu", "tpu" or "cpu".
    """

    kind: Kind
    batch: int
    queries: int
    keys: int
    budget: float
    forced: float
    platform: str


class Decision(NamedTuple):
    """What a call runs: the share of the blocks that is kept, None for dense attention, and why."""

    budget: float | None
    why: str

    def __str__(self) -> str:
        return f"{'dense' if self.budget is None else f'{self.budget:.1%} of the blocks'}: {self.why}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """From which size on a call is sparse, and how many blocks it keeps at least.

    Args:
      prompt, training: keys of a sequence from which on a prompt, or a training step, is faster sparsely.
      decode: keys of all sequences together from which on new tokens are faster sparsely.
      spare: the blocks kept are at least so many times those that are always on: with fewer, the answer suffers.
      most: with a larger share of the blocks, dense attention is as fast.
    """

    prompt: int = field(whole(0, _MANY), default=4096)
    training: int = field(whole(0, _MANY), default=8192)
    decode: int = field(whole(0, _MANY), default=1 << 19)
    spare: float = field(number(least=1), default=2.0)
    most: float = field(number(above=0, most=1), default=0.6)

    def __post_init__(self) -> None:
        check_fields(self)

    def decide(self, one: Situation) -> Decision:
        """
        >>> call = Situation("prompt", 1, 8192, 8192, budget=0.2, forced=0.046, platform="gpu")
        >>> print(Policy().decide(call))
        20.0% of the blocks: sparse from 4096 tokens on
        >>> print(Policy().decide(call._replace(keys=2048)))
        dense: 2048 tokens are fewer than the 4096 from which on a sparse prompt is faster
        """
        least, size = getattr(self, one.kind), one.batch * one.keys if one.kind == "decode" else one.keys
        what = "cached tokens of all sequences" if one.kind == "decode" else "tokens"
        if size < least:
            doing = {"prompt": "a sparse prompt", "training": "sparse training", "decode": "sparse writing"}[one.kind]
            return Decision(None, f"{size} {what} are fewer than the {least} from which on {doing} is faster")
        budget = min(max(one.budget, self.spare * one.forced), 1.0)
        if budget > self.most:
            return Decision(
                None, f"{budget:.1%} of the blocks are to be kept, and above {self.most:.0%} dense is as fast"
            )
        if budget > one.budget:
            why = f"{one.forced:.1%} are always on"
            more = f", and with fewer than {self.spare:g} times as many the answer suffers" if self.spare > 1 else ""
            return Decision(budget, why + more)
        return Decision(budget, f"sparse from {least} {what} on" if least else "always")


AUTO = Policy()
ALWAYS = Policy(prompt=0, training=0, decode=0, spare=1.0, most=1.0)
