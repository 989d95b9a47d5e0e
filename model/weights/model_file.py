"""Open a model's file: a published model by its name; a GGUF or safetensors file, or a training run, by its path.

Nothing here needs Flax, so that a file which cannot be loaded is refused at once.
"""

from __future__ import annotations

import os
from pathlib import Path

from xsake.model.weights import fetch
from xsake.model.weights.gguf_file import GGUFFile
from xsake.model.weights.published import PUBLISHED
from xsake.model.weights.safetensors_file import SafetensorsFolder
from xsake.model.weights.trained_run import TrainedRun, is_run

WeightsFile = GGUFFile | SafetensorsFolder
ModelFile = WeightsFile | TrainedRun


def open_model(path_or_name: str | os.PathLike | ModelFile) -> ModelFile:
    """Open a model's file: its configuration is read, its weights are not yet."""
    if isinstance(path_or_name, ModelFile):
        return path_or_name
    path = Path(path_or_name)
    if str(path_or_name) in PUBLISHED:
        path = fetch.place(str(path_or_name))
        if not path.exists():
            raise FileNotFoundError(
                f"{path_or_name} is not here yet: run `xsake model fetch {path_or_name}`, or put its file at {path}"
            )
    if not path.is_file() and not path.is_dir():
        raise FileNotFoundError(f"{path} is no file, and no published model ({', '.join(PUBLISHED)})")
    if is_run(path) and not any(path.glob("*.safetensors")):
        return TrainedRun(path)
    return GGUFFile(path) if path.suffix == ".gguf" else SafetensorsFolder(path)
