"""From what a user writes to the names of methods."""

from __future__ import annotations

from xsake.hads.study.methods.shipped import GROUPS, METHODS


def expand(names: str) -> list[str]:
    """Methods from a comma-separated list of names and groups, each method once, in the order given.

    >>> expand("short,hads_group")
    ['hads', 'sink_window+forced', 'mean_top_k+forced', 'x_attention_8+forced', 'hads_group']
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = f"groups are {', '.join(GROUPS)}; methods are {', '.join(METHODS)}"
    if not wanted:
        raise ValueError(f"no method is named; {known}")
    if unknown := [name for name in wanted if name not in METHODS and name not in GROUPS]:
        raise ValueError(f"unknown {unknown}; {known}")
    return list(dict.fromkeys(method for name in wanted for method in GROUPS.get(name, [name])))
