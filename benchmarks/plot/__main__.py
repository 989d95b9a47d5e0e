"""The pictures of the recorded runs.

python -m benchmarks.plot     rewrites results/gpu_attention.png, results/hads/*.png and results/train_gpu.png
"""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

from benchmarks.plot import gpu, hads, train

for picture in (gpu, hads, train):
    picture.draw()
