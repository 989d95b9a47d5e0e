"""XSAKE's commands on a backend of another package: what it honours, and its times beside ours."""

from __future__ import annotations

import re

from benchmarks.report.words import Row, Run, facts, grid, ms, section, span, times
from xsake.autotune import problem

NAMES = {
    "xsake": "XSAKE",
    "jax_mosaic": "JAX's kernel",
    "cudnn": "cuDNN",
    "tokamax": "tokamax",
    "flex": "FlexAttention",
}
BACKEND = "jax_mosaic"


def gpu_workbench() -> str:
    run = Run.load("gpu_workbench")
    races = [(row["shape"], race) for row in run.results if row["step"] == "race" for race in row["numbers"]["races"]]
    by = {(shape, race["direction"]): {row["contestant"]: row for row in race["rows"]} for shape, race in races}
    density = {(shape, race["direction"]): race["density"] for shape, race in races}
    raced = {who for rows in by.values() for who in rows}

    def cell(at: tuple[str, str], who: str) -> str:
        if who not in by[at]:
            return ""
        seconds, ours = (by[at][name]["sustained"]["median"] for name in (who, "xsake"))
        return ms(seconds) + ("" if who == "xsake" else f" ({times(seconds / ours)})")

    calls = {at: (_call(at[0], density[at]), at[1]) for at in by}
    return section(
        grid(("call in float16", "direction"), calls, {who: NAMES[who] for who in NAMES if who in raced}, cell),
        facts(*_checked(run.results), _faster(by), _tuned(run.results), _refreshed(run.results), _seconds(run.results)),
        run.source("jax", "torch", "nvidia-cudnn-cu13"),
    )


def _call(shape: str, density: float) -> str:
    workload = problem.from_call(shape, "float16", [1.0], None).workload
    heads = f"{workload.q_heads}" + (f" on {workload.kv_heads}" if workload.kv_heads != workload.q_heads else "")
    batch = f"{workload.batch} x " if workload.batch > 1 else ""
    about = "" if workload.is_causal else ", not causal"
    sparse = "" if density == 1 else f", {density:.0%} of the blocks"
    return f"{batch}{workload.length} tokens, {heads} heads of {workload.head_dim}{about}{sparse}"


def _checked(rows: list[Row]) -> list[str]:
    (row,) = (row for row in rows if row["step"] == "check")
    counts, reasons = row["counts"], [why for *_, why in row["checks"].values()]
    sparse, scales, alone = (
        sum(words in why for why in reasons)
        for words in ("may leave out blocks", "no power of two", "there is one device")
    )
    return [
        f"Of {counts['all']} checks {counts['hold']} hold, {counts['fail']} fail and {counts['refused']} are refused: "
        f"{sparse} for masks that leave out blocks, {scales} for the scale, {alone} for want of a second GPU, and the "
        "others for arguments that JAX's kernel does not have.",
        f"{counts['without_gradients']} of those that hold have no gradients: JAX's kernel has none of causal calls.",
    ]


def _faster(by: dict[tuple[str, str], dict[str, Row]]) -> str:
    slower = [
        rows[BACKEND]["sustained"]["median"] / rows["xsake"]["sustained"]["median"]
        for rows in by.values()
        if BACKEND in rows
    ]
    faster = sum(ratio < 1 for ratio in slower)
    where = "nowhere" if not faster else f"in {faster} of {len(slower)} races"
    return f"JAX's kernel is faster than XSAKE {where}: it takes {span(slower, '{:.2f}x')} of XSAKE's time."


def _tuned(rows: list[Row]) -> str | None:
    (row,) = (row for row in rows if row["step"] == "autotune")
    found = re.search(r"the speed-ups are (\S+) to (\S+)x", " ".join(row["said"]))
    lacking = sum("nothing written:" in line for line in row["said"])
    if found is None:
        return None
    late = f"; {lacking} more directions had no time" if lacking else ""
    gains = f"{found[1].rstrip('x')} to {found[2].rstrip('x')} times as fast"
    return (
        f"The choices of `xsake autotune` are {gains} as its first configuration, after {row['seconds']:.0f} s{late}."
    )


def _refreshed(rows: list[Row]) -> str | None:
    (row,) = (row for row in rows if row["step"] == "refresh")
    renewed, dropped, left = re.findall(r"\d+", row["said"][-1])
    return (
        f"`xsake autotune --refresh` raced {int(renewed) + int(dropped) + int(left)} entries of older kernels again in "
        f"{row['seconds']:.0f} s: {renewed} renewed, {dropped} dropped, {left} left."
    )


def _seconds(rows: list[Row]) -> str:
    """From the command to its table, with the start of Python and of the GPU."""
    of = {step: [f"{r['seconds']:.0f}" for r in rows if r["step"] == step] for step in ("check", "race", "gate")}
    races = [float(x) for x in of["race"]]
    return (
        f"From a command to its table, `xsake check` took {of['check'][0]} s, a race {min(races):.0f} to "
        f"{max(races):.0f} s, and `xsake gate` {of['gate'][-1]} s."
    )


def cpu_workbench() -> str:
    run = Run.load("cpu_workbench")
    least = {step: min(row["seconds"] for row in run.results if row["step"] == step) for step in ("check", "race")}
    cores, loads = run.content["environment"]["cores"], [row["load"] for row in run.results]
    return section(
        f"On {cores} cores of a CPU, from command to table, `xsake check xla --quick` takes {least['check']:.0f} s "
        f"and such a race of three contestants {least['race']:.0f} s: the least of {len(run.results) // 2} runs each, "
        f"with a load of {span(loads, '{:.0f}')} before them.",
        run.source("jax"),
    )
