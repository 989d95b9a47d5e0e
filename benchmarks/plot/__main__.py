"""The pictures of the recorded runs.

python -m benchmarks.plot     rewrites results/gpu_attention.png, gpu_prompt_long.png, hads/*.png and train_gpu.png
"""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

from benchmarks.plot import gpu, hads, prompt, train

for picture in (gpu, hads, prompt, train):
    picture.draw()
