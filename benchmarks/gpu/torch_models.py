"""A model of transformers on torch that attends by xsake, beside torch's own attention and the same model in JAX.

    python -m benchmarks.gpu.torch_models                 Qwen2.5-1.5B with random weights, print
    python -m benchmarks.gpu.torch_models --record        also write benchmarks/results/gpu_torch_models.json
    python -m benchmarks.gpu.torch_models --out DIR --only prompt
    python -m benchmarks.gpu.torch_models --model tiny --prompt 512 --layer 128 --training 128 --rounds 2
                                                          a small run, anywhere

Needs torch and transformers beside JAX, in one process. Three races:

prompt: the time to the first token, by `generate(max_new_tokens=1)` in torch and as `xsake generate` reads in JAX,
dense and with HADS. layer: a forward of fewer tokens, where the host's time for each layer shows. training: the
gradient of the next token's loss for all weights.

torch runs a model operation by operation. "parts compiled" has `torch.compile` for what is between the calls of
attention: norms and feed-forward networks, and rotary positions. Nothing else differs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from jax import Array
from transformers.models.qwen2 import modeling_qwen2

import xsake.torch
from benchmarks.gpu.prompt import reader
from benchmarks.harness.models import MODELS, lent_profile, make, profile_of
from benchmarks.harness.race import timings
from benchmarks.harness.script import Record, Row, listed, parser, show, spread
from xsake._race.course import compile_all
from xsake.hads import HadsMask, HadsProfile
from xsake.model import HadsBudget, ModelConfig, Transformer
from xsake.model.training.loss import next_token_loss

RACES = ("prompt", "layer", "training")
COLUMNS = ["race", "tokens", "way", "ms", "quartiles", "of JAX's", "us per layer over sdpa"]
PARTS = ("mlp", "input_layernorm", "post_attention_layernorm")
LOSS_CHUNK = 4096  # tokens whose logits exist at once, in JAX
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Ways = dict[str, Callable[[], Any]]


def in_torch(config: ModelConfig) -> Any:
    """The model of transformers, its weights random."""
    shape = transformers.Qwen2Config(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        intermediate_size=config.mlp_width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.q_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
        tie_word_embeddings=config.tied,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(DEVICE):
        model = transformers.Qwen2ForCausalLM._from_config(shape, attn_implementation="xsake", dtype=torch.bfloat16)
    return model.eval()


def compile_parts(model: Any) -> Any:
    """What is between the calls of attention becomes one kernel where torch can fuse it; every layer uses the same."""
    for layer in model.model.layers:
        for name in PARTS:
            getattr(layer, name).compile()
    model.model.norm.compile()
    return model


def twin(model: Any) -> Any:
    """The same weights in modules of their own."""
    kept = {id(x): x for x in model.parameters()} | {id(x): x for x in model.buffers()}
    return copy.deepcopy(model, kept)


def wait(result: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    jax.block_until_ready([x for x in jax.tree.leaves(result) if isinstance(x, Array)])


class Subject:
    """A model in both frameworks."""

    def __init__(self, name: str, length: int, budgets: list[float]):
        self.config = dataclasses.replace(MODELS[name][0], qkv_bias=True)
        self.model: Transformer = make(self.config)
        is_large = self.config.head_dim == 128
        self.profile: HadsProfile = lent_profile(self.config) if is_large else profile_of(self.model, length)
        # Gradients of short key blocks take long.
        self.learning = self.profile.in_blocks(64, block_q=64) if is_large else self.profile
        self.torch = in_torch(self.config)
        self.budgets = budgets
        eager = modeling_qwen2.apply_rotary_pos_emb
        self._rotary = {"torch": eager, "torch, parts compiled": torch.compile(eager)}

    def tokens(self, length: int) -> np.ndarray:
        return np.random.default_rng(1).integers(1, self.config.vocab_size, length, np.int32)

    def ways(self, run: Callable[[Any], Any], profile: HadsProfile) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The model in torch by every attention; all have the same weights."""
        for how, rotary in self._rotary.items():
            for budget in (0.0, None, *self.budgets):
                model = twin(self.torch)
                model.set_attn_implementation("xsake" if budget != 0 else "sdpa")
                if budget:
                    xsake.torch.hads(model, budget, profile=profile, policy="always")
                if "compiled" in how:
                    compile_parts(model)
                who = {0.0: "sdpa", None: "xsake"}.get(budget, f"HADS {budget:.0%}" if budget else "")
                yield f"{how}: {who}", partial(self._run, run, model, rotary)

    @staticmethod
    def _run(run: Callable[[Any], Any], model: Any, rotary: Any) -> Any:
        modeling_qwen2.apply_rotary_pos_emb = rotary
        return run(model)

    # -- races -------------------------------------------------------------------------------------------------------

    def prompt(self, length: int) -> Ways:
        tokens = self.tokens(length)
        ids = torch.tensor(tokens, dtype=torch.long, device=DEVICE)[None]

        @torch.no_grad()
        def write(model: Any) -> Any:
            return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)

        own = {f"JAX: HADS {b:.0%}": HadsBudget(self.profile, prompt=b) for b in self.budgets}
        return {
            "JAX: xsake": reader(self.model, tokens),
            **{way: reader(self.model, tokens, hads=hads) for way, hads in own.items()},
            **dict(self.ways(write, self.profile)),
        }

    def layer(self, length: int) -> Ways:
        ids = torch.tensor(self.tokens(length), dtype=torch.long, device=DEVICE)[None]

        def read(model: Any) -> Any:
            with torch.no_grad():
                return model(ids, use_cache=False, logits_to_keep=1).logits

        return dict(self.ways(read, self.profile))

    def training(self, length: int) -> Ways:
        tokens = self.tokens(length)
        ids = torch.tensor(tokens, dtype=torch.long, device=DEVICE)[None]

        def learn(model: Any) -> Any:
            model.zero_grad(set_to_none=True)
            loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            return loss

        ways: Ways = {"JAX: xsake": self._step(tokens, None)}
        ways |= {f"JAX: HADS {b:.0%}": self._step(tokens, b) for b in self.budgets}
        return ways | dict(self.ways(learn, self.learning))

    def _step(self, tokens: np.ndarray, budget: float | None) -> Callable[[], Any]:
        weights, tree = jax.tree.flatten(self.model)
        given = jnp.asarray(tokens)[None]
        targets = jnp.concatenate([given[:, 1:], jnp.full((1, 1), -1, jnp.int32)], 1)
        mask_fn = None if budget is None else HadsMask.of(self.learning, budget, len(tokens))

        @jax.jit
        def gradient(weights: list[Array]) -> Any:
            def loss(weights: list[Array]) -> Array:
                model: Transformer = jax.tree.unflatten(tree, weights)
                return next_token_loss(model.hidden(given, mask_fn=mask_fn), model.output_weight, targets, LOSS_CHUNK)

            return jax.value_and_grad(loss)(weights)

        return partial(gradient, weights)


def measure(race: str, length: int, ways: Ways, layers: int, rounds: int) -> Row:
    failed: dict[str, str] = {}
    done: Ways = {}
    for way, run in ways.items():
        try:
            for _ in range(2):
                wait(run())
            done[way] = run
            print(f"{race}, {length} tokens: {way} runs", flush=True)
        except Exception as error:
            failed[way] = f"{type(error).__name__}: {error}"[:400]
            print(f"{race}, {length} tokens: {way} failed: {failed[way]}", flush=True)
    seconds = timings(done, rounds, wait=wait)
    return {"race": race, "length": length, "layers": layers, "seconds": seconds, "failed": failed}


def lines_of(row: Row) -> list[list[Any]]:
    lines, by = [], row["seconds"]
    for way, time in by.items():
        how, who = way.split(": ")
        own, sdpa = by.get(f"JAX: {who}"), by.get(f"{how}: sdpa")
        ratio = f"{time['median'] / own['median']:.3f}" if own and how != "JAX" else ""
        more = f"{(time['median'] - sdpa['median']) / row['layers'] * 1e6:.0f}" if sdpa and who != "sdpa" else ""
        lines.append([row["race"], row["length"], way, *spread(time), ratio, more])
    return lines + [[row["race"], row["length"], way, "failed", words, "", ""] for way, words in row["failed"].items()]


def main() -> None:
    options = parser(__doc__, rounds=7)
    options.add_argument("--model", default="qwen2.5-1.5b", choices=MODELS)
    options.add_argument("--only", type=listed(among=RACES), default=[*RACES], help="some of the races")
    options.add_argument("--prompt", type=int, default=32768, help="tokens of the prompt")
    options.add_argument("--layer", type=int, default=2048, help="tokens of the shorter forward")
    options.add_argument("--training", type=int, default=8192, help="tokens of the training step")
    options.add_argument("--budgets", type=listed(float), default=[0.2, 0.1])
    args = options.parse_args()
    xsake.torch.register()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    subject, rows = Subject(args.model, args.prompt, args.budgets), Record("gpu_torch_models", args.out, **versions)
    lengths = {race: getattr(args, race) for race in args.only}
    ways = {race: getattr(subject, race)(length) for race, length in lengths.items()}
    compile_all(run for found in ways.values() for way, run in found.items() if way.startswith("JAX"))
    for race, length in lengths.items():
        row = measure(race, length, ways[race], subject.config.layers, args.rounds)
        rows.add(row)
        show(COLUMNS, lines_of(row))


if __name__ == "__main__":
    main()
