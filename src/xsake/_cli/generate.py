"""`xsake generate`: a model's answer to a prompt, token by token."""

from __future__ import annotations

import itertools
from typing import Annotated

import typer

from xsake._cli.errors import plain_errors


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to answer or, with --raw, to continue.")],
    model: Annotated[str, typer.Option(help="A published model, or a GGUF or safetensors file.")] = "smollm2",
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer, in tokens.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", min=0)] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw only from this many of the likeliest tokens.", min=1)] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens up to this probability.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
    system: Annotated[str | None, typer.Option(help="What the model is told about its role.")] = None,
    raw: Annotated[bool, typer.Option(help="Continue the prompt's text, without the chat template.")] = False,
    window: Annotated[
        int | None,
        typer.Option(help="Read the prompt sparsely: each token sees this many tokens before it.", min=0),
    ] = None,
    sink: Annotated[int, typer.Option(help="With --window: first tokens that every token sees.", min=0)] = 64,
    block: Annotated[int, typer.Option(help="With --window: tokens per block.", min=1, max=4096)] = 64,
) -> None:
    """Answer a prompt with a pretrained model, greedily or by drawing."""
    with plain_errors():
        from xsake.model.model_file import open_model

        file = open_model(model)  # first: a model that cannot be loaded is refused at once

        import jax
        import jax.numpy as jnp

        import xsake
        from xsake.model import load_pretrained, load_tokenizer, stream
        from xsake.model.fetch import cache_folder
        from xsake.model.sampling import Sampler

        # Compiling takes longer than answering: the next run reads the compiled programs from this cache.
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
        sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p)
        tokenizer = load_tokenizer(file)
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16  # a CPU is slower in bfloat16
        transformer = load_pretrained(file, dtype=dtype, param_dtype=dtype)
        if raw or tokenizer.template is None:
            if system is not None:
                raise ValueError("--system needs a model with a chat template, and no --raw")
            tokens = tokenizer.encode(prompt)
        else:
            messages = [] if system is None else [{"role": "system", "content": system}]
            tokens = tokenizer.chat([*messages, {"role": "user", "content": prompt}])

        def sparse(layer, query, key):
            lengths = query.shape[1], key.shape[1]
            return xsake.patterns.sink_window(*lengths, sink=sink, window=window, block_q=block, block_kv=block)

        steps = stream(
            transformer,
            [tokens],
            max_new_tokens=max_new_tokens,
            sampler=sampler,
            seed=seed,
            mask_fn=None if window is None else sparse,
        )
        answer = itertools.takewhile(lambda token: token not in tokenizer.stop, (int(step[0]) for step in steps))
        for piece in tokenizer.decode_stream(answer):
            typer.echo(piece, nl=False)
        typer.echo()
