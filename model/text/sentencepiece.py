"""SentencePiece's tokenizers, made from tokens and their scores: text is merged into the pieces of highest score."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers

from xsake.model.text.tokenizer_file import plain_tokenizer_errors

_SPACE = "▁"  # stands for a space in a token
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]  # what no token spells is written byte by byte
_LONGEST = 512  # characters of a token that is merged from others


def by_scores(
    tokens: list[str], scores: list[float], *, never: list[str], unknown: str | None, add_space: bool
) -> tokenizers.Tokenizer:
    """A tokenizer that merges, in every text, the two neighbours whose joint token has the highest score.

    Tokens of `never` are not made by merging. `add_space` puts a space before a text, as Llama 2 and Mistral expect.
    """
    vocabulary = {token: number for number, token in enumerate(tokens)}
    with plain_tokenizer_errors("no tokenizer can be made of its tokens and scores"):
        model = models.BPE(
            vocabulary,
            _merges(vocabulary, scores, never=frozenset(never)),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=all(token in vocabulary for token in _BYTES),
        )
        core = tokenizers.Tokenizer(model)
        steps = [normalizers.Replace(" ", _SPACE)]
        core.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *steps] if add_space else steps)  # type: ignore[assignment]
        pieces = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        core.decoder = decoders.Sequence([*pieces, decoders.Strip(" ", 1, 0)] if add_space else pieces)  # type: ignore[assignment]
    return core


def _merges(vocabulary: dict[str, int], scores: list[float], *, never: frozenset[str]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the tokens of highest score first.

    A token's ways come in the order of their parts' numbers, as in Hugging Face's conversion.
    """
    number_of = vocabulary.get
    ways = []
    for token, number in vocabulary.items():
        if not 2 <= len(token) <= _LONGEST or token in never:
            continue
        for cut in range(1, len(token)):
            if (a := number_of(token[:cut])) is not None and (b := number_of(token[cut:])) is not None:
                ways.append((-scores[number], number, a, b))
    tokens = {number: token for token, number in vocabulary.items()}
    return [(tokens[a], tokens[b]) for _, _, a, b in sorted(ways)]
