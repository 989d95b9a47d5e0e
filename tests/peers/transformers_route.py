"""transformers' "sdpa", which its tests take by default, is xsake. They import from their repository's root, too."""

import sys
from pathlib import Path

import xsake.torch

sys.path.append(str(Path(__file__).resolve().parents[2] / ".peers" / "transformers"))
xsake.torch.register("sdpa")
