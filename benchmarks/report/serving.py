"""Many requests in one array, beside the same requests one by one."""

from __future__ import annotations

from benchmarks.report.words import Row, Run, facts, listing, median, ms, section, span, times

CASES = {"prompts": "whole prompts", "chunks": "the last chunks of prompts", "mix": "both, and new tokens"}


def gpu_ragged() -> str:
    run = Run.load("gpu_ragged")
    budgets = [way for way in run.results[0]["seconds"] if way.startswith("HADS")]

    def beside(way: str, row: Row) -> str:
        if way not in row["seconds"]:
            return ""
        return f"{ms(median(row, way))} ({times(median(row, way) / median(row, 'ragged'))})"

    columns = {
        "requests": lambda r: f"{len(r['requests'])}",
        "of": lambda r: CASES.get(r["case"], r["case"]),
        "one call": lambda r: ms(_dense(r)),
        **{way: lambda r, way=way: beside(way, r) for way in ("one by one", *budgets)},
    }
    alone = [median(r, "one by one") / _dense(r) for r in run.results]
    sparse = [median(r, way) / _dense(r) for r in run.results for way in budgets if way in r["seconds"]]
    errors = [r["error"] for r in run.results]
    return section(
        listing(run.results, columns),
        facts(
            f"The same requests one by one take {span(alone, '{:.2f}x')} of the one call's time.",
            f"With HADS, whose choice of blocks among pages is XLA's program, a call takes {span(sparse, '{:.1f}x')} "
            "of the dense call's time: it saves nothing yet.",
            _beside(run.results),
            f"The error of each request's last queries, beside XLA in float32, is {span(errors, '{:.1e}')}.",
        ),
        run.source("jax"),
    )


def _beside(rows: list[Row]) -> str:
    """What compiled calls need beside their arguments and results."""
    of = [r for r in rows if r["case"] == "new tokens"]
    told = " and ".join(
        f"{r['temporary_bytes'] / 1e6:.0f} MB beside {r['pool_bytes'] / 1e6:.0f} MB of pages" for r in of
    )
    return f"The pages are not copied: for new tokens alone the call needs {told}."


def _dense(row: Row) -> float:
    return median(row, "ragged")
