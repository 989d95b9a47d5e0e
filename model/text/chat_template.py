"""A chat template is a program from a model's file: it runs in a process of its own, with little time and memory.

Jinja's sandbox keeps a template from reaching Python, but not from looping for days or asking for all memory. There
are too many ways to do so (loops, recursion, `center`, `*`, formats, constants folded while compiling) to watch each.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

_PROCESS = Path(__file__).with_name("chat_template_process.py")
CPU_SECONDS = 1.0  # processor time of the template alone, so that a busy machine does not refuse a good template
_WALL_SECONDS = 60.0  # for a template that takes no processor time and never ends
MEMORY_BYTES = 1 << 29
EXTRA_CHARACTERS = 1 << 18  # allowed in the output, beyond four times the length of the input


def render(template: str, **variables: Any) -> str:
    """The text that a chat template makes of these variables, which must be values that JSON knows.

    Raises ValueError if the template is wrong, refuses the variables, or needs more than its limits.
    """
    given = json.dumps({"template": template, "variables": variables, "seconds": CPU_SECONDS, "bytes": MEMORY_BYTES})
    most = EXTRA_CHARACTERS + 4 * len(given)
    stopped = ValueError(f"the model's chat template ran for more than {CPU_SECONDS:g} s and was stopped")
    try:
        done = subprocess.run(
            # -P keeps this folder off the path: its modules would hide others of the same names.
            [sys.executable, "-P", str(_PROCESS), str(most)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            input=given.encode(),
            capture_output=True,
            timeout=_WALL_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise stopped from error
    if done.returncode == -signal.SIGPROF:
        raise stopped
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        reason = (said or [f"exit status {done.returncode}"])[-1]
        raise ValueError(f"the model's chat template could not be run: {reason}")
    outcome, text = json.loads(done.stdout)
    if outcome != "text":
        raise ValueError(f"the model's chat template {text}")
    return text
