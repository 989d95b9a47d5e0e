"""The model in the folder of a training run: its last checkpoint, and the tokenizer of its data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsake.model.data.shards import TOKENIZER_FILE
from xsake.model.network import families
from xsake.model.training.watch.run_file import CHECKPOINTS_FOLDER

if TYPE_CHECKING:
    from xsake.model.network.transformer import Transformer
    from xsake.model.text.tokenizer import Tokenizer


def is_run(path: Path) -> bool:
    return (path / CHECKPOINTS_FOLDER).is_dir()


class TrainedRun:
    """One run of `xsake train`; the weights of its last checkpoint are read only by `load`."""

    def __init__(self, run: Path):
        from xsake.model.training.trained import describe

        self._run = run
        self.step, about, config = describe(run)
        self.config, self._fingerprint = config.model, about["data"].get("tokenizer")
        self.path = run / CHECKPOINTS_FOLDER / str(self.step)

    @property
    def formats(self) -> dict[str, int]:
        """How many tensors are stored in which way."""
        return {"F32": len(families.hugging_face_names(self.config))}

    def load(self, **options: Any) -> Transformer:
        """The model, with the options of `load_trained`."""
        from xsake.model.training.trained import load_trained

        return load_trained(self._run, step=self.step, **options)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run's data, which `train` has put into the run's folder."""
        from xsake.model.data.tokenizer import END_OF_TEXT, fingerprint
        from xsake.model.text import tokenizer

        path = self._run / TOKENIZER_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: copy it from the folder of the data of this run")
        found = tokenizer.from_folder(self._run)
        if fingerprint(found.core) != self._fingerprint:
            raise ValueError(f"{path} is not the tokenizer of the data of this run: copy that one there")
        return dataclasses.replace(found, eos=END_OF_TEXT)
