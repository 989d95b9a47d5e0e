"""`xsake calibrate` and `xsake evaluate`: HADS on a model, from the command line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from xsake._cli.errors import plain_errors
from xsake._cli.options import check_file_out, check_folder_out, load_profile
from xsake._ground.cache import keep_compiled
from xsake._ground.progress import shown_progress
from xsake.model.weights.published import name_of

Model = Annotated[str, typer.Option(help="A published model (smollm2), a GGUF or safetensors file, or a training run.")]
Texts = Annotated[list[Path], typer.Argument(help="Plain text, or .npz files of tokens [N, T] by domain.", exists=True)]
Length = Annotated[int, typer.Option(help="Tokens per sequence.", min=64)]
Sequences = Annotated[int, typer.Option(help="Sequences per domain.", min=1)]
Domains = Annotated[str | None, typer.Option(help="Only these domains, comma-separated.")]
DType = Annotated[str | None, typer.Option(help="float32 or bfloat16; by default bfloat16 on a GPU or TPU.")]

# The names that `xsake.hads.study.methods.shipped` registers, written out: --help must not import that module.
METHODS = (
    "Groups: short, ours, rivals, forced, exact, oracles. Methods: hads, hads_no_exact_rows, hads_group, sink_window, "
    "mean_top_k, x_attention_8, x_attention_16, flash_prefill, each of the last five also as NAME+forced "
    "(with HADS's forced blocks) and NAME+exact (with HADS's last rows, too), oracle_top_k, oracle_top_k+forced, "
    "oracle_top_p+forced, oracle_gain."
)


def calibrate(
    texts: Texts,
    out: Annotated[Path, typer.Option(help="Where the profile goes (JSON).")],
    model: Model = "smollm2",
    length: Length = 4096,
    sequences: Sequences = 4,
    block: Annotated[int, typer.Option(help="Tokens per block of keys.", min=8)] = 64,
    block_q: Annotated[
        int | None, typer.Option(help="Tokens per row of blocks, a multiple of the block; by default the block.", min=8)
    ] = None,
    domains: Domains = None,
    dtype: DType = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say how much memory it takes, as the compiler counts it.")
    ] = False,
) -> None:
    """Measure a model's heads on a few texts, and write the profile by which HADS chooses their blocks.

    Layers are measured one after the other. A device holds the model, one block's forward and backward over one
    sequence, and the statistics of one layer over all sequences: the larger LENGTH / BLOCK, the more, by its square.
    The host holds about as much. Ask with --dry-run for the numbers of a model, a length and a number of sequences.

    Stopped in any way, the same command goes on after the last layer that was finished: they are kept in OUT.part.
    """
    with plain_errors():
        import numpy as np

        if dry_run:
            sizes: dict[str, Any] = dict(length=length, sequences=sequences, block=block, block_q=block_q)
            _say_memory(model, texts, domains, dtype, **sizes)
            return
        check_file_out(out)
        keep_compiled()
        from xsake.hads.calibration.calibrate import calibrate
        from xsake.hads.study.texts import load_texts
        from xsake.model.data.progress import part_of

        loaded, encode = _load(model, texts, dtype, length)
        found = load_texts(texts, length=length, limit=sequences, domains=_split(domains), encode=encode)
        typer.echo(
            f"{len(found)} sequences of {length} tokens from {', '.join(dict.fromkeys(t.domain for t in found))}"
        )
        unfinished = part_of(out)
        with shown_progress() as progress:
            profile = calibrate(
                loaded,
                np.stack([t.tokens for t in found]),
                name=name_of(model),
                block=block,
                block_q=block_q,
                progress=progress,
                steps_folder=unfinished,
            )
        profile.save(out)
        shutil.rmtree(unfinished)
        typer.echo(f"{profile!r}\n{out}")


def evaluate(
    texts: Texts,
    profile: Annotated[Path, typer.Option(help="The profile that `xsake calibrate` wrote.", exists=True)],
    out: Annotated[
        Path, typer.Option(help="A folder for records, tables and pictures; an interrupted run is continued.")
    ],
    model: Model = "smollm2",
    length: Length = 4096,
    sequences: Sequences = 4,
    methods: Annotated[str, typer.Option(help=f"Groups or methods, comma-separated. {METHODS}")] = "short",
    budgets: Annotated[str, typer.Option(help="Shares of active blocks, comma-separated.")] = "0.2,0.43",
    layers: Annotated[str, typer.Option(help="A budget's division among layers: profile or uniform.")] = "profile",
    batch: Annotated[int, typer.Option(help="Sequences at a time.", min=1)] = 1,
    domains: Domains = None,
    dtype: DType = None,
) -> None:
    """Compare HADS with other methods and with oracles at exactly equal numbers of blocks.

    The methods are a fixed pattern and xsake's own block-level versions of published methods.

    Each method changes the model's predictions; the table says how much, and whether HADS changes them less. Texts with
    questions (.npz files with `.items`) also show how many of the dense model's right answers each method keeps.
    """
    with plain_errors():
        import jax.numpy as jnp

        from xsake.hads.profile.fingerprint import knows_runs
        from xsake.hads.study.evaluation import evaluate
        from xsake.hads.study.methods.shipped import expand
        from xsake.hads.study.records import Records
        from xsake.hads.study.result import write
        from xsake.hads.study.texts import load_texts

        check_folder_out(out)
        keep_compiled()
        name = name_of(model)
        learned = load_profile(profile, name)
        if not knows_runs(learned.digests):
            print(f"{profile} is of an older version: it recognises its own texts only whole, not parts of them")
        names, shares = expand(methods), [float(b) for b in budgets.split(",")]
        loaded, encode = _load(model, texts, dtype, length)
        found = load_texts(texts, length=length, limit=sequences, domains=_split(domains), encode=encode)
        about = {"model": name, "length": length, "dtype": jnp.dtype(loaded.dtype).name}
        about |= learned.grid(length).shape
        records = Records(out / "records.jsonl", about)
        with shown_progress() as progress:
            evaluate(
                loaded,
                learned,
                found,
                methods=names,
                budgets=shares,
                records=records,
                batch=batch,
                layers=layers,
                progress=progress,
            )
        write(records, out, model=loaded, profile=learned, text=found[0])


def _say_memory(
    model: str,
    texts: list[Path],
    domains: str | None,
    dtype: str | None,
    *,
    length: int,
    sequences: int,
    block: int,
    block_q: int | None,
) -> None:
    from flax import nnx
    from rich.console import Console
    from rich.table import Table

    from xsake.hads.calibration.memory import needed
    from xsake.hads.study.texts import load_texts
    from xsake.model import Transformer, load_tokenizer, open_model

    file, kind = open_model(model), _dtype(dtype)
    _check_length(length, file.config)
    encode = load_tokenizer(file).encode if any(path.suffix != ".npz" for path in texts) else None
    count = len(load_texts(texts, length=length, limit=sequences, domains=_split(domains), encode=encode))
    types: dict[str, Any] = dict(dtype=kind, param_dtype=kind)
    shapes = nnx.eval_shape(lambda: Transformer(file.config, rngs=nnx.Rngs(0), **types))
    memory = needed(shapes, length=length, sequences=count, block=block, block_q=block_q)
    table = Table("memory", "GB", title=f"{name_of(model)}, {count} sequences of {length} tokens")
    for what, size in {"the weights": memory.weights, **memory.stages, "on the device at most": memory.device}.items():
        table.add_row(what, f"{size / 1e9:.2f}")
    table.add_row("on the host", f"{memory.host / 1e9:.2f}")
    Console().print(table)


def _load(
    model: str, texts: list[Path], dtype: str | None, length: int
) -> tuple[Any, Callable[[str], list[int]] | None]:
    """The model, which must read `length` tokens, and, if some text is plain, its tokenizer's `encode`."""
    from xsake.model import load_pretrained, load_tokenizer, open_model

    file, kind = open_model(model), _dtype(dtype)
    _check_length(length, file.config)
    encode = load_tokenizer(file).encode if any(path.suffix != ".npz" for path in texts) else None
    return load_pretrained(file, dtype=kind, param_dtype=kind), encode


def _check_length(length: int, config: Any) -> None:
    """Refuse a length before anything is written: records of it would refuse the command with another length."""
    if length > config.context:
        raise ValueError(f"--length {length} is beyond the model's context of {config.context}")


def _dtype(name: str | None) -> Any:
    import jax
    import jax.numpy as jnp

    kinds = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
    if name is None:
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if name not in kinds:
        raise ValueError(f"dtype={name!r} must be float32 or bfloat16")
    return kinds[name]


def _split(names: str | None) -> list[str] | None:
    return None if names is None else names.split(",")
