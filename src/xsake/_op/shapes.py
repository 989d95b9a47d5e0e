"""What the annotations of the attention operations share. Tests check them, and users pay nothing for them.

B, T, S: batch, queries, keys; H, K: query heads and K/V heads; D, Dv: dimensions of a head. A size after # may be 1; a
size after _ is only named, since keys may lie in pages and bias may be for the keys of all devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from jax import Array
from jaxtyping import Float, Int

Arrays = Array | np.ndarray
Tokens = Int[Arrays, "#B T"] | tuple[Int[Arrays, "#B T"], Int[Arrays, "#B _S"]]  # one number per token, or a pair

if TYPE_CHECKING:  # `return_lse` says which of the two it is, and checkers of types cannot follow that
    Output = Any
else:
    Output = Float[Array, "B T H Dv"] | tuple[Float[Array, "B T H Dv"], Float[Array, "B T H"]]
