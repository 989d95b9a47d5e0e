"""Every family of models against transformers' own implementation: `make parity-transformers`.

transformers makes a small model with random weights and saves it; xsake loads the files. Compared are the logits of a
prompt, in float32; the greedy continuation, which reads the cache; the same model saved again by xsake and loaded by
transformers; and what two kinds of tokenizers make of texts, from files and from a GGUF file's scores.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers_models import LENGTH, MODELS, SHAPE, TOKENS

from xsake.model import generate, load_pretrained, load_tokenizer, save_pretrained
from xsake.model.text.sentencepiece import by_scores

NEW, TOLERANCE = 12, 2e-4
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces, a tab\tand a\nnew line \n\n",
    "Zwölf Boxkämpfer jagen Viktor; 東京 🙂 x²",
    "def f(x):\n    return x ** 2  # 12345\n",
    "don't I'LL we've",
    "",
)


def main() -> int:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    console, failed = Console(), 0
    table = Table(
        "", "largest difference of logits", "saved again", "same continuation", title=_versions(), min_width=100
    )
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (family, options)) in enumerate(MODELS.items()):
            difference, again, same = compare(family, options, Path(folder) / str(number))
            ok = difference < TOLERANCE and again < TOLERANCE and same
            failed += not ok
            table.add_row(name, f"{difference:.1e}", f"{again:.1e}", "yes" if same else "no", style="" if ok else "red")
        console.print(table)
        for name, same in tokenizers_agree(Path(folder)):
            failed += not same
            console.print(f"{name}: {'the same tokens and texts' if same else 'NOT the same'}")
    return failed


def compare(family: str, options: dict[str, Any], folder: Path) -> tuple[float, float, bool]:
    """(difference relative to the largest logit, the same after xsake saved the model, whether generation agrees)."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE | options)
    theirs = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if name.endswith(("bias", "norm.weight")):  # these begin as zeros and ones
                weight.add_(0.2 * torch.randn_like(weight))
    theirs.save_pretrained(folder, max_shard_size="60KB")
    if len(list(folder.glob("*.safetensors"))) < 2:
        raise RuntimeError("transformers saved one file, and several were to be read")
    expected = logits_of(theirs, TOKENS)
    ours = load_pretrained(folder, dtype=jnp.float32)
    found = np.asarray(ours(jnp.asarray(TOKENS, jnp.int32)))
    save_pretrained(ours, folder / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "again", attn_implementation="eager")
    scale = np.abs(expected).max()
    prompt = torch.tensor(TOKENS)
    # A mask of ones: transformers would take the token 0 for padding.
    options = dict(attention_mask=torch.ones_like(prompt), do_sample=False, eos_token_id=None, pad_token_id=0)
    continued = theirs.generate(prompt, max_new_tokens=NEW, **options)
    same = generate(ours, TOKENS.tolist(), max_new_tokens=NEW) == continued[:, LENGTH:].tolist()
    return (
        float(np.abs(found - expected).max() / scale),
        float(np.abs(logits_of(again.float().eval(), TOKENS) - expected).max() / scale),
        same,
    )


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def tokenizers_agree(folder: Path) -> Iterator[tuple[str, bool]]:
    """Tokenizers that transformers saved beside a model."""
    import sentencepiece
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    source = Path(transformers.__file__).parent / "generation" / "utils.py"
    corpus = [*TEXTS[:-1], *source.read_text().splitlines()[:400]]
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator(corpus, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    fast.save_pretrained(folder / "0")
    ours = load_tokenizer(folder / "0")
    yield "byte-level BPE, tokenizer.json", _agree(ours, fast)
    message = [{"role": "user", "content": "hello"}]
    yield "its chat template", ours.chat(message) == fast.apply_chat_template(message, return_dict=False)

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_prefix=str(folder / "pieces"),
        vocab_size=900,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "pieces.model"))
    tokens = [pieces.id_to_piece(n) for n in range(pieces.vocab_size())]
    scores = [pieces.get_score(n) for n in range(len(tokens))]
    special = [token for n, token in enumerate(tokens) if pieces.is_control(n)]
    core = by_scores(tokens, scores, never=special, unknown=tokens[pieces.unk_id()], add_space=True)
    ours = Tokenizer.of(core, special=special, bos="<s>", eos="</s>", add_bos=True)
    texts = [text for text in TEXTS if text]
    same = all(ours.encode(text) == [pieces.bos_id(), *pieces.encode(text)] for text in texts)
    same &= all(ours.decode(pieces.encode(text)) == text for text in texts)
    yield "SentencePiece, by its scores as in GGUF files", same


def _agree(ours: Any, theirs: Any) -> bool:
    encoded = [theirs(text)["input_ids"] for text in TEXTS]
    return all(
        ours.encode(text) == ids and ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        for text, ids in zip(TEXTS, encoded, strict=True)
    )


def _versions() -> str:
    return f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"


if __name__ == "__main__":
    sys.exit(main())
