"""`Problem`, a workload in one precision, and `StudyPlan`, the configurations that a study searches for it."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from xsake.autotune.workloads import WORKLOADS, Workload
from xsake.tuning_db import Key

Part = dict[str, Any]  # one direction's configuration, field by field

DTYPES = ("bfloat16", "float16", "float32")
# By platform: names of workloads, mask blocks and precision of the default set.
DEFAULT_SETS = {
    "cpu": (("cpu4k",), (128,), "float32"),
    "gpu": (("gpt4k", "gpt4k_d64", "llama32k", "full16k"), (128, 64), "bfloat16"),
    "tpu": (("gpt4k", "gpt4k_d64", "llama32k", "full16k"), (512, 128), "bfloat16"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A workload in one precision, to be tuned for several densities of its masks (None: density unknown)."""

    workload: Workload
    dtype: str
    densities: tuple[float | None, ...]
    implementation: str | None = None

    def __post_init__(self) -> None:
        workload = self.workload
        for field in dataclasses.fields(workload):
            value = getattr(workload, field.name)
            if isinstance(value, int | float) and field.name != "is_causal" and not (type(value) is int and value > 0):
                raise ValueError(f"{field.name}={value!r} must be a positive int")
        if workload.q_heads % workload.kv_heads:
            raise ValueError(f"q_heads={workload.q_heads} must be divisible by kv_heads={workload.kv_heads}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {DTYPES}")
        for density in self.densities:
            if density is not None and not 0 < density <= 1:
                raise ValueError(f"{density=} must be above 0 and at most 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """The search for one entry of the database: one direction, at the densities of one bucket.

    `default` is the heuristic's configuration, `parts` are all feasible configurations.
    """

    key: Key
    densities: tuple[float | None, ...]
    true_densities: tuple[float, ...]
    default: Part
    parts: tuple[Part, ...]
    kernel: str

    @property
    def fields(self) -> list[str]:
        """The fields of a configuration that differ among `parts`."""
        return [name for name in self.default if len({json.dumps(part[name]) for part in self.parts}) > 1]


def label(part: Part) -> str:
    return json.dumps(part, sort_keys=True)


def named(
    names: list[str], blocks: list[int], densities: list[float], dtype: str, implementation: str | None
) -> list[Problem]:
    """One problem per named workload and mask block."""
    unknown = [n for n in names if n not in WORKLOADS]
    if unknown:
        raise ValueError(f"workloads {unknown} are unknown; there are {sorted(WORKLOADS)}")
    return [
        Problem(
            workload=dataclasses.replace(WORKLOADS[name], block=block),
            dtype=dtype,
            densities=tuple(densities),
            implementation=implementation,
        )
        for name in names
        for block in blocks
    ]


CALL = "BxTxHxD[,kv=K or SxK][,dv=DV][,block=Q or QxKV][,causal][,density=D][,dtype=NAME]"


def from_call(text: str, dtype: str, densities: list[float], implementation: str | None) -> Problem:
    """A problem from shapes on the command line.

    >>> p = from_call("1x4096x8x64,kv=4096x2,causal,density=0.25", "float32", [1.0], None)
    >>> p.workload.kv_heads, p.workload.is_causal, p.densities
    (2, True, (0.25,))
    """
    shape, *options = text.replace(" ", "").split(",")
    given = dict(option.partition("=")[::2] for option in options)
    unknown = sorted(set(given) - {"kv", "dv", "block", "causal", "density", "dtype"})
    if unknown:
        raise ValueError(f"call {text!r}: unknown {unknown}; it must be {CALL}")
    if len(given) < len(options) or given.get("causal"):
        raise ValueError(f"call {text!r}: causal has no value, and nothing is given twice; it must be {CALL}")

    def sizes(name: str, value: str, counts: tuple[int, ...]) -> list[int]:
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", value) or value.count("x") + 1 not in counts:
            raise ValueError(f"call {text!r}: {name} {value!r} is not right; it must be {CALL}")
        return [int(n) for n in value.split("x")]

    batch, length, q_heads, head_dim = sizes("the query's shape", shape, (4,))
    *kv_lengths, kv_heads = sizes("kv", given["kv"], (1, 2)) if "kv" in given else [q_heads]
    kv_length = kv_lengths[0] if kv_lengths else length
    block = sizes("block", given.get("block", "128"), (1, 2))
    workload = Workload(
        name=shape,
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        length=length,
        head_dim=head_dim,
        is_causal="causal" in given,
        block=block[0],
        kv_length=kv_length if kv_length != length else None,
        value_dim=sizes("dv", given["dv"], (1,))[0] if "dv" in given else None,
        block_kv=block[-1] if block[-1] != block[0] else None,
    )
    try:
        return Problem(
            workload=workload,
            dtype=given.get("dtype", dtype),
            densities=(float(given["density"]),) if "density" in given else tuple(densities),
            implementation=implementation,
        )
    except ValueError as error:
        raise ValueError(f"call {text!r}: {error}") from error
