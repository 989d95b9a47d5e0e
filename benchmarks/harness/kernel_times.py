"""Kernel times: what a GPU does during a call, kernel by kernel, by JAX's profiler."""

from __future__ import annotations

import collections
import gzip
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

MOST = 16  # kernels that are named; the rest is added up


def kernel_times(run: Callable[[], Any]) -> dict[str, Any] | None:
    """Seconds of one call: all kernels together, from the first to the last, and each kernel with the number of its
    launches; None where there is no GPU. The call must be compiled."""
    if jax.default_backend() != "gpu":
        return None
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return summed(events)


def short(name: str) -> str:
    """Without the number that XLA gives its kernels, and without the types of a C++ template."""
    return re.sub(r"[_.]\d+$", "", name.removeprefix("void ").split("<")[0])


def summed(events: list[dict[str, Any]]) -> dict[str, Any]:
    """From the events of a trace: microseconds, in threads named "Stream" of processes with GPU in their names."""
    names = {
        (event["name"], event["pid"], event.get("tid") if event["name"] == "thread_name" else None): event["args"][
            "name"
        ]
        for event in events
        if event.get("ph") == "M" and event.get("name") in ("process_name", "thread_name")
    }

    def on_gpu(event: dict[str, Any]) -> bool:
        pid, tid = event.get("pid"), event.get("tid")
        process, thread = names.get(("process_name", pid, None), ""), names.get(("thread_name", pid, tid), "")
        return event.get("ph") == "X" and "GPU" in process and "Stream" in thread

    found = [event for event in events if on_gpu(event)]
    if not found:
        return {"busy": 0.0, "span": 0.0, "launches": 0, "kernels": {}}
    seconds: collections.Counter[str] = collections.Counter()
    launches: collections.Counter[str] = collections.Counter()
    for event in found:
        name = short(event["name"])
        seconds[name] += event["dur"] * 1e-6
        launches[name] += 1
    named = [name for name, _ in seconds.most_common(MOST)]
    kernels = {name: {"launches": launches[name], "seconds": seconds[name]} for name in named}
    if rest := [name for name in seconds if name not in named]:
        kernels["others"] = {
            "launches": sum(launches[name] for name in rest),
            "seconds": sum(seconds[name] for name in rest),
        }
    return {
        "busy": sum(seconds.values()),
        "span": (max(e["ts"] + e["dur"] for e in found) - min(e["ts"] for e in found)) * 1e-6,
        "launches": len(found),
        "kernels": kernels,
    }
