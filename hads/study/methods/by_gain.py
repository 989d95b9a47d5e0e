"""HADS's rule on a layer's masses, estimated or true; and the help that it gives its last rows, for a rival."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from xsake.hads.selection.choice import choose
from xsake.hads.selection.estimate import layer_mass
from xsake.hads.selection.exact import with_exact_rows
from xsake.hads.study.methods.layer import Blocks, Layer

Mass = Float[Array, "B H rows n"]


def estimated_mass(x: Layer) -> Mass:
    """The masses that HADS chooses by."""
    return layer_mass(x.query, x.key, x.profile.estimator(x.number), x.rows)


def choose_by_gain(x: Layer, mass: Mass) -> Blocks:
    """HADS's rule on any masses, estimated or true."""
    omega, phi = rule_of_heads(x)
    return choose(mass, x.rows, sensitivity=omega, burstiness=phi, count=count_of_each(x))


def count_of_each(x: Layer) -> Array:
    """The layer's count as `choose` takes it: one number per sequence, or one for all."""
    count = jnp.asarray(x.count)
    return count[:, None] if count.ndim else count


def rule_of_heads(x: Layer) -> tuple[Array, Array]:
    """The sensitivity and burstiness of the layer's heads."""
    return jnp.asarray(x.profile.sensitivity)[x.number], jnp.asarray(x.profile.burstiness)[x.number]


def with_last_rows(x: Layer) -> Layer:
    """The layer with as many blocks in its last rows as HADS keeps there."""
    ours = choose_by_gain(x, estimated_mass(x)) & x.rows.last()
    return dataclasses.replace(x, last_count=ours.sum((1, 2, 3)))


def with_exact_last_rows(x: Layer) -> Layer:
    """The layer with all of HADS's help for its last rows: as many blocks, the best by exact masses."""
    if not x.rows.exact:
        raise ValueError("exact last rows are HADS's help by Rule.exact_queries, of which this profile's rule has none")
    exact = with_exact_rows(jnp.zeros(x.shape), x.query, x.key, x.rows)
    return dataclasses.replace(with_last_rows(x), last_mass=exact)
