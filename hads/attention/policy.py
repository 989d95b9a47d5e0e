"""When sparse attention pays and keeps the answer: what a call runs, and why."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

from xsake import tuning_db
from xsake._ground.fields import check_fields, field
from xsake._ground.kinds import maybe, number, whole
from xsake.hads.profile.profile import HadsProfile
from xsake.tuning_db import Found, Key

Kind = Literal["prompt", "chunk", "training", "decode", "request"]
_MANY = 1 << 40

# By kind: from how many tokens on a call is sparse where no race of such calls is known; new tokens by the cached
# tokens of all sequences. A guess from an H200's larger models. Requests of a server choose among their pages by an XLA
# program, which was slower than dense attention wherever it was measured.
HEURISTIC = {"prompt": 4096, "chunk": 4096, "training": 8192, "decode": 1 << 19, "request": None}
_DOING = {
    "prompt": "a sparse prompt",
    "chunk": "a sparse chunk",
    "training": "sparse training",
    "decode": "sparse writing",
    "request": "a request's sparse prompt",
}


class Situation(NamedTuple):
    """What is known of a call when it is traced.

    - `kind`: a whole prompt, a chunk of it, a training step, a few new tokens, or the prompt of one of a server's
      requests.
    - `batch`, `queries`, `keys`: sequences; tokens that ask; tokens of each sequence up to the last of them, or the
      slots of a cache.
    - `budget`: the share of the blocks that the user allows.
    - `forced`: the share of the blocks that is always on at this length.
    - `device`: its kind, as JAX names it.
    - `dtype`: of the queries.
    - `profile`: of the model: its heads and blocks.
    """

    kind: Kind
    batch: int
    queries: int
    keys: int
    budget: float
    forced: float
    device: str
    dtype: str
    profile: HadsProfile

    @property
    def size(self) -> int:
        return self.batch * self.keys if self.kind == "decode" else self.keys

    def key(self, density: float) -> Key:
        """The call, as races of sparse and dense attention know it."""
        sizes: dict[str, Any] = dict(q_len=self.queries, kv_len=self.keys, density=density)
        key = race_key(self.profile, self.kind, batch=self.batch, dtype=self.dtype, implementation="", **sizes)
        return dataclasses.replace(key, kv_len=self.keys)


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
      prompt, training: keys of a sequence from which on a prompt, in chunks or not, a server's or not, or a training
        step is sparse. None asks the tuning database, which holds races of sparse and dense attention on this device
        (`xsake autotune --hads`), and without such a race a heuristic.
      decode: keys of all sequences together from which on new tokens are sparse; None as above.
      spare: the blocks kept are at least so many times those that are always on: with fewer, the answer suffers.
      most: with a larger share of the blocks, dense attention is as fast.
    """

    prompt: int | None = field(maybe(whole(0, _MANY)), default=None)
    training: int | None = field(maybe(whole(0, _MANY)), default=None)
    decode: int | None = field(maybe(whole(0, _MANY)), default=None)
    spare: float = field(number(least=1), default=2.0)
    most: float = field(number(above=0, most=1), default=0.6)

    def __post_init__(self) -> None:
        check_fields(self)

    def decide(self, one: Situation) -> Decision:
        """
        >>> profile = HadsProfile.shipped("smollm2", 8192)
        >>> call = Situation("prompt", 1, 8192, 8192, 0.2, 0.046, "a new device", "bfloat16", profile)
        >>> print(Policy(prompt=4096).decide(call))
        20.0% of the blocks: sparse from 4096 tokens on
        >>> print(Policy(prompt=4096).decide(call._replace(keys=2048)))
        dense: 2048 tokens are fewer than the 4096 from which on a sparse prompt is faster
        """
        budget = min(max(one.budget, self.spare * one.forced), 1.0)
        pays, why = self._pays(one, budget)
        if not pays:
            return Decision(None, why)
        if budget > self.most:
            return Decision(
                None, f"{budget:.1%} of the blocks are to be kept, and above {self.most:.0%} dense is as fast"
            )
        if budget > one.budget:
            more = f", and with fewer than {self.spare:g} times as many the answer suffers" if self.spare > 1 else ""
            return Decision(budget, f"{one.forced:.1%} are always on{more}")
        return Decision(budget, why)

    def _pays(self, one: Situation, budget: float) -> tuple[bool, str]:
        """Whether sparse attention is faster, and why."""
        least = getattr(self, "prompt" if one.kind in ("chunk", "request") else one.kind)
        if least is not None:
            return _from(one, least)
        if found := tuning_db.find_race(one.device, one.key(budget)):
            return bool(found.entry.config["sparse"]), told(found, one.device)
        if (guess := HEURISTIC[one.kind]) is None:
            return False, f"{_DOING[one.kind]} was slower wherever it was raced"
        pays, why = _from(one, guess)
        return pays, f"{why}: a guess, for no race of such calls on {one.device!r} is known (xsake autotune --hads)"


def _from(one: Situation, least: int) -> tuple[bool, str]:
    what = "cached tokens of all sequences" if one.kind == "decode" else "tokens"
    if one.size < least:
        return False, (f"{one.size} {what} are fewer than the {least} from which on {_DOING[one.kind]} is faster")
    return True, f"sparse from {least} {what} on" if least else "always"


def default_dtype(device: str) -> str:
    """In which models usually run there."""
    return "float32" if device == "cpu" else "bfloat16"


def told(found: Found, device: str) -> str:
    """What a race showed, and where it was."""
    about = found.entry.about
    race: Any = about["measured"][0]
    where = f"from {about['record']}" if about["source"] == "record" else f"raced on {device}"
    whose = {"user": "your own entry", "shipped": "shipped", "overlay": "an overlay"}[found.origin]
    speed = f"{float(about['speedup']):.2f}x the speed of dense attention"
    return f"{race['workload']} had {speed} with {float(race['density']):.0%} of the blocks ({where}; {whose})"


def race_key(
    profile: HadsProfile,
    kind: Kind,
    *,
    batch: int,
    q_len: int,
    kv_len: int,
    density: float,
    dtype: str,
    implementation: str,
) -> Key:
    """The key of a race of sparse and dense attention in a model of this profile."""
    return Key.of(
        operation=tuning_db.HADS,
        implementation=implementation,
        direction=kind,
        dtype=dtype,
        head_dim=profile.head_dim,
        value_dim=profile.head_dim,
        group=profile.q_heads // profile.kv_heads,
        block_q=profile.block_q,
        block_kv=profile.block,
        causal=True,
        q_len=q_len,
        kv_len=kv_len,
        heads=batch * profile.q_heads,
        density=density,
    )


AUTO = Policy()
ALWAYS = Policy(prompt=0, training=0, decode=0, spare=1.0, most=1.0)
NEVER = Policy(prompt=_MANY, training=_MANY, decode=_MANY)
