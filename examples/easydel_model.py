"""A model of EasyDeL whose attention is xsake. docs/coming_from.md says how EasyDeL is installed beside xsake.

python examples/easydel_model.py
"""

import os

import easydel as ed
import jax
import jax.numpy as jnp
from flax import nnx

os.environ.pop("XLA_FLAGS", None)  # EasyDeL's own, of which jaxlib 0.10 and newer know some no more, and stop

from xsake.compat.easydel import register


def model(mechanism):
    config = ed.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attn_mechanism=mechanism,
        attn_dtype=jnp.float32,
    )
    return ed.LlamaForCausalLM(
        config=config, dtype=jnp.float32, param_dtype=jnp.float32, precision="highest", rngs=nnx.Rngs(0)
    )


@nnx.jit
def logits_and_gradients(model, tokens, attention_mask):
    def loss(model):
        logits = model(input_ids=tokens, attention_mask=attention_mask).logits
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1)[..., 0]
        return (losses * attention_mask[:, 1:]).mean(), logits

    gradients, logits = nnx.grad(loss, has_aux=True)(model)
    return jnp.where(attention_mask[..., None], logits, 0), jax.tree.leaves(gradients)


def main():
    register()  # in EasyDeL's own registry, in the place of its "blocksparse"
    theirs, ours = model("vanilla"), model("blocksparse")
    tokens = jax.random.randint(jax.random.key(0), (2, 100), 0, 128)
    whole = jnp.ones((2, 100), bool)
    padded = jnp.arange(100)[None] < jnp.array([100, 63])[:, None]
    for name, attention_mask in {"whole": whole, "padded": padded}.items():
        with ours.mesh:
            found, wanted = (logits_and_gradients(x, tokens, attention_mask) for x in (ours, theirs))
        worst = [float(x) for x in jax.tree.leaves(jax.tree.map(lambda a, b: jnp.abs(a - b).max(), found, wanted))]
        assert max(worst) < 1e-4, worst
        print(f"easydel {ed.__version__}, {name}: logits {worst[0]:.1e}, gradients {max(worst[1:]):.1e}", flush=True)


if __name__ == "__main__":
    main()
