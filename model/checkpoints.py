"""Checkpoints of a run: written in the background, each whole or absent, the last few kept."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints below a folder, each of one step: trees "state" and maybe "mask", and what they belong to.

    Orbax writes to a temporary folder and renames it when everything is there: a process that is killed leaves the
    previous checkpoint.
    """

    def __init__(self, folder: Path, *, keep: int = 1, read_only: bool = False):
        if keep < 1:
            raise ValueError(f"{keep=} must be at least 1")
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep,
            cleanup_tmp_directories=not read_only,
            create=not read_only,
            read_only=read_only,
        )
        handlers: dict[str, Any] = {name: ocp.StandardCheckpointHandler() for name in ("state", "mask")}
        handlers["about"] = ocp.JsonCheckpointHandler()
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handlers)

    def steps(self) -> list[int]:
        """Of which there is a whole checkpoint, the last one last."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, trees: dict[str, Any], description: dict[str, Any]) -> None:
        """Start writing and return; what is saved may be changed or donated at once."""
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        self._manager.save(step, args=ocp.args.Composite(**items, about=ocp.args.JsonSave(description)))

    def describe(self, step: int) -> dict[str, Any]:
        return self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]

    def restore(self, step: int, name: str, like: Any) -> Any:
        """A tree, with the shapes and on the devices of `like`, whatever mesh it was saved from."""
        args = ocp.args.Composite(**{name: ocp.args.StandardRestore(like)})
        return self._manager.restore(step, args=args)[name]

    def restore_leaves(self, step: int, name: str, where: jax.sharding.Sharding) -> list[jax.Array]:
        """A list of arrays, with the shapes that were saved."""
        saved = self._manager.item_metadata(step)[name]
        like = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where) for leaf in jax.tree.leaves(saved)]
        return self.restore(step, name, like)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits until the last one is written."""
        self._manager.close()
