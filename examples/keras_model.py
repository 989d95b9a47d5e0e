"""A Keras model on the JAX backend whose attention is xsake: needs pip install keras.

KERAS_BACKEND=jax python examples/keras_model.py

Keras has no argument for an attention function: its documentation offers a subclass that overrides
`_compute_attention`.
"""

import keras
import numpy as np

import xsake

assert keras.backend.backend() == "jax", "run with KERAS_BACKEND=jax"


class BlockSparseAttention(keras.layers.MultiHeadAttention):
    def __init__(self, *arguments, block_mask=None, **options):
        super().__init__(*arguments, **options)
        self.block_mask = block_mask

    def _compute_attention(
        self,
        query,
        key,
        value,
        attention_mask=None,
        training=None,
        return_attention_scores=False,
        use_causal_mask=False,
    ):
        if return_attention_scores or (training and self.dropout):
            raise NotImplementedError(
                "xsake keeps no attention weights: no return_attention_scores, no dropout of them"
            )
        bias = None  # of padding; Keras joins its masks of queries, of keys and, beside them, the causal rule
        if attention_mask is not None:
            bias = keras.ops.where(attention_mask, 0.0, -float("inf"))[:, None]
        out = xsake.attention(query, key, value, self.block_mask, bias=bias, is_causal=use_causal_mask)
        return out, None


def model(attention):
    tokens = keras.Input((128,), dtype="int32")
    x = keras.layers.Embedding(64, 32)(tokens)
    x = x + attention(x, x, use_causal_mask=True)
    return keras.Model(tokens, keras.layers.Dense(64)(x))


def main():
    keras.utils.set_random_seed(0)
    theirs = model(keras.layers.MultiHeadAttention(4, 8))
    ours = model(BlockSparseAttention(4, 8))
    ours.set_weights(theirs.get_weights())
    tokens = np.random.default_rng(0).integers(0, 64, (2, 128))
    np.testing.assert_allclose(ours(tokens), theirs(tokens), atol=1e-5)

    padded = np.arange(128)[None] < np.array([128, 70])[:, None]
    x = np.random.default_rng(1).normal(size=(2, 128, 32)).astype("float32")
    masks = dict(query_mask=padded, value_mask=padded, use_causal_mask=True)
    layers = [of.layers[2] for of in (ours, theirs)]
    a, b = (np.asarray(layer(x, x, **masks))[padded] for layer in layers)
    np.testing.assert_allclose(a, b, atol=1e-5)

    window = xsake.patterns.sink_window(128, 128, sink=16, window=32, block_q=16, block_kv=16)
    sparse = model(BlockSparseAttention(4, 8, block_mask=window))
    sparse.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    losses = sparse.fit(tokens, tokens, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    print("keras", keras.__version__, losses)


if __name__ == "__main__":
    main()
