"""What an expert-parallel exchange must move: rows between ranks, counted exactly for one routing and one placement.

Three counts of the same dispatch. Raw: one row per (token, expert) on another rank. Once a rank: a token that visits
several experts of one rank crosses once. Once a node: a token that visits several ranks of one other node crosses the
network once and is spread there. A combine moves the same rows back, when partial sums are formed where the experts
are; each pass of the backward does so again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from .placement import expert_ranks
from .problem import InvalidInput, Problem

LINK = 450e9
"""Bytes/s of one GPU to its node, a direction: NVLink 4's data sheet (H100, H200)."""
NETWORK = 50e9
"""Bytes/s of one GPU to other nodes, a direction: one 400 Gbit/s adapter a GPU."""
RANKS_PER_NODE = 8

ROW_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Traffic:
    """Rows of one dispatch. W ranks, N nodes; a rank's own rows cross nothing and are in none of these."""

    raw: Int[np.ndarray, "W W"]
    """[source, destination]: routed copies."""
    once: Int[np.ndarray, "W W"]
    """[source, destination]: different tokens."""
    network: Int[np.ndarray, "W N"]
    """[source, node]: different tokens to another node; 0 to the own one."""
    spread: Int[np.ndarray, "W W"]
    """[rank that a token enters a node by, destination]: different tokens inside a node, own or arrived."""
    load: Int[np.ndarray, " W"]
    """Routed rows that each rank's experts get, from anywhere."""
    row_bytes: int
    ranks_per_node: int

    @property
    def sent_raw(self) -> Int[np.ndarray, " W"]:
        """Bytes that each rank sends without removing copies."""
        return self.raw.sum(1) * self.row_bytes

    @property
    def sent(self) -> Int[np.ndarray, " W"]:
        """Bytes that each rank sends when a token goes to each other rank once."""
        return self.once.sum(1) * self.row_bytes

    @property
    def received(self) -> Int[np.ndarray, " W"]:
        """Bytes that each rank receives when a token comes to it once."""
        return self.once.sum(0) * self.row_bytes

    @property
    def sent_network(self) -> Int[np.ndarray, " W"]:
        """Bytes that each rank sends to other nodes, once a node."""
        return self.network.sum(1) * self.row_bytes

    @property
    def imbalance(self) -> float:
        """The busiest rank's rows over the mean; 1 is even, W is all on one rank, and 1 too when there are none."""
        mean = self.load.mean()
        return float(self.load.max() / mean) if mean else 1.0

    def seconds(self, link: float = LINK, network: float = NETWORK) -> float:
        """The least time of a dispatch that sends so: the busiest direction of any link or adapter, at the given bytes/s.

        Inside a node a token crosses once a rank, between nodes once a node; both go on at the same time.
        """
        if min(link, network) <= 0:
            raise InvalidInput(f"link speeds are {link:g} and {network:g} bytes/s; accepted: above 0")
        inside = np.maximum(self.spread.sum(1), self.spread.sum(0)).max(initial=0)
        nodes = self.network.reshape(-1, self.ranks_per_node, self.network.shape[1]).sum(1)
        arriving = -(-nodes.sum(0) // self.ranks_per_node)  # at best shared by the node's adapters
        outside = max(self.network.sum(1).max(initial=0), arriving.max(initial=0))
        return float(max(inside / link, outside / network)) * self.row_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values for a record: bytes rank by rank, imbalance and the time bound at the default speeds."""
        return {
            "ranks": len(self.load),
            "ranks_per_node": self.ranks_per_node,
            "row_bytes": self.row_bytes,
            "sent_raw": self.sent_raw.tolist(),
            "sent": self.sent.tolist(),
            "received": self.received.tolist(),
            "sent_network": self.sent_network.tolist(),
            "load": self.load.tolist(),
            "imbalance": self.imbalance,
            "seconds": self.seconds(),
        }


def traffic(
    problem: Problem, topk_idx: Int[np.ndarray, "T K"], ranks: int, ranks_per_node: int | None = None
) -> Traffic:
    """The rows that one dispatch moves when the tokens lie in order on `ranks` ranks; -1 moves nothing.

    T need not divide: the last ranks then have fewer tokens. ranks_per_node None is 8, or all ranks when there are fewer.
    Raises InvalidInput when experts or ranks do not divide.
    """
    ep = expert_ranks(problem, ranks)
    node = min(RANKS_PER_NODE, ranks) if ranks_per_node is None else ranks_per_node
    if node < 1 or ranks % node:
        raise InvalidInput(f"{ranks} ranks with {node} a node; accepted: a number a node that divides {ranks}")
    ids = np.asarray(topk_idx)
    ids = np.concatenate([ids, np.full((-len(ids) % ranks, ids.shape[1]), -1, ids.dtype)])
    source = np.repeat(np.arange(ranks), len(ids) // ranks)
    to = np.where(ids >= 0, source[:, None] // ep * ep + ids // (problem.E // ep), -1)
    visits = np.stack([(to == rank).sum(1) for rank in range(ranks)], axis=1)  # [token, destination]
    raw, once = _by_source(visits, source, ranks), _by_source(visits > 0, source, ranks)
    at_node = visits.reshape(len(ids), ranks // node, node).max(axis=2) > 0
    network = _by_source(np.asarray(at_node), source, ranks)
    network[np.arange(ranks), np.arange(ranks) // node] = 0
    load = raw.sum(0)
    for rows in (raw, once):
        np.fill_diagonal(rows, 0)
    size = problem.D * ROW_BYTES[problem.dtype]
    return Traffic(raw, once, network, _spread(visits > 0, source, ranks, node), load, size, node)


def _by_source(per_token: np.ndarray, source: np.ndarray, ranks: int) -> np.ndarray:
    rows = np.zeros((ranks, per_token.shape[1]), np.int64)
    np.add.at(rows, source, per_token)
    return rows


def _spread(visited: np.ndarray, source: np.ndarray, ranks: int, node: int) -> np.ndarray:
    """A token enters another node by the rank of its source's place there, and is passed on from it."""
    rows = np.zeros((ranks, ranks), np.int64)
    for destination in range(ranks):
        entry = destination // node * node + source % node
        np.add.at(rows[:, destination], entry[visited[:, destination]], 1)
    np.fill_diagonal(rows, 0)
    return rows
