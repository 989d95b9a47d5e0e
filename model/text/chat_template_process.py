"""The process in which a chat template runs; `chat_template.render` starts it and reads its answer.

stdin: {"template": ..., "variables": ..., "seconds": ..., "bytes": ...}; stdout: ["text", text] or ["error",
reason]. The process imports nothing of xsake, so that it starts quickly.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

import jinja2
import jinja2.sandbox


class Refused(Exception):
    """The template called raise_exception."""


def refuse(message: Any) -> None:
    raise Refused(str(message))


def rendered(template: str, variables: dict[str, Any], most: int) -> tuple[str, str]:
    # With the options of Hugging Face; sandboxed, because a template is code from a file.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    try:
        text = environment.from_string(template).render(**variables)
    except Refused as error:
        return "error", f"refuses these messages: {_line(error)}"
    except MemoryError:
        return "error", "needs more memory than it may have"
    except RecursionError:
        return "error", "is nested or calls itself too deeply"
    except Exception as error:  # whatever the template's own code raises
        return "error", f"cannot be rendered: {type(error).__name__}: {_line(error)}"
    if len(text) > most:
        return "error", f"makes a text of {len(text)} characters of this conversation, more than the {most} allowed"
    return "text", text


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def main() -> None:
    given = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (given["bytes"], given["bytes"]))
    signal.setitimer(signal.ITIMER_PROF, given["seconds"])  # the timer's signal ends the process
    answer = rendered(given["template"], given["variables"], int(sys.argv[1]))
    signal.setitimer(signal.ITIMER_PROF, 0)
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
