"""The implementations that the contract is tested on. A new backend is one line of TARGETS."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from xsake.testing.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried(Target):
    """A target of this project's own tests.

    `configs(case)` gives two different configurations for a case; in the second, forward and backward tiles differ. A
    `partial` implementation does not honour every argument: the suite skips the calls that it refuses, and names the
    reason.
    """

    configs: Callable[[Any], tuple[Any, Any]]
    partial: bool = False
    fused: bool = False  # Hopper's fused backward, however short the sequences are
    marks: tuple = dataclasses.field(default=(), compare=False)

    def context(self) -> contextlib.AbstractContextManager:
        if not self.fused:
            return super().context()
        from xsake.kernels_pallas_gpu.hopper.fused import plan

        return mock.patch.object(plan, "WORTH_FUSING", 0)


def _xla_configs(case: Any) -> tuple[Any, Any]:
    from xsake.kernels_xla_ref import Config, Tiling

    block_q, block_kv = case.block_q, case.block_kv
    one = Tiling(q=block_q, kv=block_kv, chunk=3)
    return (
        Config(forward=one, backward=one),
        Config(
            forward=Tiling(q=block_q // 2, kv=block_kv, chunk=5), backward=Tiling(q=block_q, kv=block_kv // 4, chunk=2)
        ),
    )


def _triton_configs(case: Any) -> tuple[Any, Any]:
    from xsake.kernels_pallas_gpu.triton.backend import Config
    from xsake.kernels_pallas_gpu.triton.tiles import Tiling

    def tiling(q: int, kv: int, stages: int) -> Tiling:
        return Tiling(q=q & -q, kv=kv & -kv, num_warps=4, num_stages=stages)

    block_q, block_kv = case.block_q, case.block_kv
    one = tiling(block_q, block_kv, 2)
    return (
        Config(forward=one, dq=one, dkv=one),
        Config(forward=tiling(16, block_kv, 1), dq=tiling(block_q, 16, 2), dkv=tiling(16, 16, 3)),
    )


def _raw_triton_configs(case: Any) -> tuple[Any, Any]:
    from xsake.kernels_raw_triton import Config, Tiling

    kv = min(128, case.block_kv & -case.block_kv)
    one = Tiling(rows=32, kv=kv, num_warps=4, num_stages=2)
    small = Tiling(rows=16, kv=kv, num_warps=4, num_stages=1)
    return (
        Config(forward=one, dq=one, dkv=one),
        Config(forward=small, dq=Tiling(rows=64, kv=16, num_warps=4, num_stages=2), dkv=small),
    )


def _mosaic_configs(case: Any) -> tuple[Any, Any]:
    from xsake.kernels_pallas_gpu.hopper.backend import BackwardConfig, Config, ForwardConfig
    from xsake.kernels_pallas_gpu.hopper.fused.plan import FusedConfig

    fused = case.query.shape[-1] == 128 and case.block_kv % 128 == 0
    return (
        Config(
            forward=ForwardConfig(tile_kv=64, q_stages=1),
            dq=BackwardConfig(),
            dkv=BackwardConfig(),
            fused=FusedConfig(use=fused, early=2, parts=3),
        ),
        Config(
            forward=ForwardConfig(tile_kv=64, stages=3, q_stages=1),
            dq=BackwardConfig(stages=3, inner_stages=2),
            dkv=BackwardConfig(compute_wgs=1),
            fused=FusedConfig(use=fused, q_stages=3),
        ),
    )


def _tpu_configs(case: Any) -> tuple[Any, Any]:
    from xsake.kernels_pallas_tpu import Config, Tiling

    block_q = case.block_q
    entry = max(128, case.block_kv) if "bias" in case.arguments else case.block_kv  # a bias has keys on the lanes
    lanes = max(1, 128 // entry)

    def forward(own: int, wide: int) -> Tiling:
        return Tiling(own=own, entry=entry, wide=wide * lanes, narrow=lanes, compute=512)

    def dkv(wide: int) -> Tiling:
        return Tiling(own=128, entry=128, wide=wide, narrow=1, compute=128)

    dq = Tiling(own=128, entry=entry, wide=lanes, narrow=lanes, compute=128)
    return (
        Config(forward=forward(block_q, 1), dq=dq, dkv=dkv(1)),
        Config(forward=forward(block_q // 2, 2), dq=dq, dkv=dkv(2)),
    )


HALVES = ("bfloat16", "float16")
GPU = (pytest.mark.gpu,)
TRITON_INTERPRETER = (
    pytest.mark.interpret,
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton interprets with TRITON_INTERPRET=1"),
)

_HOPPER: dict[str, Any] = dict(configs=_mosaic_configs, dtypes=HALVES, unit=4, marks=GPU)

TARGETS = [
    Tried("xla", configs=_xla_configs),
    Tried("mosaic_gpu", configs=_mosaic_configs, dtypes=HALVES, unit=4, head_dim=64, value_dim=128, marks=GPU),
    Tried(
        "mosaic_gpu", configs=_mosaic_configs, dtypes=HALVES, unit=4, head_dim=128, value_dim=64, fused=True, marks=GPU
    ),
    Tried("raw_triton", configs=_raw_triton_configs, partial=True, marks=GPU),
    Tried("raw_triton", configs=_raw_triton_configs, interpret=True, partial=True, marks=TRITON_INTERPRETER),
    Tried("triton", configs=_triton_configs, marks=GPU),
    Tried("triton", configs=_triton_configs, interpret=True, marks=(pytest.mark.interpret,)),
    Tried("mosaic_tpu", configs=_tpu_configs, marks=(pytest.mark.tpu,)),
    Tried("mosaic_tpu", configs=_tpu_configs, interpret=True, marks=(pytest.mark.interpret, pytest.mark.slow)),
]
XLA, HOPPER = TARGETS[:2]
# Small cases are interpreted, race detection on; the suite runs on hardware.
HOPPER_INTERPRETED = dataclasses.replace(HOPPER, interpret=True, value_dim=64, marks=())


# Tests of what the operation wraps around a backend, which is the same for every backend: CI runs them on XLA, and
# `make slow` on interpreted backends too.
OF_THE_OPERATION = {
    "test_checkpoint",
    "test_checkpointed_scan_over_layers",
    "test_grad_of_vmap_sums_over_what_is_shared",
    "test_debug_infs_and_nans_without_jit",
    "test_gradient_of_lse_alone_and_of_one_input",
    "test_inference_mask_serves_forward_and_refuses_gradients",
    "test_mask_built_inside_jit",
    "test_nan_cotangents_of_the_lse_of_padding_do_not_leak",
    "test_nested_vmap",
    "test_new_mask_contents_do_not_retrace",
    "test_scan_over_examples",
    "test_tracing_transfers_nothing_unasked",
    "test_vmap_over_tokens_and_batches",
    "test_without_jit",
}
# Other tests of CI reach the same code of an interpreted kernel.
REACHED_BY_OTHERS = {
    "test_a_bias_of_keys_that_no_query_attends_changes_nothing",
    "test_a_bias_of_elements_that_do_not_attend_changes_nothing",
    "test_a_large_bias_broadcast_over_queries_reaches_no_row_of_padding",
    "test_any_mask",
    "test_any_mask_lengths_segments_and_positions",
    "test_arguments",
    "test_backends_take_the_rule_of_a_chunk",
    "test_bias_broadcasts",
    "test_chunk_of_a_cache",
    "test_decode_one_token",
    "test_empty_by_rule_not_by_list",
    "test_empty_rows_give_zero_and_minus_infinity",
    "test_empty_rows_with_sinks_give_their_logsumexp",
    "test_everything_at_once",
    "test_float32_logits_of_half_precision_inputs_do_not_overflow",
    "test_half_precision",
    "test_heads",
    "test_indices_out_of_range_under_jit_give_nan",
    "test_large_logits_do_not_overflow",
    "test_length_zero",
    "test_lengths",
    "test_lengths_of_queries_and_keys",
    "test_nan_stays_in_its_batch_entry_and_heads",
    "test_nothing_attends_at_all",
    "test_orders_may_be_left_out",
    "test_overflow_under_jit_gives_nan",
    "test_overflow_of_a_mask_built_under_jit_and_used_outside",
    "test_positions",
    "test_positions_with_the_mask_s_own_rule",
    "test_predecessor_a_mask_reaches_every_head",
    "test_predecessor_all_padding",
    "test_predecessor_empty_rows_are_zero",
    "test_predecessor_key_gradient_and_last_block_s_causality",
    "test_predecessor_positions_not_index_causal",
    "test_predecessor_any_blocks_per_head",
    "test_predecessor_forward_tiles_differ_from_backward_tiles",
    "test_predecessor_no_dense_fallback_is_needed",
    "test_predecessor_padding_queries_do_not_attend_padding_keys",
    "test_predecessor_sinks_counted_once",
    "test_predecessor_soft_cap_jacobian",
    "test_predecessor_unaligned_window",
    "test_predecessor_window_follows_positions",
    "test_segment_ids",
    "test_segment_ids_may_be_any_integers",
    "test_tail_padding_holds_no_values",
    "test_two_backward_runs_give_the_same_bits",
    "test_vmap_of_grad",
}
# test_any_mask and test_any_mask_lengths_segments_and_positions draw such calls for XLA; for the kernels they do so in
# `make slow` alone.
DRAWN_FOR_XLA = {
    "test_predecessor_a_mask_reaches_every_head",
    "test_predecessor_any_blocks_per_head",
    "test_predecessor_empty_rows_are_zero",
    "test_predecessor_no_dense_fallback_is_needed",
    "test_predecessor_padding_queries_do_not_attend_padding_keys",
    "test_predecessor_positions_not_index_causal",
    "test_predecessor_sinks_counted_once",
    "test_predecessor_unaligned_window",  # test_rules has windows to the right
    "test_segment_ids_may_be_any_integers",
}


# XLA tests every element of a block alike, so that one test with many arguments reaches what these reach.
JOINED_FOR_XLA = {
    "test_masks",  # test_bias_broadcasts has a mask per batch and K/V head
    "test_positions_with_the_mask_s_own_rule",  # test_everything_at_once has positions and a window of the mask
}


def parameters(test: str) -> list:
    kinds = {"-interpret": "interpret", "-fused": "fused"}

    def parameter(target: Tried) -> Any:
        name = target.name + "".join(end for end, kind in kinds.items() if getattr(target, kind))
        elsewhere = OF_THE_OPERATION | REACHED_BY_OTHERS if target.interpret else DRAWN_FOR_XLA | JOINED_FOR_XLA
        of_ci = target.interpret or target.name == "xla"
        slow = (pytest.mark.slow,) if of_ci and test in elsewhere else ()
        return pytest.param(target, id=name, marks=(*target.marks, *slow))

    return [parameter(target) for target in TARGETS]
