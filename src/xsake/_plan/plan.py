"""All meshes and exchanges of a question, and the best."""

from __future__ import annotations

import dataclasses

from xsake._plan.exchanges import EXCHANGES, WHAT_IF
from xsake._plan.meshes import Mesh, every_mesh, mesh_problem
from xsake._plan.predict import Prediction, predict
from xsake._plan.question import Question
from xsake._plan.rates import Rate, rest_rate, shipped_points, shipped_prompts, shipped_rest
from xsake.model.training.watch.mfu import peak_flops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Predictions, the best first: meshes with enough memory before the others, then by time.

    Args:
      question: what was asked.
      predictions: of every mesh that can run the model, with every exchange that suits the mesh.
      refused: meshes that cannot run the model, each with the reason.
      rest: the throughput of all work beside attention.
    """

    question: Question
    predictions: tuple[Prediction, ...]
    refused: dict[Mesh, str]
    rest: Rate

    def best_of(self, exchange: str) -> Prediction | None:
        """The best mesh with this exchange, whether it fits or not; None if no mesh suits the exchange."""
        return next((p for p in self.predictions if p.exchange == exchange), None)

    @property
    def best(self) -> Prediction | None:
        """The fastest that fits, without the exchange that is a what-if."""
        return next((p for p in self.predictions if p.fits and p.exchange != WHAT_IF), None)


def make_plan(question: Question, mesh: Mesh | None = None) -> Plan:
    """The plan of every mesh, or of one."""
    if mesh is not None and mesh.devices != question.devices:
        raise ValueError(f"mesh={mesh} has {mesh.devices} devices, and devices={question.devices}")
    asked = [mesh] if mesh is not None else list(every_mesh(question.devices))
    refused = {m: problem for m in asked if (problem := mesh_problem(m, question)) is not None}
    if len(refused) == len(asked):
        reasons = "; ".join(f"{m}: {problem}" for m, problem in list(refused.items())[:4])
        more = f"; and {len(refused) - 4} more" if len(refused) > 4 else ""
        raise ValueError(
            f"no mesh of {question.devices} devices (data x model x sequence) can run this: {reasons}{more}"
        )
    rest = rest_of_step(question)
    found = [
        _with_memory_that_fits(question, m, exchange, rest)
        for m in asked
        if m not in refused
        for exchange in EXCHANGES
        if (exchange == "none") == (m.sequence == 1)
    ]
    found.sort(key=lambda p: (not p.fits, p.seconds, p.mesh))
    return Plan(question=question, predictions=tuple(found), refused=refused, rest=rest)


def rest_of_step(question: Question) -> Rate:
    """The throughput of all work beside attention: given, recorded, or by the recorded device's share of its peak."""
    device = question.device
    if question.mfu is not None:
        return Rate(question.mfu * device.peak / 1e12, "given by --mfu")
    recorded = shipped_prompts() if question.prefill else shipped_rest()
    found = rest_rate(recorded, width=question.config.width)
    here = recorded[0].device
    if here == device.recorded_as:
        return found
    peak = peak_flops(here)
    assert peak is not None
    share = found.tflops * 1e12 / peak
    return Rate(share * device.peak / 1e12, f"the share of its peak that the {here} reaches ({found.source})")


def _with_memory_that_fits(question: Question, mesh: Mesh, exchange: str, rest: Rate) -> Prediction:
    """Without recomputation where that fits, unless the question says otherwise."""
    points = shipped_points()
    given = False if question.prefill else question.remat
    for remat in (False, True) if given is None else (given,):
        found = predict(question, mesh, exchange, remat=remat, points=points, rest=rest)
        if found.fits:
            break
    return found
