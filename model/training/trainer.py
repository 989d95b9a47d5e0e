"""A model in training: it takes steps, evaluates, recalibrates its masks, and can be saved and restored."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from xsake import BlockMask
from xsake._sequence.exchange import EXCHANGES
from xsake.model.data.batches import Batches
from xsake.model.data.shards import Shard, open_shards
from xsake.model.network.attend import MaskFn
from xsake.model.network.sequence_cut import choose_order
from xsake.model.network.sharding import make_mesh
from xsake.model.network.transformer import Transformer
from xsake.model.training.attention import FixedMask, attention_of, check_cudnn, hads_recalibration
from xsake.model.training.checkpoints import Checkpoints
from xsake.model.training.config import TrainConfig
from xsake.model.training.step import Program, TrainState
from xsake.model.training.watch.mfu import utilisation

Recalibrate = Callable[[int, Transformer, Array], MaskFn]
_program = lru_cache(maxsize=16)(Program)  # a second run of a configuration in one process compiles nothing


class Trainer:
    """The part of a training run that computes. `xsake.model.train` explains the arguments.

    A state must be there before the first step: `begin()` makes a new one, `restore()` takes one from a checkpoint.
    """

    state: TrainState
    taken: int  # steps

    def __init__(
        self,
        config: TrainConfig,
        *,
        data: Path,
        mesh: tuple[int, ...] = (1, 1, 1),
        fsdp: bool = False,
        exchange: str = "auto",
        order: str | None = None,
        recalibrate: Recalibrate | None = None,
    ):
        attention_fn, self.mask_fn, self.density = attention_of(config)
        if config.attention == "hads" and recalibrate is None:
            recalibrate = hads_recalibration(config)
        if config.attention == "cudnn":
            check_cudnn(config)
        self.config, self._recalibrate = config, recalibrate
        if len(mesh) not in (2, 3):
            raise ValueError(f"{mesh=} must be (data, model) or (data, model, sequence)")
        devices = make_mesh(*mesh)
        sizes = devices.shape
        if config.batch // config.microbatches % sizes["data"]:
            raise ValueError(
                f"batch={config.batch} in microbatches={config.microbatches} cannot be divided over the mesh's "
                f"data={sizes['data']}"
            )
        if config.model.kv_heads % sizes["model"]:
            raise ValueError(
                f"kv_heads={config.model.kv_heads} cannot be divided over the mesh's model={sizes['model']}"
            )
        order = self._check_cut(sizes["sequence"], exchange, order)
        capacity = None
        if isinstance(self.mask_fn, FixedMask) and isinstance(self.mask_fn.mask, BlockMask) and sizes["sequence"] > 1:
            cut = self.mask_fn.mask.shard_rows(sizes["sequence"], order=order)  # once, not in every step
            capacity = max(1, cut.most_to_send(config.model.kv_heads)) if exchange == "sparse" else None
            self.mask_fn = FixedMask(cut)
        self.program = _program(
            config=config,
            mesh=devices,
            attention_fn=attention_fn,
            fsdp=fsdp,
            order=order,
            exchange=exchange,
            capacity=capacity,
        )
        self._data = data
        shards = open_shards(data, "train")
        _check_vocabulary(shards, config)
        self._batches = Batches(shards, length=config.length, batch=config.batch, seed=config.seed)
        #: Identifies the run: a checkpoint of another description is refused.
        self.description: dict[str, Any] = {
            "config": config.to_json(),
            "data": {"tokenizer": shards[0].tokenizer, "tokens": sum(len(shard.tokens) for shard in shards)},
        }

    def _check_cut(self, shards: int, exchange: str, order: str | None) -> str:
        """The order of tokens on `shards` devices; ValueError if the configuration cannot be cut so."""
        config = self.config
        if exchange not in ("auto", *EXCHANGES):
            raise ValueError(f"{exchange=} must be one of {', '.join(map(repr, ('auto', *EXCHANGES)))}")
        if config.attention == "cudnn" and shards > 1:
            raise ValueError(
                f'attention="cudnn" cannot attend over the mesh\'s sequence={shards}: use attention="dense"'
            )
        if exchange == "sparse" and self.recalibrates and shards > 1:
            raise ValueError(
                'exchange="sparse" needs masks that are known before the first step, and recalibration changes them: '
                'use exchange="gather" or "ring"'
            )
        block = None if config.attention == "dense" else config.block
        return choose_order(order, length=config.length, shards=shards, block=block)

    @property
    def recalibrates(self) -> bool:
        return self._recalibrate is not None

    def begin(self) -> None:
        self.state, self.taken = self.program.init(), 0
        self.recalibrate()

    def restore(self, checkpoints: Checkpoints, step: int) -> None:
        """Resume the run from a checkpoint, on this mesh, whatever mesh the checkpoint was saved from."""
        self.state, self.taken = checkpoints.restore(step, "state", self.program.abstract_state()), step
        if self.recalibrate() and jax.tree.leaves(self.mask_fn):
            # The callback gives the structure of mask_fn, the checkpoint the arrays in it.
            everywhere = NamedSharding(self.program.mesh, PartitionSpec())
            leaves = checkpoints.restore_leaves(step, "mask", everywhere)
            self.mask_fn = jax.tree.unflatten(jax.tree.structure(self.mask_fn), leaves)

    def save(self, checkpoints: Checkpoints) -> None:
        trees: dict[str, Any] = {"state": self.state}
        if self._recalibrate is not None and jax.tree.leaves(self.mask_fn):
            trees["mask"] = jax.tree.leaves(self.mask_fn)
        checkpoints.save(self.taken, trees, self.description)

    def step(self) -> dict[str, Array]:
        """Start the next step and return its metrics, which are still being computed."""
        self.state, metrics = self.program.step(self.state, self.mask_fn, self._next_batch())
        self.taken += 1
        return metrics

    def recalibrate(self) -> bool:
        """Ask the callback, if there is one, for the masks of the steps to come."""
        if self._recalibrate is None:
            return False
        tokens = self._next_batch()[0, :, :-1]
        mask_fn = self._recalibrate(self.taken, self.program.model(self.state.params), tokens)
        is_tree = not jax.tree_util.all_leaves([mask_fn])
        self.mask_fn = mask_fn if is_tree else jax.tree_util.Partial(mask_fn)
        return True

    def densities(self) -> list[list[float]] | None:
        """By layer and head, the share of the allowed blocks that attention keeps on the next batch; None if dense."""
        if self.mask_fn is None:
            return None
        if isinstance(self.mask_fn, FixedMask):  # the same for every layer: nothing needs to be computed
            shares = np.asarray(self.mask_fn.mask.density(per_head=True)).mean(0)
            heads = np.repeat(shares, self.config.model.q_heads // len(shares)).tolist()
            return [heads] * self.config.model.layers
        tokens = self._next_batch()[0, :, :-1]
        return jax.device_get(self.program.densities(self.state.params, self.mask_fn, tokens)).tolist()

    def held_out(self) -> Batches:
        """The held-out batches, in order, smaller than those of training where there is little text.

        ValueError if there are too few tokens for one batch that the mesh and the microbatches can divide.
        """
        shards, config = open_shards(self._data, "held"), self.config
        _check_vocabulary(shards, config)
        least = config.microbatches * self.program.mesh.shape["data"]
        most = least * Batches(shards, length=config.length, batch=least, seed=None).per_epoch
        return Batches(shards, length=config.length, batch=min(config.batch, most), seed=None)

    def evaluate(self, held: Batches, batches: int) -> float:
        """Mean loss over the first `batches` batches of `held`."""
        losses = [
            self.program.evaluate(self.state.params, self.mask_fn, self._place(held, number))
            for number in range(min(batches, held.per_epoch))
        ]
        return sum(float(loss) for loss in losses) / len(losses)

    def speed(self, seconds: float) -> dict[str, float | None]:
        """Tokens per second and utilisation of a step that took `seconds`."""
        rate = self.config.tokens_per_step / seconds
        device = self.program.mesh.devices.flat[0]
        flops = self.config.model.flops_per_token(self.config.length, self.density)
        mfu = utilisation(flops, rate, device.device_kind, self.program.mesh.size)
        return {"seconds": seconds, "tokens_per_second": rate, "mfu": mfu}

    def _next_batch(self) -> Array:
        return self._place(self._batches, self.taken)

    def _place(self, batches: Batches, number: int) -> Array:
        return batches.on_devices(number, self.program.batch_sharding, self.config.microbatches)


def _check_vocabulary(shards: list[Shard], config: TrainConfig) -> None:
    if shards[0].vocab_size > config.model.vocab_size:
        found, has = shards[0].vocab_size, config.model.vocab_size
        raise ValueError(
            f"{shards[0].path.parent} has a vocabulary of {found} tokens, which does not fit the model's "
            f"vocab_size={has}: give the model vocab_size={found}, or build the data with --vocab {has}"
        )
