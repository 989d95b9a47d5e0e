"""The README's tables, made from recorded runs.

python -m benchmarks.report           rewrite the generated parts of README.md
python -m benchmarks.report --check   exit 1 if they are not what the recorded runs say
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from benchmarks import record
from xsake.autotune.workloads import WORKLOADS

README = record.ROOT / "README.md"


def cpu_attention() -> str:
    run = record.load("cpu_attention")
    rows = [
        "| tokens | direction | active blocks | xsake | jax.nn (xla) | speed-up | temporary memory |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in run["results"]:
        peer, used = r["seconds"].get("jax.nn"), r["temporary_bytes"]
        cells = [
            str(WORKLOADS[r["workload"]].length),
            r["direction"],
            f"{r['density']:.0%}",
            _ms(r["seconds"]["xsake"]),
            _ms(peer) if peer else "not run",
            f"{r['speedup']:.1f}x" if peer else "",
            " against ".join(f"{n / 2**20:.0f} MiB" for n in used.values()),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, "", _source(run, "cpu_attention")])


def _source(run: dict, name: str) -> str:
    e = run["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in e["versions"].items() if k in ("jax", "torch"))
    return (
        f"Medians with quartiles, from `benchmarks/results/{name}.json`: {e['device']}, {e['cores']} cores, "
        f"{versions}, commit {e['commit']}."
    )


def _ms(t: dict) -> str:
    return f"{t['median'] * 1e3:.0f} ms ({t['low'] * 1e3:.0f}-{t['high'] * 1e3:.0f})"


PARTS: dict[str, Callable[[], str]] = {"cpu_attention": cpu_attention}


def rendered(text: str) -> str:
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert pattern.search(text), f"README.md has no part '<!-- generated: {name} -->'"
        body = make()
        text = pattern.sub(lambda m, body=body: f"{m[1]}{body}\n{m[2]}", text)
    return text


def main() -> None:
    text = README.read_text()
    if "--check" in sys.argv:
        sys.exit(
            rendered(text) != text and "README.md does not match the recorded runs: run python -m benchmarks.report"
        )
    README.write_text(rendered(text))


if __name__ == "__main__":
    main()
