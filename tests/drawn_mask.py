"""Masks that Hypothesis draws, and their properties in numpy, which the tests compare with."""

from __future__ import annotations

import dataclasses
import itertools

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
from hypothesis import settings

from xsake import BlockMask
from xsake.testing.reference import rule

LISTS = ("kv_indices", "kv_row_ptr", "kv_num_full", "row_order", "q_indices", "q_row_ptr", "q_num_full", "col_order")


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Boolean blocks [b, h, nQ, nK] and the mask's sizes and rule."""

    blocks: np.ndarray
    sizes: dict

    def __repr__(self) -> str:
        return f"Drawn({self.blocks.astype(int).tolist()}, {self.sizes})"

    def build(self, **options) -> BlockMask:
        return BlockMask.from_blocks(self.blocks, **self.sizes, **options)

    @property
    def elements_of_rule(self) -> np.ndarray:
        q, k = np.arange(self.sizes["q_len"])[:, None], np.arange(self.sizes["kv_len"])[None]
        return rule(q - k, self.sizes["is_causal"], self.sizes["local_window_size"])

    def _per_block(self, reduce, elements, fill) -> np.ndarray:
        """[nQ, nK]: `reduce` over the elements of each block, where padding is `fill`."""
        n, m = self.blocks.shape[-2:]
        bq, bk = self.sizes["block_q"], self.sizes["block_kv"]
        grid = np.full((n * bq, m * bk), fill)
        grid[: elements.shape[0], : elements.shape[1]] = elements
        return reduce(reduce(grid.reshape(n, bq, m, bk), 3), 1)

    @property
    def allowed(self) -> np.ndarray:
        return self._per_block(np.any, self.elements_of_rule, False)

    @property
    def full(self) -> np.ndarray:
        """Blocks in which the rule allows every element; a block with padding is not full."""
        return self._per_block(np.all, self.elements_of_rule, False)

    @property
    def active(self) -> np.ndarray:
        return self.blocks & self.allowed


fewer = settings(max_examples=settings().max_examples // 3)  # for tests that compile each example


windows = st.one_of(
    st.none(),
    st.integers(0, 30),
    st.tuples(st.one_of(st.none(), st.integers(0, 30)), st.one_of(st.none(), st.integers(0, 30))),
)


@st.composite
def drawn(draw, *, rules: bool = True, batch: int = 2) -> Drawn:
    sizes = dict(
        block_q=draw(st.integers(1, 9)),
        block_kv=draw(st.integers(1, 9)),
        q_len=draw(st.integers(1, 40)),
        kv_len=draw(st.integers(1, 40)),
        is_causal=draw(st.booleans()) if rules else False,
        local_window_size=draw(windows) if rules else None,
    )
    n, m = -(-sizes["q_len"] // sizes["block_q"]), -(-sizes["kv_len"] // sizes["block_kv"])
    shape = (draw(st.integers(1, batch)), draw(st.integers(1, 3)), n, m)
    return Drawn(draw(hnp.arrays(bool, shape, elements=st.booleans(), fill=st.booleans())), sizes)


def arrays(mask: BlockMask) -> dict[str, np.ndarray]:
    return {name: np.asarray(getattr(mask, name)) for name in LISTS}


def rows_of(indices, ptr) -> list[list[int]]:
    return [indices[a:b].tolist() for a, b in itertools.pairwise(ptr)]
