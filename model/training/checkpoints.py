"""Checkpoints of a run: written in the background, each whole or absent, the last few kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from xsake._ground import atomic
from xsake._ground.fields import check
from xsake._ground.kinds import TABLE


class Checkpoints:
    """The checkpoints in a folder: per step the trees "state" and maybe "mask", and a description of the run.

    Orbax writes to a temporary folder and renames it when everything is there: a process that is killed leaves the
    previous checkpoint.
    """

    def __init__(self, folder: Path, *, keep: int = 1, read_only: bool = False):
        self._folder = folder.absolute()
        if not read_only:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                atomic.check_writable(folder / "checkpoint")
            except OSError as error:
                raise ValueError(f"checkpoints cannot be written to {folder}: {error.strerror}") from error
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep,
            cleanup_tmp_directories=not read_only,
            create=not read_only,  # Orbax's own read_only would warn each time
        )
        handlers: dict[str, Any] = {name: ocp.StandardCheckpointHandler() for name in ("state", "mask")}
        handlers["about"] = ocp.JsonCheckpointHandler()
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)

    def steps(self) -> list[int]:
        """The steps that have a whole checkpoint, in ascending order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, trees: dict[str, Any], description: dict[str, Any]) -> None:
        """Start writing and return; the caller may change or donate the trees at once."""
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        self._manager.save(step, args=ocp.args.Composite(**items, about=ocp.args.JsonSave(description)))

    def describe(self, step: int) -> dict[str, Any]:
        with self._plain_errors(step):
            about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
            for name in ("config", "data"):
                check(name, about[name], TABLE)
        return about

    def restore(self, step: int, name: str, like: Any) -> Any:
        """A saved tree, with the shapes and on the devices of `like`, whatever mesh the tree was saved from."""
        args = ocp.args.Composite(**{name: ocp.args.StandardRestore(like)})
        with self._plain_errors(step):
            return self._manager.restore(step, args=args)[name]

    def restore_leaves(self, step: int, name: str, where: jax.sharding.Sharding) -> list[jax.Array]:
        """A list of arrays, with the shapes that were saved."""
        with self._plain_errors(step):
            saved = self._manager.item_metadata(step)[name]
        like = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where) for leaf in jax.tree.leaves(saved)]
        return self.restore(step, name, like)

    @contextlib.contextmanager
    def _plain_errors(self, step: int) -> Iterator[None]:
        """Raise ValueError for a damaged checkpoint, over which Orbax and its libraries raise errors of every kind."""
        try:
            yield
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
            raise ValueError(
                f"the checkpoint {self._folder / str(step)} cannot be read: {reason}. Move this folder away, and the "
                f"run goes on from the checkpoint before it"
            ) from error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: Any) -> None:
        """Waits until the last checkpoint is written."""
        self._manager.close()
