"""A study's summary as lines for a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from xsake.hads.study.summary import Summary


def lines_of(rows: Sequence[Summary]) -> list[str]:
    """KL of each method by budget, best method first; a star where HADS is not surely better."""
    out = []
    for layers in sorted({row.layers for row in rows}):
        mine = [row for row in rows if row.layers == layers]
        budgets = sorted({row.budget for row in mine})
        table: dict[str, dict[float, Summary]] = defaultdict(dict)
        for row in mine:
            table[row.method][row.budget] = row
        out.append(f"{'KL, layers by ' + layers:26}" + "".join(f"{b:>10.0%}" for b in budgets) + "   texts")
        for method, found in sorted(table.items(), key=lambda item: _standing(item[1])):
            cells = []
            for budget in budgets:
                one = found.get(budget)
                doubt = "" if one is None or one.against is None or one.against.is_below else "*"
                cells.append(f"{'' if one is None else f'{one.kl:.4f}{doubt}':>10}")
            texts = max(one.sequences for one in found.values())
            off = max(one.off_budget for one in found.values())
            out.append(
                f"{method:26}" + "".join(cells) + f"{texts:8}" + (f"  off budget {off:.2%}" if off > 1e-3 else "")
            )
    out.append("* the 95% interval of KL(HADS) - KL(method) is not below 0")
    return out


def _standing(found: dict[float, Summary]) -> float:
    """Logarithm of the geometric mean of KL over budgets, by which the table is sorted."""
    logs = [np.log(max(one.kl, 1e-9)) for one in found.values() if one.budget < 1]
    return float(np.mean(logs)) if logs else 0.0
