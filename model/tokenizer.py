"""A pretrained model's tokenizer: text to tokens and back, and conversations as its model was taught to read them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

# How text is cut before merging, by llama.cpp's names for it.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False),),
    "smollm": (pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama-bpe": (
        pre_tokenizers.Split(tokenizers.Regex(_LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """What `load_tokenizer` returns.

    core: the tokenizer of the `tokenizers` library.
    eos: the token that ends an answer; bos: the one that begins a text, if any.
    template: the model's chat template (Jinja), if it has one.
    """

    core: tokenizers.Tokenizer
    eos: str | None
    bos: str | None = None
    template: str | None = None

    @property
    def vocab_size(self) -> int:
        return self.core.get_vocab_size()

    @property
    def stop(self) -> frozenset[int]:
        """Tokens after which generation ends."""
        number = None if self.eos is None else self.core.token_to_id(self.eos)
        return frozenset() if number is None else frozenset({number})

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text, with the beginning token if the model is used to one."""
        return self.core.encode(text).ids

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens; those that are not text, such as the end of an answer, are left out."""
        return self.core.decode(list(tokens))

    def decode_stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """`decode`, piece by piece as tokens arrive; never half a character."""
        stream = decoders.DecodeStream(skip_special_tokens=True)
        for token in tokens:
            if piece := stream.step(self.core, token):
                yield piece

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Tokens of a conversation, up to where the model answers.

        A message is {"role": "system" | "user" | "assistant", "content": text}.
        """
        if self.template is None:
            raise ValueError("this model has no chat template: it continues text, with `encode`")
        import jinja2.sandbox

        def refuse(message: str) -> None:
            raise ValueError(f"the model's chat template refuses these messages: {message}")

        # As Hugging Face renders them; sandboxed, because a template is code from a file.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        text = environment.from_string(self.template).render(
            messages=messages, add_generation_prompt=True, bos_token=self.bos or "", eos_token=self.eos or ""
        )
        return self.core.encode(text, add_special_tokens=False).ids


def byte_level_bpe(
    *,
    tokens: list[str],
    merges: list[str],
    split: str,
    special: list[str],
    bos: str | None,
    eos: str,
    add_bos: bool,
    template: str | None,
) -> Tokenizer:
    """A tokenizer from its parts; `split` is llama.cpp's name of how text is cut into words."""
    if split not in _SPLITS:
        raise NotImplementedError(f"text split {split!r} is not supported; these are: {', '.join(_SPLITS)}")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    core = tokenizers.Tokenizer(models.BPE(vocabulary, [_pair(merge) for merge in merges]))
    core.pre_tokenizer = pre_tokenizers.Sequence(list(_SPLITS[split]))  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    core.add_special_tokens(special)
    if add_bos and bos is not None:
        core.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    return Tokenizer(core=core, eos=eos, bos=bos, template=template)


def from_folder(folder: Path) -> Tokenizer:
    """tokenizer.json and, if it is there, tokenizer_config.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: the tokenizer must be beside the model's weights")
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is no tokenizer file: {error}") from error
    beside = folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(beside.read_text()) if beside.is_file() else {}
    bos, eos = (_text(config.get(name)) for name in ("bos_token", "eos_token"))
    return Tokenizer(core=core, eos=eos, bos=bos, template=config.get("chat_template"))


def _pair(merge: str) -> tuple[str, str]:
    first, _, second = merge.partition(" ")
    return first, second


def _text(token: Any) -> str | None:
    """A token in tokenizer_config.json is text, or a dictionary that holds it."""
    return token["content"] if isinstance(token, dict) else token
