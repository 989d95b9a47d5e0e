"""Rule: every constant by which HADS chooses blocks, and the formulas that are nothing but these constants."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from xsake._ground.fields import check_fields, field, whole
from xsake._ground.kinds import number

_FACTOR = number(least=0, most=1_000_000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """The constants of the choice of blocks. A profile stores the rule that it was calibrated with.

    Blocks that are always on, for row i and column j of blocks (`forces`):
      sink_blocks: j < sink_blocks, the attention sink.
      near_blocks: i - j <= near_blocks, the diagonal and the blocks before it, which hold a block's near context. Where
        a row is `tall` blocks high, they are counted from the row's first one: i * tall - j <= near_blocks.
      dense_rows: i < dense_rows, the first rows.

    The last rows, where a question stands and from which what follows is made (`CausalGrid.first_last`):
      exact_queries: rows that hold one of a sequence's last `exact_queries` queries. Their masses are measured and not
        estimated (`selection.exact`): the estimate knows a block's queries by their mean, in which a question's few
        sharp queries drown.
      last_rows: so many rows are last rows in any case. Older profiles have no exact rows, and these alone.

    How much an error counts (`selection.gain`):
      last_weight: errors in the last rows count so many times.
      own_part: how much more a block's own squared error counts than its products with other blocks' errors, which
        point in other directions.
      between_layers, within_layers: exponents that ease measured sensitivities. Sensitivity is the curvature for small
        errors; larger errors cost less than it says, most where it is large.
      reference_budget: the budget at which sensitivity is measured; the result serves budgets from 10% to 50%.

    The values were chosen by SmolLM2's divergence at budgets from 10% to 43%, on texts that no result uses; last_weight
    by answers of Qwen2.5-Coder-1.5B at 4096 and 8192 tokens, few per task: 4 and 64 mostly lost more of them.

    Formulas work on integers, numpy arrays and traced arrays alike, so that XLA's program and the kernels share them.

    >>> rule = Rule()
    >>> [rule.forces(9, j) for j in range(10)]
    [True, False, False, False, False, False, False, False, True, True]
    """

    sink_blocks: int = whole(0, 1024, default=1)
    near_blocks: int = whole(0, 1024, default=1)
    dense_rows: int = whole(0, 1024, default=4)
    exact_queries: int = whole(0, 65536, default=128)
    last_rows: int = whole(0, 1024, default=0)
    last_weight: float = field(_FACTOR, default=16.0)
    own_part: float = field(_FACTOR, default=4.0)
    between_layers: float = field(_FACTOR, default=0.75)
    within_layers: float = field(_FACTOR, default=0.5)
    reference_budget: float = field(number(above=0, most=1), default=0.15)

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of_blocks(cls, tall: int) -> Rule:
        """The rule for rows that are `tall` blocks of keys high. The rows have root `tall` times as many tokens as
        square blocks of the same area: the same tokens are near, and the same rows are dense.

        >>> rule = Rule.of_blocks(4)
        >>> rule.near_blocks, rule.dense_rows
        (2, 2)
        """
        root = math.sqrt(tall)
        return cls(
            near_blocks=round(cls.near_blocks * root),
            dense_rows=max(round(cls.dense_rows / root), 1),
        )

    def forces(self, row: Any, column: Any, tall: int = 1) -> Any:
        """Whether a block that causality allows is always on; rows are `tall` blocks of keys high."""
        return (column < self.sink_blocks) | (row * tall - column <= self.near_blocks) | (row < self.dense_rows)


RULE = Rule()  # of newly calibrated profiles
TRAINING = dataclasses.replace(RULE, exact_queries=0)  # without last rows: no row is asked more than another

# Profiles of version 3 were all made with these.
VERSION_3 = Rule(
    sink_blocks=1,
    near_blocks=1,
    dense_rows=4,
    exact_queries=0,
    last_rows=2,
    last_weight=4.0,
    own_part=4.0,
    between_layers=0.75,
    within_layers=0.5,
    reference_budget=0.15,
)
