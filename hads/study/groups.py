"""Names for sets of methods."""

from __future__ import annotations

from xsake.hads.study.methods import ABLATIONS, METHODS, ORACLES, PUBLISHED, STRENGTHENED

GROUPS: dict[str, list[str]] = {
    "short": ["hads", "sink_window+forced", "mean_top_k+forced", "x_attention_8+forced"],
    "published": list(PUBLISHED),
    "forced": list(STRENGTHENED),
    "oracles": list(ORACLES),
    "ablations": list(ABLATIONS),
}


def expand(names: str) -> list[str]:
    """Methods from a comma-separated list of names and groups, each once, in order.

    >>> expand("short,hads_group")
    ['hads', 'sink_window+forced', 'mean_top_k+forced', 'x_attention_8+forced', 'hads_group']
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in METHODS and name not in GROUPS]:
        raise ValueError(f"unknown {unknown}; groups are {', '.join(GROUPS)}, methods {', '.join(METHODS)}")
    return list(dict.fromkeys(method for name in wanted for method in GROUPS.get(name, [name])))
