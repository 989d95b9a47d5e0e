"""Settings of a study: sizes, methods and budgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from benchmarks.hads.methods import METHODS, RIVALS, STRENGTHENED
from xsake.hads.profile.causal_grid import CausalGrid

BUDGETS = (0.2, 0.43, 0.1, 0.3, 0.15, 0.5)  # the most telling budgets first: a run may be cut off
STRONG = ("x_attention_8", "mean_top_k", "flash_prefill", "ada_kv", "cobs", "blasst", "sink_window")
FIRST = ("hads", "oracle_top_k", "oracle_gain", *(f"{name}+forced" for name in STRONG), *STRONG)
TASK_METHODS = ("hads", "sink_window+forced", "mean_top_k+forced", "x_attention_8+forced", "x_attention_8")
# Compared with the weight of the last rows given to every method, and to none.
LAST_ROWS_METHODS = (*TASK_METHODS, "flash_prefill", "flash_prefill+forced", "hads_shares_top_k+forced", "oracle_gain")
# A long text takes a second per method. The stage `long` runs these methods in this order on one text after the
# other, at the first budgets on all texts before the others.
CLOSEST = ("flash_prefill", "x_attention_8", "x_attention_8_heads", "minference", "kascade", "mean_top_k")
LONG_METHODS = tuple(
    dict.fromkeys(
        ["hads", "oracle_gain", *(f"{name}+forced" for name in CLOSEST), *CLOSEST, "oracle_top_k"]
        + [name for pair in zip(STRENGTHENED, RIVALS, strict=True) for name in pair]
    )
)
LONG_BUDGETS = ((0.2, 0.1), (0.43, 0.3))
# The project's first table: each pattern at the share of blocks that it had there.
SEED = {"sliding_window": 0.28, "longformer": 0.32, "big_bird": 0.41, "random": 0.5, "hads": 0.43}


@dataclasses.dataclass(frozen=True)
class Settings:
    length: int = 8192
    block: int = 64
    block_q: int = 0  # tokens of a row of blocks; 0: as many as a block has
    batch: int = 8  # sequences at a time
    calibration_sequences: int = 4  # per domain
    sequences: int = 64  # per domain, at most
    screened: int = 16  # sequences on which every method is tried
    name: str = "smollm2"
    methods: Sequence[str] = tuple(METHODS)  # only these methods are run
    budgets: Sequence[float] = BUDGETS
    task_budgets: Sequence[float] = (0.2, 0.43, 0.1)  # of which those are run that are also in `budgets`
    seed: Mapping[str, float] = MappingProxyType(SEED)
    attention_dtype: Any = None  # to which queries, keys and values are rounded; None: as the model has them

    def __str__(self) -> str:
        """The part of file names that tells studies apart; SmolLM2, the first model, is not named."""
        blocks = "x".join(str(size) for size in reversed(self.grid.shape.values()))
        return f"{'' if self.name == 'smollm2' else f'{self.name}-'}{self.length}-{blocks}"

    @property
    def grid(self) -> CausalGrid:
        """The blocks of a text, by the rule of new profiles."""
        return CausalGrid.of(self.length, self.block, self.block_q)
