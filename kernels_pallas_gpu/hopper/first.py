"""The forward to read first: block-sparse attention for Hopper in one closure. Tests run it; no call gets it.

    out[t, h] = sum over s of softmax_s(scale * q[t, h] . k[s, h]) v[s, h],   s in the blocks that the mask lists for t
    lse[h, t] = log(sum over s of exp(scale * q[t, h] . k[s, h]))

A CTA computes one query block of one head with two warpgroups. The memory warpgroup walks the row of the block list and
copies the keys and values of each block into a ring of slots in shared memory. The compute warpgroup follows: it
multiplies by the keys of a slot, weighs them by an online softmax, adds the weighted values, and frees the slot.
docs/write_a_kernel.md walks through this file, and from here to `hopper/forward/`.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.hads.mask.block_mask import BlockMask

ROWS = 64  # queries of a CTA: a warpgroup multiplies 64 rows at a time
STAGES = 2  # slots of the ring: one block is copied while the block before it is computed
LOG2E = math.log2(math.e)
# The running maximum begins here and not at -inf: a row that has no element yet would compute -inf - -inf.
LOWEST = -1e38


class Scratch(NamedTuple):
    """Shared memory of a CTA."""

    q: Any  # [ROWS, D]
    k: Any  # [STAGES, block_kv, D], the ring
    v: Any
    out: Any  # [ROWS, D]
    lse: Any  # f32[ROWS]


class Barriers(NamedTuple):
    """`ready`: both copies into a slot have landed. `free`: nobody reads the slot any more."""

    q_ready: Any
    ready: Any  # one per slot
    free: Any  # one per slot


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: BlockMask, *, scale: float, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, H, D] in q's dtype, lse f32[B, H, T]) of q [B, T, H, D] and of k and v [B, S, K, D].

    A query that attends nothing gets out 0 and lse -inf. `interpret`: False, or `plgpu.InterpretGPUParams()`.
    """
    batch_size, q_len, q_heads, head_dim = q.shape
    _, kv_len, kv_heads, _ = k.shape
    block_kv, dtype = mask.block_kv, q.dtype
    list_batch, list_heads, _ = mask.kv_indices.shape
    assert k.shape == v.shape == (batch_size, kv_len, kv_heads, head_dim) and q_heads % kv_heads == 0
    assert q.dtype == k.dtype == v.dtype and dtype in (jnp.bfloat16, jnp.float16) and head_dim in (64, 128)
    assert (mask.q_len, mask.kv_len) == (q_len, kv_len) and mask.block_q == ROWS and block_kv in (64, 128)
    assert list_batch in (1, batch_size) and list_heads in (1, kv_heads, q_heads)
    assert mask.local_window_size is None and mask.bitmaps is None

    product = functools.partial(multiply_add, interpret=bool(interpret))

    def kernel(q_ref, k_ref, v_ref, indices, row_ptr, num_full, out_ref, lse_ref, *, smem: Scratch, barriers: Barriers):
        head, row, batch = (lax.axis_index(name) for name in ("head", "row", "batch"))
        kv_head = lax.div(head, jnp.int32(q_heads // kv_heads))
        queries = pl.ds(row * ROWS, ROWS)
        # The row's list is indices[begin : begin + steps]: its full blocks, then those with elements to test.
        listed = batch if list_batch > 1 else 0, lax.div(head, jnp.int32(q_heads // list_heads))
        begin = row_ptr[(*listed, row)]
        steps = row_ptr[(*listed, row + 1)] - begin
        full_steps = num_full[(*listed, row)]

        @pl.when(lax.axis_index("wg") == 0)
        def _memory_warpgroup():
            plgpu.copy_gmem_to_smem(q_ref.at[batch, queries, head], smem.q, barriers.q_ready)

            @pl.loop(0, steps)
            def _load(step):
                slot = lax.rem(step, jnp.int32(STAGES))
                plgpu.barrier_wait(barriers.free.at[slot])
                keys = pl.ds(indices[(*listed, begin + step)] * block_kv, block_kv)
                plgpu.copy_gmem_to_smem(k_ref.at[batch, keys, kv_head], smem.k.at[slot], barriers.ready.at[slot])
                plgpu.copy_gmem_to_smem(v_ref.at[batch, keys, kv_head], smem.v.at[slot], barriers.ready.at[slot])

            for slot in range(STAGES):  # no barrier may be left that completed and was not waited for
                plgpu.barrier_wait(barriers.free.at[slot])

        @pl.when(lax.axis_index("wg") == 1)
        def _compute_warpgroup():
            for slot in range(STAGES):  # all slots begin free
                plgpu.barrier_arrive(barriers.free.at[slot])
            plgpu.barrier_wait(barriers.q_ready)

            def attend(step, sums, *, partial):
                """The sums with one block of keys more; `partial`: some of its elements may not attend."""
                acc, maximum, total = sums
                slot = lax.rem(step, jnp.int32(STAGES))
                plgpu.barrier_wait(barriers.ready.at[slot])

                # QK
                logits = product(tile((ROWS, block_kv), 0.0), smem.q, smem.k.at[slot], transpose_b=True)
                logits *= scale * LOG2E  # in powers of two: the GPU has an instruction for exp2
                if partial:
                    first_key = indices[(*listed, begin + step)] * block_kv
                    query, key = (
                        plgpu.broadcasted_iota(jnp.int32, logits.shape, axis, layout=plgpu.Layout.WGMMA) + first
                        for axis, first in enumerate((row * ROWS, first_key))
                    )
                    attends = key < kv_len
                    if mask.is_causal:
                        attends &= key <= query
                    logits = jnp.where(attends, logits, -jnp.inf)

                # Softmax
                new_maximum = jnp.maximum(maximum, logits.max(axis=1))
                weights = jnp.exp2(logits - per_row(new_maximum, logits.shape))
                shrink = jnp.exp2(maximum - new_maximum)
                total = total * shrink + weights.sum(axis=1)
                acc *= per_row(shrink, acc.shape)

                # PV
                acc = product(acc, weights.astype(dtype), smem.v.at[slot])
                plgpu.barrier_arrive(barriers.free.at[slot])
                return acc, new_maximum, total

            sums = tile((ROWS, head_dim), 0.0), tile((ROWS,), LOWEST), tile((ROWS,), 0.0)
            sums = lax.fori_loop(0, full_steps, functools.partial(attend, partial=False), sums)
            acc, maximum, total = lax.fori_loop(full_steps, steps, functools.partial(attend, partial=True), sums)

            # Output
            nothing = total == 0.0
            inverse = jnp.where(nothing, 0.0, 1.0 / total)
            smem.out[...] = (acc * per_row(inverse, acc.shape)).astype(dtype)
            smem.lse[...] = jnp.where(nothing, -jnp.inf, maximum / LOG2E + jnp.log(total))
            plgpu.commit_smem()  # what was stored is visible to the copies that follow
            plgpu.copy_smem_to_gmem(smem.out, out_ref.at[batch, queries, head])
            plgpu.copy_smem_to_gmem(smem.lse, lse_ref.at[batch, head, queries])
            plgpu.wait_smem_to_gmem(0)

    def entry(*refs):
        smem, barriers = shared_memory(block_kv, head_dim, dtype)
        pl.run_scoped(functools.partial(kernel, *refs), smem=smem, barriers=barriers, collective_axes="wg")

    # Whole blocks, so that no copy leaves its array: keys past the end are tested for, queries past the end cut off.
    num_rows = pl.cdiv(q_len, ROWS)
    q, k, v = (pad(x, block) for x, block in ((q, ROWS), (k, block_kv), (v, block_kv)))
    out, lse = plgpu.kernel(
        entry,
        out_type=(q, jax.ShapeDtypeStruct((batch_size, q_heads, num_rows * ROWS), jnp.float32)),
        grid=(q_heads, num_rows, batch_size),
        grid_names=("head", "row", "batch"),
        num_threads=2,
        thread_name="wg",
        kernel_name="first_forward",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret or None,
    )(q, k, v, mask.kv_indices, mask.kv_row_ptr, mask.kv_num_full)
    return out[:, :q_len], lse[:, :, :q_len]


def multiply_add(acc: Any, a: Any, b: Any, *, transpose_b: bool = False, interpret: bool) -> jax.Array:
    """acc + a @ b on the tensor core: `a` in registers or shared memory, `b` in shared memory."""
    if not interpret:
        b = b.transpose((1, 0)) if transpose_b else b
        return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))
    a, b = (x if isinstance(x, jax.Array) else x[...] for x in (a, b))
    plgpu.commit_smem()  # these plain loads come before the next copy into the slot; wgmma has no need of this
    return acc + jnp.dot(a, b.T if transpose_b else b, preferred_element_type=jnp.float32)


def shared_memory(block_kv: int, head_dim: int, dtype: Any) -> tuple[Scratch, Barriers]:
    smem = Scratch(
        q=swizzled((ROWS, head_dim), dtype),
        k=swizzled((STAGES, block_kv, head_dim), dtype),
        v=swizzled((STAGES, block_kv, head_dim), dtype),
        out=swizzled((ROWS, head_dim), dtype),
        lse=plgpu.SMEM((ROWS,), jnp.float32),
    )
    barriers = Barriers(
        q_ready=plgpu.Barrier(),
        ready=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        free=plgpu.Barrier(num_barriers=STAGES),
    )
    return smem, barriers


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for tiles [..., rows, columns] in the order of bytes in which wgmma reads them."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def tile(shape: tuple[int, ...], value: float) -> jax.Array:
    """A constant in registers, laid out as wgmma's accumulator [rows, columns] or as a vector along its rows."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def per_row(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [0])


def pad(x: jax.Array, block: int) -> jax.Array:
    return jnp.pad(x, [(0, -n % block if axis == 1 else 0) for axis, n in enumerate(x.shape)])
