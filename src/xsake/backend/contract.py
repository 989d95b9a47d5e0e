"""`Call`, which a backend gets, and `Backend`, the names that a backend provides: public as `xsake.backend`.

A backend is a module with the names of `Backend`, here or in another package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jax import Array
from jaxtyping import Float, Int

from xsake.backend.delta import DeltaParts
from xsake.hads.mask.band import Band
from xsake.hads.mask.block_mask import BlockMask

# The version of this contract. It grows only where a backend that was right would become wrong: a name or parameter of
# `Backend` that changes, or a field of `Call` with another meaning. New optional fields of `Call` change nothing, since
# a backend refuses what it does not name in `HONOURS`.
CONTRACT = 1
# The directions that a configuration may have fields for, and the results that the kernel of each computes.
RESULTS = {
    "forward": ("out", "lse"),
    "dq": ("d_query",),
    "dkv": ("d_key", "d_value"),
    "backward": ("d_query", "d_key", "d_value"),
    "fused": ("d_query", "d_key", "d_value"),
}

# How a field of `Call` is declared. A field that is not static is an array, or a tree of arrays, with a leading batch.
_STATIC = {"static": True}  # as jax.tree_util.register_dataclass reads it
_PERMISSION = _STATIC | {"permission": True}  # it allows a backend something and asks for nothing
_SHARED = {"shared_batch": True}  # the field's batch may be 1 where the query's is not


def _dims(names: str) -> dict[str, str]:
    """The meaning of an array's dimensions: batch, tokens (t, s), heads (h), K/V heads (k) and channels (d, e)."""
    return {"dims": names}


def stored_head(kv_head: Any, *, joined_kv: bool, value: bool) -> Any:
    """The head of an array of pages that holds the keys, or the values, of K/V head `kv_head` (`Call.joined_kv`)."""
    return 2 * kv_head + int(value) if joined_kv else kv_head


_SEGMENTS = {"argument": "segment_ids"}
_POSITIONS = {"argument": "positions"}
_UNBOUNDED = Band()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Call:
    """One attention call after validation, with every convenience of the public signature resolved.

    - `mask` always exists. The list of query head h is that of mask head `h * mask.heads // H`.
    - `band` is the mask's rule and the call's together, on positions where given, on indices otherwise.
    - Lengths and padding are segment ids: a query attends a key iff their ids are equal; ids of padding never are.
    - `sink_lse` is the logsumexp of a head's sinks: one more logit in every row, with a value of 0. It is NaN for a
      head whose mask overflowed, so that NaN reaches every output.
    - Without `deterministic`, a backend may add up in an order that differs from run to run.
    - Where `mask.bitmaps` is not None, an element of a listed block attends only if its bit is set. All bits of a full
      block are.
    - With `page_table`, key and value are [pages, page, K, D], and page `page_table[b, i]` holds tokens i * page to
      (i + 1) * page of sequence b. Padding may hold NaN, and where a whole page would be padding, its entry may be
      anything. There is no backward.
    - With `joined_kv`, key and value are one array of pages, [pages, page, 2 K, D]: head 2 k holds the keys of K/V head
      k, and head 2 k + 1 its values.
    - With `full_is_known`, the mask's full blocks attend wholly, whatever the positions and segments are.

    A field with a default is optional: a call that gives it another value goes only to backends that name the field in
    `HONOURS`, unless the field is a permission. vmap, trees, the registry and meshes read these declarations.
    `argument` is the public name of a field.
    """

    query: Float[Array, "B T H D"] = dataclasses.field(metadata=_dims("b t h d"))
    key: Float[Array, "B S K D"] = dataclasses.field(metadata=_dims("b s k d"))
    value: Float[Array, "B S K Dv"] = dataclasses.field(metadata=_dims("b s k e"))
    mask: BlockMask = dataclasses.field(metadata=_SHARED)
    scale: float = dataclasses.field(metadata=_STATIC)
    bias: Float[Array, "Bb Hb Tb Sb"] | None = dataclasses.field(default=None, metadata=_SHARED | _dims("b h t s"))
    q_segments: Int[Array, "B T"] | None = dataclasses.field(default=None, metadata=_SEGMENTS | _dims("b t"))
    kv_segments: Int[Array, "B S"] | None = dataclasses.field(default=None, metadata=_SEGMENTS | _dims("b s"))
    q_positions: Int[Array, "B T"] | None = dataclasses.field(default=None, metadata=_POSITIONS | _dims("b t"))
    kv_positions: Int[Array, "B S"] | None = dataclasses.field(default=None, metadata=_POSITIONS | _dims("b s"))
    sink_lse: Float[Array, "Bs H"] | None = dataclasses.field(
        default=None, metadata=_SHARED | _dims("b h") | {"argument": "sinks"}
    )
    band: Band = dataclasses.field(
        default=_UNBOUNDED, metadata=_STATIC | {"argument": "is_causal and local_window_size"}
    )
    deterministic: bool = dataclasses.field(default=True, metadata=_PERMISSION)
    full_is_known: bool = dataclasses.field(default=False, metadata=_PERMISSION)
    soft_cap: float | None = dataclasses.field(default=None, metadata=_STATIC | {"argument": "logits_soft_cap"})
    page_table: Int[Array, "B n"] | None = dataclasses.field(default=None, metadata=_dims("b"))
    joined_kv: bool = dataclasses.field(default=False, metadata=_STATIC | {"argument": "keys and values in one array"})

    @classmethod
    def array_fields(cls) -> list[dataclasses.Field]:
        return [field for field in dataclasses.fields(cls) if not field.metadata.get("static")]

    @classmethod
    def optional(cls) -> frozenset[str]:
        """What `HONOURS` of a backend may name."""
        fields = {f.name for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}
        return frozenset(fields | {"symbolic_batch", "bitmaps", "delta_parts"})

    def uses(self) -> dict[str, str]:
        """The optional fields that this call uses, and their public names; also "symbolic_batch" of `jax.export`, and
        "bitmaps" of the mask.
        """
        used = {} if isinstance(self.batch, int) else {"symbolic_batch": "a symbolic batch size"}
        if self.mask.bitmaps is not None:
            used["bitmaps"] = "a mask with bitmaps (which elements of a block attend)"
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            neutral = value is field.default or (field.metadata.get("static") and value == field.default)
            asked_for = field.default is not dataclasses.MISSING and "permission" not in field.metadata
            if asked_for and not neutral:
                used[field.name] = field.metadata.get("argument", field.name)
        if "sink_lse" in used and self.mask.traced and not self.mask.complete:
            used["sink_lse"] = "a mask that is built under jit and may overflow (`sink_lse` says in which heads)"
        return used

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def q_len(self) -> int:
        return self.query.shape[1]

    @property
    def kv_len(self) -> int:
        return self.key.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])

    @property
    def kv_reach(self) -> int:
        """The mask's rule lets queries attend to the first `kv_reach` keys only: lists name no block past these."""
        right = self.mask.band.right
        return self.kv_len if right is None else min(self.kv_len, self.q_len + right)

    @property
    def page(self) -> int | None:
        """Tokens per page, where keys and values lie in pages."""
        return None if self.page_table is None else self.key.shape[1]

    @property
    def q_heads(self) -> int:
        return self.query.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.key.shape[2] // (2 if self.joined_kv else 1)

    def stored_head(self, kv_head: Any, *, value: bool) -> Any:
        """The head of `key`, or of `value`, that holds K/V head `kv_head`."""
        return stored_head(kv_head, joined_kv=self.joined_kv, value=value)

    @property
    def head_dim(self) -> int:
        return self.query.shape[3]

    @property
    def value_dim(self) -> int:
        return self.value.shape[3]

    @property
    def full_is_exact(self) -> bool:
        """Whether full blocks need no element test, since the call excludes nothing that the mask's rule allows."""
        by_index = self.q_segments is None and self.q_positions is None and self.mask.band.implies(self.band)
        return self.full_is_known or by_index


@runtime_checkable
class Backend(Protocol):
    """The names of a backend module.

    `Config` is a frozen keyword-only dataclass with one field per direction that is tuned by itself (forward, dq, dkv,
    backward or fused). Each field holds such a dataclass too. Both validate themselves. Where one direction's kernel
    replaces others, `Config.running(direction)` is the configuration in which that direction's kernel runs.

    `HONOURS` names the optional fields of `Call` that the backend honours, "symbolic_batch" if the batch may be a
    dimension variable of `jax.export`, "bitmaps" if the mask may have them, and "delta_parts" if `backward` takes
    `DeltaParts`. The registry refuses a call that uses another field, so that a field added to `Call` later is never
    ignored.

    A backend of another package may also have `CONTRACT`, the version of `xsake.backend` that it is written for, and
    `PLATFORM`, "gpu" or "tpu" where its kernels run nowhere else unless they are interpreted.
    """

    Config: type
    HONOURS: frozenset[str]

    def unavailable(self) -> str | None:
        """Why this backend cannot run in this process, or None."""

    def unsupported(self, call: Call) -> str | None:
        """Why this backend cannot serve such shapes or dtypes, naming the argument, or None.

        The call uses no optional field that is not in `HONOURS`.
        """

    def default_blocks(self, q_len: int, kv_len: int, head_dim: int) -> tuple[int, int]:
        """(block_q, block_kv) of the mask that is made when the caller gives none."""

    def default_config(self, call: Call) -> Any:
        """A configuration that always works, from shapes alone."""

    def search_space(self, call: Call) -> Sequence[Any]:
        """Configurations worth measuring, the default among them; configurations that cannot fit are left out.

        Directions may be varied one at a time: a tuner collects each direction's values and tunes that direction alone.
        """

    def misfit(self, call: Call, config: Any) -> str | None:
        """Why a configuration that was made for another call cannot serve this call, or None."""

    def forward(self, call: Call, config: Any) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
        """Output, in the query's dtype or a wider one, and natural-log lse (float32, sink included)."""

    def backward(
        self,
        call: Call,
        config: Any,
        lse: Float[Array, "B H T"],
        delta: Float[Array, "B H T"] | DeltaParts,
        d_out: Float[Array, "B T H Dv"],
        *,
        with_bias: bool,
    ) -> tuple[Array, Array, Array, Array | None]:
        """Gradients of query, key, value and, if `with_bias`, bias. `delta` is rowsum(d_out * out) - d_lse, and 0 for a
        row that attends nothing; `DeltaParts` lack this 0, which their `of_live_rows` puts in.

        If the gradient of the bias is None, the operation computes that gradient by the XLA backend.
        """
