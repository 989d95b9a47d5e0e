"""`xsake generate`: a model's answer to a prompt, token by token."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from xsake._cli.errors import plain_errors
from xsake._cli.options import load_profile
from xsake._ground.read import decode, read_bytes


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to answer or, with --raw, to continue; - reads the standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file; - is the standard input.")] = None,
    model: Annotated[
        str, typer.Option(help="A published model, a GGUF or safetensors file, or a training run.")
    ] = "smollm2",
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
    hads: Annotated[
        float | None,
        typer.Option(
            help="Read the prompt with HADS: the share of the blocks that is read, such as 0.2.", min=0, max=1
        ),
    ] = None,
    decode_budget: Annotated[
        float | None,
        typer.Option(
            help="With --hads: the share of the cache's blocks that a new token attends to, such as 0.1.", min=0, max=1
        ),
    ] = None,
    hads_policy: Annotated[
        str,
        typer.Option(
            help="With --hads: auto reads and writes densely where that is as fast, and always does not.",
        ),
    ] = "auto",
    chunk: Annotated[
        int | None,
        typer.Option(help="Read so many tokens of the prompt at a time, in multiples of the profile's rows.", min=1),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="With --hads: what `xsake calibrate` wrote. By default the model's own, which is made once and kept.",
            exists=True,
        ),
    ] = None,
) -> None:
    """Answer a prompt with a pretrained model, greedily or by drawing.

    The time to the first token is told on the standard error; on a first run it includes compiling. So is the speed of
    writing, from the second token on, when everything is compiled.
    """
    with plain_errors():
        # Before the model's weights are loaded: whatever can be refused is refused at once.
        if hads is None and (profile is not None or decode_budget is not None):
            raise ValueError("--profile and --decode-budget are for --hads: give a budget, such as --hads 0.2")
        if window is not None and (hads is not None or chunk is not None):
            raise ValueError(
                "--window reads the prompt by a fixed pattern and in one piece: leave out --hads and --chunk"
            )
        text = _text(prompt, file)

        from xsake.model.weights.model_file import open_model
        from xsake.model.weights.published import name_of

        opened = open_model(model)

        import jax
        import jax.numpy as jnp

        import xsake
        from xsake._ground.cache import keep_compiled
        from xsake._ground.fields import check
        from xsake._ground.kinds import maybe, number
        from xsake.hads.calibration.own_profile import own_profile
        from xsake.hads.profile.budgets import uniform_counts
        from xsake.model import HadsBudget, load_pretrained, load_tokenizer, stream
        from xsake.model.generation.generation import check_request
        from xsake.model.generation.memory import check_memory
        from xsake.model.generation.sampling import Sampler

        keep_compiled()
        sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p)
        tokenizer = load_tokenizer(opened)
        if raw or tokenizer.template is None:
            if system is not None:
                raise ValueError("--system needs a model with a chat template, and no --raw")
            tokens = tokenizer.encode(text)
        else:
            messages = [] if system is None else [{"role": "system", "content": system}]
            tokens = tokenizer.chat([*messages, {"role": "user", "content": text}])
        budget = None
        if hads is not None:
            share = number(above=0, most=1)
            check("prompt", hads, share)
            check("decode", decode_budget, maybe(share))
            if profile is not None:
                budget = HadsBudget(load_profile(profile, name_of(model)), hads, decode_budget, hads_policy)  # type: ignore[arg-type]
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16  # a CPU is slower in bfloat16

        def decided(given: HadsBudget) -> HadsBudget:
            given.check(opened.config, len(tokens))
            decisions = given.decisions([len(tokens)], chunk=chunk, dtype=dtype)
            for what, decision in decisions.items():
                typer.echo(f"HADS, {'reading' if what == 'prompt' else 'writing'}: {decision}", err=True)
            return given.as_decided(decisions)

        budget = None if budget is None else decided(budget)
        request: dict[str, Any] = dict(max_new_tokens=max_new_tokens, seed=seed, hads=budget, chunk=chunk)
        known = hads is None or profile is not None  # a chunk is a multiple of the profile's rows
        capacity, _ = check_request(opened.config, [tokens], **request if known else request | {"chunk": None})

        if window is None:
            sizes: dict[str, Any] = dict(batch=1, length=len(tokens), capacity=capacity, chunk=chunk)
            learned = None if budget is None else budget.profile
            check_memory(opened.config, **sizes, itemsize=jnp.dtype(dtype).itemsize, profile=learned)
        transformer = load_pretrained(opened, dtype=dtype, param_dtype=dtype)
        if hads is not None and profile is None:
            found = own_profile(
                transformer,
                lambda: transformer,
                tokenizer.encode,
                name=name_of(model),
                length=len(tokens),
                context=transformer.config.context,
                slow=jax.default_backend() == "cpu",
                check=partial(uniform_counts, opened.config.layers, opened.config.q_heads, hads),
            )
            request["hads"] = decided(HadsBudget(found, hads, decode_budget, hads_policy))  # type: ignore[arg-type]
            check_request(opened.config, [tokens], **request)

        def sparse(layer, query, key):
            lengths = query.shape[1], key.shape[1]
            return xsake.patterns.sink_window(*lengths, sink=sink, window=window, block_q=block, block_kv=block)

        mask_fn = None if window is None else sparse
        steps = stream(transformer, [tokens], sampler=sampler, mask_fn=mask_fn, **request)
        clock = _Clock(len(tokens))
        answer = itertools.takewhile(lambda token: token not in tokenizer.stop, clock.watch(steps))
        for piece in tokenizer.decode_stream(answer):
            typer.echo(piece, nl=False)
        typer.echo()
        typer.echo(str(clock), err=True)


def _text(prompt: str | None, file: Path | None) -> str:
    """The prompt, or the text of a file or of the standard input, without the newlines at its end."""
    if (prompt is None) == (file is None):
        raise ValueError("give one prompt: as an argument, in a file (--file PATH), or on the standard input (-)")
    if file is None and prompt != "-":
        return str(prompt)
    if "-" in (prompt, str(file)):
        return decode("the standard input", typer.get_binary_stream("stdin").read()).rstrip("\n")
    return decode(str(file), read_bytes(str(file))).rstrip("\n")


class _Clock:
    """When the first, the second and the last token came. The second one waits for its program to be compiled."""

    def __init__(self, prompt: int):
        self._prompt, self._tokens = prompt, 0
        self._start = self._first = self._second = self._last = time.perf_counter()

    def watch(self, steps: Iterable[Any]) -> Iterator[int]:
        for step in steps:
            self._tokens += 1
            self._last = time.perf_counter()
            if self._tokens == 1:
                self._first = self._last
            if self._tokens == 2:
                self._second = self._last
            yield int(step[0])

    def __str__(self) -> str:
        first = f"time to first token {self._first - self._start:.2f} s ({self._prompt} tokens read)"
        if self._tokens < 3:
            return first
        return f"{first}, then {(self._tokens - 2) / (self._last - self._second):.1f} tokens/s"
