"""The traffic that a record prints: who sends how much, what removing copies saves, and the time that it takes at least."""

from __future__ import annotations

from typing import Any

import numpy as np

from .terminal import out, seconds, size, table
from .traffic import LINK, NETWORK

MOST_ROWS = 16
"""Ranks shown one by one; of more, the busiest."""


def print_traffic(values: dict[str, Any]) -> None:
    """One row a rank: bytes sent raw and once, bytes received, the experts' rows; then the totals in words."""
    ranks = values["ranks"]
    title = f"traffic of one dispatch, {ranks} ranks, {values['ranks_per_node']} a node"
    columns = ("sent raw", "sent once a rank", "received", "rows")
    t = table("rank", *columns, title=title, numbers=columns)
    shown = np.argsort(-np.asarray(values["load"]), kind="stable")[:MOST_ROWS] if ranks > MOST_ROWS else range(ranks)
    for rank in sorted(int(r) for r in shown):
        moved = (size(values[key][rank]) for key in ("sent_raw", "sent", "received"))
        t.add_row(str(rank), *moved, f"{values['load'][rank]:,}")
    out().print(t)
    out().print(summary(values), highlight=False)


def summary(values: dict[str, Any]) -> str:
    """Totals, imbalance and time bound in one line."""
    raw, once, network = (sum(values[key]) for key in ("sent_raw", "sent", "sent_network"))
    saved = f", {raw / once:.2f} x less" if once else ""
    between = f"; {size(network)} between nodes, once a node" if network else ""
    return (
        f"{size(raw)} raw, {size(once)} when a token goes to a rank once{saved}{between}. Busiest rank: "
        f"{values['imbalance']:.2f} x the mean rows. At least {seconds(values['seconds'])} at {LINK / 1e9:.0f} GB/s a "
        f"direction inside a node and {NETWORK / 1e9:.0f} GB/s a GPU between nodes."
    )
