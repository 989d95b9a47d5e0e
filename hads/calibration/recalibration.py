"""HADS as the trainer's recalibration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import Array

from xsake.hads.calibration.calibrate import calibrate
from xsake.hads.profile.rule import TRAINING
from xsake.hads.selection.mask_function import NAME, HadsMask


def recalibration(
    budget: float, *, block: int = 64, name: str = NAME, steps: int = 150, sequences: int = 4
) -> Callable[[int, Any, Array], HadsMask]:
    """A trainer's `recalibrate(step, model, tokens)`: calibrates the model as it is on dense attention, on the first
    `sequences` of the batch, and gives the masks of the steps to come."""

    def recalibrate(step: int, model: Any, tokens: Array) -> HadsMask:
        sample = np.asarray(tokens)[:sequences]
        profile = calibrate(
            model, sample, name=name, block=block, sensitivity_sequences=2, steps=steps, seed=step, rule=TRAINING
        )
        return HadsMask.of(profile.on_device(), budget, tokens.shape[1])

    return recalibrate
