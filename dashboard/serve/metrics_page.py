"""`/metrics` in Prometheus' text format: the runs' last values, with the run as a label, and the server's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector

from xsake.dashboard.read.library import Library
from xsake.dashboard.read.run import Run
from xsake.dashboard.read.run_events import number
from xsake.dashboard.serve.live import Live
from xsake.dashboard.show import run_documents

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATUSES = ("running", "stalled", "failed", "finished")
# metric name: (field of a run's list entry or last step, help)
_GAUGES: dict[str, tuple[str, str]] = {
    "xsake_run_target_steps": ("steps", "Steps that the run will take in all."),
    "xsake_run_loss_nats": ("loss", "Loss of the last step, in nats per token."),
    "xsake_run_held_out_loss_nats": ("held_out_loss", "Last loss on held-out data, in nats per token."),
    "xsake_run_learning_rate": ("learning_rate", "Learning rate of the last step."),
    "xsake_run_gradient_norm": ("gradient_norm", "Norm of the gradient of the last step, before clipping."),
    "xsake_run_step_duration_seconds": ("seconds", "Time of the last step."),
    "xsake_run_mfu_ratio": ("mfu", "Model FLOP/s utilisation of the last step, from 0 to 1."),
    "xsake_run_density_ratio": ("kept_share", "Share of the blocks that attention keeps, mean over layers and heads."),
    "xsake_run_last_event_timestamp_seconds": ("last_event", "When the run wrote something last."),
}
_COUNTERS: dict[str, tuple[str, str]] = {
    "xsake_run_steps": ("step", "Steps taken."),
    "xsake_run_tokens": ("tokens", "Tokens read in training."),
    "xsake_run_training_seconds": ("elapsed", "Time spent in steps."),
}


class Runs(Collector):
    def __init__(self, library: Library, live: Live):
        self._library, self._live = library, live

    def collect(self) -> Iterator[Metric]:
        seen: list[tuple[Run, dict[str, Any]]] = []
        for run in self._library.runs:
            with run.blamed(), run.lock:
                if not run.gone and not run.recorded and run.problem is None and run.state.events:
                    names = ("learning_rate", "gradient_norm", "seconds")
                    last = {name: number(run.state.last.get(name)) for name in names}
                    seen.append((run, run_documents.summary(run) | last | {"last_event": run.last_event()}))
        for kind, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (field, text) in metrics.items():
                family = kind(name, text, labels=["run"])
                for run, entry in seen:
                    if entry.get(field) is not None:
                        family.add_metric([run.id], entry[field])
                yield family
        yield from _descriptions(seen)
        yield GaugeMetricFamily("xsake_dashboard_followers", "Event streams that are open.", value=self._live.followers)
        yield CounterMetricFamily(
            "xsake_dashboard_events_sent", "Events sent to followers.", value=self._live.events_sent
        )


def _descriptions(seen: list[tuple[Run, dict[str, Any]]]) -> Iterator[Metric]:
    status = StateSetMetricFamily("xsake_run_status", "1 for the status that the run has.", labels=["run"])
    about = InfoMetricFamily("xsake_run", "What the run is.", labels=["run"])
    layers = GaugeMetricFamily(
        "xsake_run_layer_density_ratio", "Share of the blocks that a layer keeps.", labels=["run", "layer"]
    )
    for run, entry in seen:
        for layer, row in enumerate((run.state.densities.last or {"layers": ()})["layers"]):
            layers.add_metric([run.id, str(layer)], sum(row) / len(row))
        status.add_metric([run.id], {name: name == entry["status"] for name in STATUSES})
        known = {name: entry[name] or "" for name in ("attention", "preset")}
        about.add_metric([run.id], {"name": run.name} | known)
    yield from (layers, status, about)


def render(library: Library, live: Live) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Runs(library, live))
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
        registry.register(collector)
    return generate_latest(registry)
