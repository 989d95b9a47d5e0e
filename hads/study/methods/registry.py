"""The methods that an evaluation can compare, by name and by group.

To read METHODS and GROUPS, import them from `xsake.hads.study.methods.shipped`, which registers the methods that come
with xsake. Anyone may register more and evaluate them by name:

    register_rival("nearest", lambda layer: layer.everywhere(-layer.grid.distance()))
    evaluate(model, profile, texts, methods=["hads", "nearest", "nearest+forced"], ...)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np

from xsake.hads.profile.profile import HadsProfile
from xsake.hads.study.methods.by_gain import with_exact_last_rows
from xsake.hads.study.methods.layer import Blocks, Layer, Priority, Remembered, TokenMask
from xsake.hads.study.methods.ranking import ALWAYS, diagonal


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to choose a layer's blocks: a program, which several methods may share, and the data that differ.

    `forced`: HADS's forced blocks are always kept. `adapt`: changes the profile's numbers before the program sees them.
    Methods that share `program` share its compiled form.
    """

    program: Callable[[Layer], Blocks | TokenMask | Remembered]
    forced: bool = True
    adapt: Callable[[HadsProfile], HadsProfile] | None = None


FORMS = ("", "+forced", "+exact")  # of a rival that ranks blocks (`register_rival`)
METHODS: dict[str, Method] = {}
GROUPS: dict[str, list[str]] = {}  # names of methods; a group exists once a method is registered in it


def register(name: str, method: Method, *, group: str) -> None:
    if name in METHODS or name in GROUPS:
        raise ValueError(f"{name!r} is registered already: use another name")
    if "," in name or name != name.strip() or not name:
        raise ValueError(f"{name!r} must have no comma, and no space at its ends: names are listed with commas")
    METHODS[name] = method
    GROUPS.setdefault(group, []).append(name)


def register_rival(
    name: str, priority: Callable[[Layer], Priority], groups: tuple[str, str] = ("rivals", "forced")
) -> None:
    """Register the method that keeps the diagonal blocks and the blocks of highest priority, in three forms.

    `name` is in the first of the groups, and `name+forced`, which also keeps HADS's forced blocks, in the second.
    `name+exact`, in the group "exact", also has HADS's last rows: as many blocks, by exact masses."""
    program = partial(_by_priority, priority)
    register_in_both_forms(name, program, groups)
    register(f"{name}+exact", Method(lambda x: program(with_exact_last_rows(x))), group="exact")


def register_in_both_forms(
    name: str,
    program: Callable[[Layer], Blocks | TokenMask | Remembered],
    groups: tuple[str, str] = ("rivals", "forced"),
) -> None:
    """As `register_rival`, for a program that keeps by itself and honours `Layer.with_forced`."""
    register(name, Method(program, forced=False), group=groups[0])
    register(f"{name}+forced", Method(program), group=groups[1])


def keep_with_diagonal(x: Layer, priority: Priority) -> Blocks:
    """Diagonal blocks come first, whatever the priority says: no row is left without a key."""
    return x.keep(jnp.maximum(priority, x.everywhere(np.where(diagonal(x.grid) > 0, ALWAYS, -np.inf))))


def _by_priority(priority: Callable[[Layer], Priority], x: Layer) -> Blocks:
    return keep_with_diagonal(x, priority(x))
