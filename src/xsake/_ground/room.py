"""The room of a module: the code that its author wrote. And where in a room an error was raised."""

from __future__ import annotations

import linecache
import os
import traceback


def room_of(module: str) -> str:
    """A subpackage of xsake, or another package, or a module that is in none."""
    return ".".join(module.split(".")[: 2 if module.startswith("xsake.") else 1])


def raised_in(room: str, error: BaseException) -> str | None:
    """The innermost line of the room that led to an error, "kernel.py:31, in forward: x = y[0]"; None without one."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_globals.get("__name__", "")
        if name == room or name.startswith(f"{room}."):
            found = frame.f_code, line
    if found is None:
        return None
    code, line = found
    said = linecache.getline(code.co_filename, line).strip()
    return f"{_short(code.co_filename)}:{line}, in {code.co_name}: {said}"


def _short(path: str) -> str:
    """The path from here where it is in this folder."""
    inside = os.path.relpath(path)
    return path if inside.startswith(os.pardir) else inside
