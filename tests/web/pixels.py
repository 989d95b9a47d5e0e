"""Masks read back from the pixels of a canvas."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

_CLASSES = """(selector) => {
  const canvas = document.querySelector(selector);
  const probe = document.createElement("i");
  document.body.append(probe);
  const colours = ["--dropped", "--kept", "--map-paper"].map((name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color.match(/\\d+/g).join();
  });
  probe.remove();
  const { width, height } = canvas;
  const pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  const classes = new Uint8Array(width * height);
  for (let n = 0; n < classes.length; n++) {
    classes[n] = colours.indexOf(`${pixels[4 * n]},${pixels[4 * n + 1]},${pixels[4 * n + 2]}`) & 255;
  }
  let text = "";
  for (const one of classes) text += String.fromCharCode(one);
  return [width, btoa(text)];
}"""


def kept_pixels(page: Any, selector: str, side: int) -> np.ndarray:
    """bool[side, side] from a canvas that shows kept blocks; every pixel must agree with its block."""
    width, text = page.evaluate(_CLASSES, selector)
    classes = np.frombuffer(base64.b64decode(text), np.uint8).reshape(width, width)
    assert width % side == 0, f"{width} pixels for {side} blocks"
    each = width // side
    blocks = classes[each // 2 :: each, each // 2 :: each]
    whole = np.kron(blocks, np.ones((each, each), np.uint8))
    inside = np.arange(width) % each >= (1 if each >= 12 else 0)  # wide blocks have lines between them
    assert np.array_equal(classes[inside][:, inside], whole[inside][:, inside]), "a pixel disagrees with its block"
    causal = np.tril(np.ones((side, side), bool))
    assert set(np.unique(blocks[causal])) <= {0, 1} and set(np.unique(blocks[~causal])) == {2}
    return blocks == 1
