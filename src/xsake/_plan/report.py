"""A plan as plain values, for JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from xsake._plan.assumptions import assumptions
from xsake._plan.exchanges import EXCHANGES
from xsake._plan.plan import Plan
from xsake._plan.predict import Prediction


def plan_values(plan: Plan) -> dict[str, Any]:
    best = plan.best
    return {
        "about": "predictions by `xsake plan`, not measurements; seconds and bytes are of one device and one step",
        "question": dataclasses.asdict(plan.question),
        "best": None if best is None else prediction_values(plan, best),
        "best_of_exchange": {
            exchange: None if (found := plan.best_of(exchange)) is None else prediction_values(plan, found)
            for exchange in EXCHANGES
        },
        "predictions": [prediction_values(plan, p) for p in plan.predictions],
        "refused": {str(mesh): reason for mesh, reason in plan.refused.items()},
        "rest_of_step": dataclasses.asdict(plan.rest),
        "assumptions": assumptions(plan),
    }


def prediction_values(plan: Plan, p: Prediction) -> dict[str, Any]:
    return {
        "exchange": p.exchange,
        "mesh": str(p.mesh),
        "remat": p.remat,
        "fits": p.fits,
        "seconds": p.seconds,
        "attention_seconds": p.attention,
        "choice_seconds": p.choice,
        "matmul_seconds": p.matmuls,
        "exposed_seconds": p.exposed,
        "hidden_seconds": p.hidden,
        "shares": p.shares,
        "tokens_per_second_per_device": tokens_per_second(plan, p),
        "traffic": {name: dataclasses.asdict(part) | {"exposed": part.exposed} for name, part in p.traffic.items()},
        "memory": p.memory,
        "memory_total": p.total_memory,
        "memory_total_with_remat_the_other_way": p.other_memory,
        "attention_rates": [dataclasses.asdict(rate) for rate in p.rates],
    }


def tokens_per_second(plan: Plan, p: Prediction) -> float:
    q = plan.question
    return q.batch * q.tokens / p.seconds / q.devices
