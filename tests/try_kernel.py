"""One kernel, after every edit: is it still right, and what became of its machine code?

    make kernel                             lists the kernels
    make kernel K=dq                        the dQ kernel of this checkout beside that of the last commit
    make kernel K=dq AGAINST=REVISION       beside another commit's, or that of a checkout in another folder

Three small calls are interpreted and compared with float64; the interpreters of Hopper and of TPUs also look for races.
Meanwhile a typical call is compiled with no GPU, and its kernels are compared instruction by instruction. Where no
assembler is installed, and for TPUs, the lowered programs are compared, operation by operation.

The kernels of a commit are kept in out/kernels, so that each commit is compiled once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests import machine_code
from tests.kernels import KERNELS, Entry
from tests.machine_code import Kernel

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "out" / "kernels"


# -- the code of one checkout, in a process of its own, from its own sources ------------------------------------------


def write_code(entry: Entry, *, assemble: bool, to: Path) -> None:
    with tempfile.TemporaryDirectory() as dump:
        if assemble:  # read when JAX is imported: Mosaic GPU and XLA write their PTX there
            os.environ |= {"MOSAIC_GPU_DUMP_TO": dump, "MOSAIC_GPU_DUMP_PTX": "1"}
            os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_emitter_re=ptx"
            found = [machine_code.assembled(ptx) for ptx in _ptx(entry, Path(dump)) if _is_of(entry, ptx)]
        else:
            found = [k for program in _lowered(entry) for k in machine_code.lowered(program) if entry.of in k.name]
    if not found:
        raise SystemExit(f"no kernel of these programs has {entry.of!r} in its name")
    to.write_text(json.dumps([dataclasses.asdict(kernel) for kernel in found]))
    sys.stdout.flush()
    os._exit(0)  # the compiler's plugin may crash at the end, where there is no GPU


def _is_of(entry: Entry, ptx: str) -> bool:
    return any(entry.of in line for line in ptx.splitlines() if ".entry" in line)


def _ptx(entry: Entry, dump: Path) -> Iterator[str]:
    if entry.needs == "jax_triton":
        from raw_triton_offline import compiled_kernels

        for _, (call, config) in entry.programs():
            yield from (kernel.asm["ptx"] for kernel in compiled_kernels(call, config, 90).values())
        return
    import jax

    from tests.cuda_offline import on_chip

    for function, arguments in entry.programs():
        on_chip("sm_90", jax.jit(function).lower, *arguments)
    yield from dict.fromkeys(path.read_text() for path in sorted(dump.rglob("*.ptx")))


def _lowered(entry: Entry) -> Iterator[str]:
    import jax

    from tests.cuda_offline import lower

    for function, arguments in entry.programs():
        if entry.platform == "cuda":
            yield lower(function, *arguments)
        else:
            yield jax.jit(function).trace(*arguments).lower(lowering_platforms=(entry.platform,)).as_text()


# -- two checkouts side by side ----------------------------------------------------------------------------------------


class Compiler:
    """`python`: the interpreter that has the compilers, or None where kernels can only be lowered."""

    def __init__(self, name: str, python: str | None) -> None:
        self.name, self.assembles = name, python is not None and KERNELS[name].platform == "cuda"
        self.python = python if python is not None and self.assembles else sys.executable

    def kernels(self, root: Path) -> dict[str, Kernel] | str:
        """The kernels of the checkout at `root` by their names, or the end of what was said instead."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kernels.json")
            command = [self.python, "-m", "tests.try_kernel", self.name, "--write", str(path)]
            command += ["--assemble"] if self.assembles else []
            paths = os.pathsep.join(map(str, (root / "src", root, root / "tests")))
            env = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "TRITON_INTERPRET": "0"}
            done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
            return read(path) if path.exists() else done.stderr[-2000:]

    def kernels_of_commit(self, commit: str) -> dict[str, Kernel] | str:
        from benchmarks.harness import checkouts

        form = "assembled" if self.assembles else "lowered"
        kept = KEPT / f"{commit}-{self.name}-{form}-jax{metadata.version('jax')}.json"
        if kept.exists():
            return read(kept)
        with checkouts.checkout(commit) as root:
            found = self.kernels(root)
        if isinstance(found, dict):
            KEPT.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps([dataclasses.asdict(kernel) for kernel in found.values()]))
        return found

    def both(self, against: str) -> tuple[dict[str, Kernel] | str, dict[str, Kernel] | str]:
        """The kernels of this checkout, and those of the other."""
        mine = self.kernels(ROOT)
        if Path(against).is_dir():
            return mine, self.kernels(Path(against).resolve())
        return mine, self.kernels_of_commit(commit_of(against))


def commit_of(revision: str) -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--verify", "--short", f"{revision}^{{commit}}"], cwd=ROOT, capture_output=True, text=True
    )
    if found.returncode:
        raise SystemExit(f"{revision} is neither a folder nor a commit here")
    return found.stdout.strip()


def read(path: Path) -> dict[str, Kernel]:
    given = [kernel | {"instructions": tuple(kernel["instructions"])} for kernel in json.loads(path.read_text())]
    return {kernel["name"]: Kernel(**kernel) for kernel in given}


# -- what is printed ---------------------------------------------------------------------------------------------------


def listed() -> str:
    lines = [f"  {name:11} {entry.room:36} {entry.says}" for name, entry in KERNELS.items()]
    return "\n".join(["Name a kernel, as in `make kernel K=forward`:", *lines])


def wrong_calls(entry: Entry, console: Console) -> int:
    """Interprets the calls, one line each; returns the number of those whose results were wrong."""
    wrong = 0
    for name, arguments in entry.calls.items():
        console.print(f"  interpreted: {name} ... ", end="")
        started = time.monotonic()
        try:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                entry.run(arguments)
            said = "right"
            if "RACE DETECTED" in printed.getvalue():  # by jax 0.11; newer ones raise
                raise RuntimeError(printed.getvalue())
        except Exception as problem:
            wrong, said = wrong + 1, f"WRONG: {reason(problem)}"
        console.print(f"{said}, {time.monotonic() - started:.0f} s", markup=False)
    return wrong


def reason(problem: Exception) -> str:
    """The error in a few lines; only the two accesses of a race, which JAX wraps in tracebacks of its own."""
    text = f"{type(problem).__name__}: {problem}"
    if race := re.search(r"RACE DETECTED(?:\n  .*)+", text):
        text = re.sub(r"\n  clock: .*", "", race[0])
    return text[:2000]


def compared(mine: dict[str, Kernel], theirs: dict[str, Kernel], assembled: bool) -> Table:
    columns = "kernel", "instructions" if assembled else "operations", "registers", "spilled bytes", "difference"
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in mine | theirs:
        table.add_row(name, *machine_code.row(mine.get(name), theirs.get(name)))
    return table


def try_kernel(name: str, against: str, python: str | None, console: Console) -> int:
    started, entry, compiler = time.monotonic(), KERNELS[name], Compiler(name, python)
    console.print(f"{name}: {entry.says}, {entry.room}; beside {against}")
    with ThreadPoolExecutor(1) as pool:
        both = pool.submit(compiler.both, against)
        wrong = wrong_calls(entry, console)
        mine, theirs = both.result()
    if isinstance(mine, str):
        console.print(f"  it does not compile:\n{mine}", markup=False)
        return 1
    if isinstance(theirs, str):
        console.print(f"  nothing to compare with: {against} does not compile here. It said:\n{theirs}", markup=False)
        theirs = {}
    if not compiler.assembles:
        why = "" if entry.platform == "tpu" else ", since no assembler is installed (`make compare-code` installs it)"
        console.print(f"  lowered programs are compared{why}: registers and spills are unknown")
    console.print(compared(mine, theirs, compiler.assembles))
    right = "all calls are right" if not wrong else f"{wrong} of {len(entry.calls)} calls are WRONG"
    console.print(f"{right}; {time.monotonic() - started:.0f} s")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="try_kernel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=listed()
    )
    parser.add_argument("kernel", nargs="?", help="see below")
    parser.add_argument("--against", default="HEAD", help="a commit, or the folder of another checkout")
    parser.add_argument("--compiler", help="the Python that has the CUDA compilers, of .venv-cuda")
    parser.add_argument("--write", type=Path, help="only write this checkout's kernels to a file")
    parser.add_argument("--assemble", action="store_true", help="with --write: as machine code")
    args = parser.parse_args()
    if args.kernel not in KERNELS:
        print(f"There is no kernel {args.kernel!r}. {listed()}" if args.kernel else listed())
        return 2 if args.kernel else 0
    entry = KERNELS[args.kernel]
    compiler = args.compiler and str(Path(args.compiler).absolute())
    if args.write:
        write_code(entry, assemble=args.assemble, to=args.write)
    if entry.needs and importlib.util.find_spec(entry.needs) is None:
        if not compiler:
            raise SystemExit(f"{args.kernel} needs {entry.needs}: `make compare-code` makes .venv-cuda, which has it")
        os.execv(compiler, [compiler, "-m", "tests.try_kernel", *sys.argv[1:]])
    # Read when JAX is imported. The interpreter's warpgroups wait for one another in threads of the pool; programs run
    # once, so that it does not pay to optimise them.
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "TRITON_INTERPRET": "1"}
    return try_kernel(args.kernel, args.against, compiler, Console(width=120, highlight=False))


if __name__ == "__main__":
    sys.exit(main())
