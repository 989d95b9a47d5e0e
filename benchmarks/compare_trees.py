"""Is a change faster? Two checkouts of xsake race, call by call, with the same inputs and masks on one device.

    python -m benchmarks.compare_trees                             this checkout against its last commit
    python -m benchmarks.compare_trees --against REVISION          against another commit
    python -m benchmarks.compare_trees --against FOLDER            against another checkout, where there is no git
    python -m benchmarks.compare_trees --only full16k,gpt4k --masks 'random 100%,lines' --directions forward
    python -m benchmarks.compare_trees --only gpt4k_d64 --length 256 --seconds 0.01       a small run, anywhere

Each checkout has a process of its own, in which everything is compiled before the first race. Calls and masks are those
of `gpu/peers.py`, and so are the turns: in random order, with equal pauses. The ratio is how many times as fast this
checkout is: of every round the ratio of the two turns, of these the median, and in brackets the quartiles. A ratio
whose quartiles lie around 1 says nothing. `results`: whether both compute the same bits; if not, the largest distance
over the norm of any result.
"""

from __future__ import annotations

import os

from benchmarks import record
from benchmarks.harness import checkouts
from benchmarks.harness.masks import CALLS
from benchmarks.harness.script import Record, listed, parser, show
from benchmarks.harness.two_trees import OTHER, THIS, compared, distance, race, runners
from xsake._measure.timing import Timing
from xsake._race.course import DIRECTIONS

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two processes share the device


def main() -> None:
    options = parser(__doc__, rounds=9)
    options.add_argument("--against", default="HEAD", help="a commit, or the folder of another checkout")
    calls = ["llama32k", "full16k", "gpt4k", "gpt4k_d64"]
    options.add_argument("--only", type=listed(among=CALLS), default=calls, help="workloads of gpu/peers.py")
    options.add_argument("--masks", default="random", help="masks whose names begin with one of these")
    options.add_argument("--directions", type=listed(among=DIRECTIONS), default=[*DIRECTIONS])
    options.add_argument("--any-order", action="store_true", help="deterministic=False")
    options.add_argument("--length", type=int, help="tokens, instead of the workload's")
    options.add_argument("--seconds", type=float, default=0.2, help="of each turn")
    args = options.parse_args()
    asked = {name: getattr(args, name) for name in ("only", "masks", "directions", "any_order", "length")}
    rows, lines = Record("compare_trees", args.out, against=args.against), []
    roots = {THIS: record.ROOT}
    with checkouts.checkout(args.against) as other, runners(roots | {OTHER: other}, asked) as found:
        calls_of = {name: runner.calls() for name, runner in found.items()}
        if not calls_of[THIS]:
            raise SystemExit(f"--masks: no mask of {', '.join(args.only)} has a name that begins with {args.masks!r}")
        for number, (this, its) in enumerate(zip(calls_of[THIS], calls_of[OTHER], strict=True)):
            names = {key: this[key] for key in ("workload", "direction", "mask")}
            times = race(found, number, min(this["once"], its["once"]), args.rounds, args.seconds)
            apart = distance(this["results"], its["results"])
            rows.add({**names, "seconds_per_call": times, "apart": apart})
            ratio, medians = compared(times), (Timing.of(times[name]).median for name in (THIS, OTHER))
            ratio_told = f"{ratio.median:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"
            results = f"{apart:.1e} apart" if apart else "same bits"
            lines.append([*names.values(), *(f"{median * 1e3:.3f} ms" for median in medians), ratio_told, results])
            print(*lines[-1], sep="  ", flush=True)
    show(["call", "direction", "mask", "this", args.against, "ratio", "results"], lines)


if __name__ == "__main__":
    main()
