"""How things are measured: processes that may hang, turns, times, ratios, what disturbs them, and right results."""
