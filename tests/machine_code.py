"""Kernels as they run, and what is different between two versions of a kernel.

A kernel comes from PTX, which the assembler turns into instructions; or, where no assembler is installed, from the
program that JAX lowered, in which every kernel is a module of MLIR operations.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import re
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

MOST_TOLD = 6  # kinds of instructions that come or go


@dataclasses.dataclass(frozen=True)
class Kernel:
    """`registers` per thread and `spilled` bytes are None where there was no assembler."""

    name: str
    instructions: tuple[str, ...]
    registers: int | None = None
    spilled: int | None = None


def assembled(ptx: str) -> Kernel:
    """A kernel from its PTX, for sm_90."""
    name = re.search(r"\.entry (\w+)", ptx)[1].removesuffix("_mosaic_gpu_kernel")
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        report = _tool("nvidia-cuda-nvcc", "ptxas", "-arch=sm_90a", "-O3", "-v", str(source), "-o", str(cubin))
        code = _tool("triton", "nvdisasm", "-c", str(cubin))
    registers = int(re.search(r"Used (\d+) registers", report)[1])
    return Kernel(name, instructions(code), registers, int(re.search(r"(\d+) bytes spill stores", report)[1]))


def instructions(code: str) -> tuple[str, ...]:
    """The instructions of a disassembly, without their addresses."""
    return tuple(re.findall(r"(?m)^\s+/\*[0-9a-f]{4,}\*/\s+([^;]+);", code))


def lowered(program: str) -> list[Kernel]:
    """The kernels of a lowered program, of any of Pallas' lowerings, by their MLIR operations."""
    from jax._src.interpreters import mlir
    from jax._src.lib import tpu
    from jaxlib.mlir import ir

    found = []
    for escaped, encoded in re.findall(
        r'\b(?:module|ir) = "((?:[^"\\]|\\.)*)"|\\22body\\22: \\22([A-Za-z0-9+/=]+)', program
    ):
        with mlir.make_ir_context() as context:
            tpu.register_dialect(context)
            context.allow_unregistered_dialects = True
            module = ir.Module.parse(base64.b64decode(encoded) if encoded else _unescaped(escaped))
            text = module.operation.get_asm(print_generic_op_form=True, enable_debug_info=False)
        name = re.search(r'sym_name = "(\w+)"', text)
        text = re.sub(r"<loc\(.*\)>", "", text)
        operations = re.findall(r'(?m)^[^"\n]*"([a-z]\w*(?:\.\w+)+)"(.*)', text)
        found.append(Kernel(name[1] if name else "kernel", tuple(map(" ".join, operations))))
    return found


def _unescaped(text: str) -> bytes:
    """The bytes of a string attribute, in which \\\\XX stands for the byte XX."""
    pieces = re.split(r"\\([0-9A-F]{2}|.)", text)
    return b"".join(
        bytes.fromhex(piece) if i % 2 and len(piece) == 2 else piece.encode() for i, piece in enumerate(pieces)
    )


def opcodes(code: tuple[str, ...]) -> collections.Counter[str]:
    return collections.Counter(re.sub(r"^@!?U?P\w+\s+", "", line).split()[0] for line in code)


def row(this: Kernel | None, other: Kernel | None) -> tuple[str, ...]:
    """Instructions, registers, spilled bytes, and the difference in words; before -> after where they differ."""
    before, after = (
        (len(kernel.instructions), kernel.registers, kernel.spilled) if kernel else ("none",) * 3
        for kernel in (other, this)
    )
    pairs = zip(before, after, strict=True)
    numbers = ("?" if b is None else f"{b}" if a == b else f"{a} -> {b}" for a, b in pairs)
    return *numbers, difference(this, other)


def difference(this: Kernel | None, other: Kernel | None) -> str:
    if this is None or other is None:
        return "gone" if this is None else "new"
    if this.instructions == other.instructions:
        return "the same"
    counts = opcodes(this.instructions)
    counts.subtract(opcodes(other.instructions))
    changed = sorted(((n, name) for name, n in counts.items() if n), key=lambda x: (-abs(x[0]), x[1]))
    words = ", ".join(f"{n:+d} {name}" for n, name in changed[:MOST_TOLD])
    return words + (", ..." if len(changed) > MOST_TOLD else "") if changed else "in another order, or other operands"


def _tool(package: str, name: str, *arguments: str) -> str:
    """The output of a program of an installed package."""
    installed = package in {d.metadata["Name"] for d in metadata.distributions()}
    found = [path for path in (metadata.files(package) if installed else None) or () if path.name == name]
    if not found:
        raise SystemExit(f"{name} of the package {package} is not installed: `make compare-code` installs it")
    done = subprocess.run([str(found[0].locate()), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed: {done.stderr[-2000:]}")
    return done.stdout + done.stderr
