"""Checkpoints of a run: written in the background, each whole or absent, checked when read, the last few kept."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shlex
import sys
import traceback
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from xsake._ground import atomic
from xsake._ground.fields import check
from xsake._ground.kinds import TABLE
from xsake._ground.read import check_names, reason
from xsake.model.training.checksums import checksums

_log = logging.getLogger("xsake")
_DESCRIPTION = ("config", "data")
_CHECKSUMS = "checksums"  # of the description and of each tree; checkpoints of older versions have none


class Checkpoints:
    """The checkpoints in a folder: per step the trees "state" and maybe "mask", and a description of the run.

    Orbax writes to a temporary folder and renames it when everything is there: a process that is killed leaves the
    previous checkpoint. Each array's checksum is stored beside the description, and compared when the array is read.
    """

    def __init__(self, folder: Path, *, keep: int = 1, read_only: bool = False):
        _quieten_orbax()
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
        sums: dict[str, Any] = {name: checksums(tree) for name, tree in trees.items()}
        about = {**description, _CHECKSUMS: sums | {"description": _checksum(description)}}
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        with self._writing():
            self._manager.save(step, args=ocp.args.Composite(**items, about=ocp.args.JsonSave(about)))

    def describe(self, step: int) -> dict[str, Any]:
        with self._reading(step):
            return self._about(step)[0]

    def _about(self, step: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The description, and all checksums; None if the checkpoint has none."""
        about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        check("about", about, TABLE)
        description = {name: value for name, value in about.items() if name != _CHECKSUMS}
        for name in _DESCRIPTION:
            check(name, check_names(description, _DESCRIPTION)[name], TABLE)
        if _CHECKSUMS not in about:
            return description, None
        check(_CHECKSUMS, about[_CHECKSUMS], TABLE)
        if about[_CHECKSUMS].get("description") != _checksum(description):
            raise ValueError("its description is not the one that was saved")
        return description, about[_CHECKSUMS]

    def restore(self, step: int, name: str, like: Any) -> Any:
        """A saved tree, with the shapes and on the devices of `like`, whatever mesh the tree was saved from."""
        args = ocp.args.Composite(**{name: ocp.args.StandardRestore(like)})
        with self._reading(step):
            saved = self._about(step)[1]
            tree = self._manager.restore(step, args=args)[name]
            if saved is None:
                _log.warning("%s was saved without checksums: its %s is not checked", self._folder / str(step), name)
                return tree
            found = checksums(tree)
            check(name, saved.get(name), TABLE)
            if wrong := sorted(place for place, value in found.items() if saved[name].get(place) != value):
                raise ValueError(f"{len(wrong)} of {len(found)} arrays are not what was saved, such as {wrong[0]}")
        return tree

    def restore_leaves(self, step: int, name: str, where: jax.sharding.Sharding) -> list[jax.Array]:
        """A list of arrays, with the shapes that were saved."""
        with self._reading(step):
            saved = self._manager.item_metadata(step)[name]
            like = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where) for leaf in jax.tree.leaves(saved)]
        return self.restore(step, name, like)

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Raise ValueError for a damaged checkpoint, over which Orbax and its libraries raise errors of every kind."""
        try:
            yield
        except Exception as error:
            raise ValueError(
                f"the checkpoint {self._folder / str(step)} cannot be read: {_why(error)}. {self._way_back(step)}"
            ) from error

    def _way_back(self, step: int) -> str:
        """The command after which a run goes on without the checkpoint of `step`."""
        places = (self._folder.with_name(f"damaged-{step}{more}") for more in ("", *(f"-{n}" for n in range(2, 1000))))
        away = next(place for place in places if not place.exists())
        command = shlex.join(["mv", str(self._folder / str(step)), str(away)])
        before = [other for other in self.steps() if other < step]
        where = f"goes on from the checkpoint before it, of step {before[-1]}" if before else "begins anew"
        return f"Move this folder away, and the run {where}: {command}"

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._manager.reload()  # Orbax dropped those that the failed one would have replaced
            steps = self.steps()
            where = f"goes on from step {steps[-1]}" if steps else "begins anew"
            raise ValueError(
                f"no checkpoint could be written to {self._folder}: {_why(error)}. When that is mended, the same "
                f"command {where}"
            ) from error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: Any) -> None:
        """Waits until the last checkpoint is written."""
        with self._writing():
            self._manager.close()


def _checksum(description: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(description, sort_keys=True).encode())


def _why(error: BaseException) -> str:
    """The reason in one short line; TensorStore hides the system's among its own words."""
    while error.__cause__ is not None:
        error = error.__cause__
    number = re.search(r"os_error_code='(\d{1,4})'", str(error))
    return os.strerror(int(number[1])) if number else reason(error)


@functools.cache
def _quieten_orbax() -> None:
    """Stop Orbax's threads from printing tracebacks of errors that Orbax raises anyway.

    Its threads log their errors. At the first one it closes its event loop: reads and writes in flight end later, find
    the loop closed, and Python can only print that.
    """

    def is_orbaxs(error: BaseException | None) -> bool:
        if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
            return True
        return error is not None and any(
            "orbax" in frame.filename for frame in traceback.extract_tb(error.__traceback__)
        )

    def keep(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return record.levelno < logging.ERROR or not ("orbax" in record.pathname or is_orbaxs(error))

    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).addFilter(keep)
    before = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None if is_orbaxs(unraisable.exc_value) else before(unraisable)
