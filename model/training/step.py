"""One training step as a compiled program: loss, gradients, update; and its state, placed on a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xsake.model.network.attend import MaskFn
from xsake.model.network.sequence_cut import SequenceCut
from xsake.model.network.sharding import BATCH, parameter_shardings
from xsake.model.network.transformer import Transformer
from xsake.model.training.config import TrainConfig
from xsake.model.training.loss import next_token_loss
from xsake.model.training.optimizer import learning_rate, make_optimizer


@partial(jax.tree_util.register_dataclass, data_fields=("step", "params", "optimizer"), meta_fields=())
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that changes from step to step: steps taken, float32 weights by name, and the optimiser's state."""

    step: Any
    params: Any
    optimizer: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """The compiled functions of one configuration on one mesh: initial state, step and evaluation."""

    config: TrainConfig
    mesh: Mesh
    attention_fn: Callable[..., Any]
    fsdp: bool = False
    order: str = "contiguous"
    exchange: str = "auto"
    capacity: int | None = None

    @cached_property
    def _abstract(self) -> tuple[Any, Any]:
        return nnx.split(nnx.eval_shape(self._new_model, self._key), nnx.Param)

    @property
    def _key(self) -> Array:
        return jax.random.key(self.config.seed)

    def _new_model(self, key: Array) -> Transformer:
        return Transformer(
            self.config.model,
            rngs=nnx.Rngs(key),
            dtype=jnp.dtype(self.config.dtype),
            attention_fn=self.attention_fn,
        )

    def model(self, params: Any) -> Transformer:
        """The module with these weights."""
        definition, names = self._abstract
        state = jax.tree.map(lambda x: x, names)  # a copy: replacing writes into it
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(definition, state)

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return make_optimizer(self.config)

    @cached_property
    def state_shardings(self) -> TrainState:
        params = nnx.to_pure_dict(self._abstract[1])
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        placed = parameter_shardings(params, self.mesh, fsdp=self.fsdp)
        optimizer = optax.tree_utils.tree_map_params(
            self.optimizer,
            lambda _, where: where,
            jax.eval_shape(self.optimizer.init, params),
            placed,
            transform_non_params=lambda _: everywhere,
        )
        return TrainState(step=everywhere, params=placed, optimizer=optimizer)

    @cached_property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, BATCH)

    def _init(self, key: Array) -> TrainState:
        params = nnx.to_pure_dict(nnx.state(self._new_model(key), nnx.Param))
        return TrainState(step=jnp.int32(0), params=params, optimizer=self.optimizer.init(params))

    def init(self) -> TrainState:
        """The state before the first step; its numbers do not depend on the mesh."""
        # The key is an argument: with a constant key, XLA would compute all weights while compiling, for minutes.
        return jax.jit(self._init, out_shardings=self.state_shardings)(self._key)

    def abstract_state(self) -> TrainState:
        """Shapes, types and places of the state, without its numbers."""

        def place(leaf: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        return jax.tree.map(place, jax.eval_shape(self._init, self._key), self.state_shardings)

    def _loss(self, params: Any, mask_fn: MaskFn | None, tokens: Array) -> Array:
        """Mean loss over tokens [B, T + 1], each predicted from the tokens before it."""
        model, cut = self.model(params), SequenceCut.of(self.mesh, self.order, self.exchange)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if cut is not None:
            inputs, targets = cut.lay(inputs), cut.lay(targets)
        states = model.hidden(
            inputs,
            mask_fn=mask_fn,
            mesh=self.mesh if self.mesh.size > 1 else None,
            order=self.order,
            exchange=self.exchange,
            capacity=self.capacity,
            remat=self.config.remat,
        )
        if cut is not None:
            states, targets = cut.rows(states), cut.rows(targets)
        chunk = self.config.loss_chunk * self.mesh.shape["data"] * self.mesh.shape["sequence"]
        return next_token_loss(states, model.output_weight, targets, chunk)

    def _gradients(self, params: Any, mask_fn: MaskFn | None, batch: Array) -> tuple[Array, Any]:
        """Mean loss and gradients over the microbatches [m, B / m, T + 1]."""
        gradients_of = jax.value_and_grad(self._loss)
        if len(batch) == 1:
            return gradients_of(params, mask_fn, batch[0])

        def add(total: Any, tokens: Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradients_of(params, mask_fn, tokens)), None

        zero = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
        total, _ = jax.lax.scan(add, zero, batch)
        return jax.tree.map(lambda x: x / len(batch), total)

    @cached_property
    def step(self) -> Any:
        """(state, mask_fn, batch) -> (state, metrics), compiled; the old state is donated."""

        def train_step(state: TrainState, mask_fn: MaskFn | None, batch: Array) -> tuple[TrainState, dict[str, Array]]:
            loss, gradients = self._gradients(state.params, mask_fn, batch)
            with jax.numpy_dtype_promotion("standard"):  # optax multiplies its int32 counter with floats
                updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.params)
                rate = jnp.asarray(learning_rate(self.config)(state.step), jnp.float32)
            params = optax.apply_updates(state.params, updates)
            norm = optax.tree_utils.tree_norm(gradients)
            metrics = {"loss": loss, "gradient_norm": norm, "learning_rate": rate}
            return TrainState(step=state.step + 1, params=params, optimizer=optimizer), metrics

        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(train_step, donate_argnums=0, out_shardings=(self.state_shardings, everywhere))

    @cached_property
    def evaluate(self) -> Any:
        """(params, mask_fn, batch) -> mean loss, compiled."""

        def evaluate_step(params: Any, mask_fn: MaskFn | None, batch: Array) -> Array:
            return jax.lax.map(lambda tokens: self._loss(params, mask_fn, tokens), batch).mean()

        return jax.jit(evaluate_step, out_shardings=NamedSharding(self.mesh, PartitionSpec()))

    @cached_property
    def densities(self) -> Any:
        """(params, mask_fn, tokens [B, T]) -> [layers, q_heads], compiled: the share of its allowed blocks that each
        head keeps."""

        def measure(params: Any, mask_fn: MaskFn, tokens: Array) -> Array:
            seen: list[Array] = []

            def watched(layer: int, query: Array, key: Array) -> Any:
                mask = mask_fn(layer, query, key)
                share = jnp.ones(1) if mask is None else jnp.asarray(mask.density(per_head=True)).mean(0)
                seen.append(jnp.repeat(share.astype(jnp.float32), query.shape[2] // len(share)))
                return mask

            self.model(params).hidden(tokens, mask_fn=watched, mesh=self.mesh if self.mesh.size > 1 else None)
            return jnp.stack(seen)

        return jax.jit(measure, out_shardings=NamedSharding(self.mesh, PartitionSpec()))
