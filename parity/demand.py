"""How many rows an expert-parallel rank must hold: exactly for one routing, and at most for any.

Dropless means demand <= capacity in every case. Both are integers; nothing here is estimated.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from .problem import InvalidInput


def worst_case_rows(tokens: int, K: int, local_experts: int, align: int = 1) -> int:
    """The most rows that any routing of `tokens` tokens sends to one rank, each expert's block rounded up to `align`.

    max over routings of sum_e ceil(g_e / align) * align, where g_e <= tokens and sum_e g_e <= tokens * min(K, e): a
    first row opens a block in as many experts as there are rows for, and every further block costs `align` rows.
    At least one block, since a buffer of no rows has no address.
    """
    if min(tokens, K - 1, local_experts - 1, align - 1) < 0:
        raise InvalidInput(
            f"tokens {tokens}, top-k {K}, local experts {local_experts}, alignment {align}; accepted: 0 tokens or more, "
            "the others 1 or more"
        )
    rows = tokens * min(K, local_experts)
    opened = min(local_experts, rows)
    blocks = min(opened + (rows - opened) // align, local_experts * -(-tokens // align))
    return max(blocks, 1) * align


def demand(
    topk_idx: Int[np.ndarray, "T K"], *, E: int, ep: int, groups: int = 1, align: int = 1
) -> Int[np.ndarray, " W"]:
    """The rows that each of W = groups * ep ranks receives under this routing, blocks rounded up to `align`.

    Tokens lie in order on the W ranks, and one group of ep ranks exchanges only its own. -1 is no expert.
    """
    counts = group_counts(topk_idx, E=E, groups=groups)
    padded = -(-counts // align) * align
    return padded.reshape(groups * ep, E // ep).sum(axis=1)


def group_counts(topk_idx: Int[np.ndarray, "T K"], *, E: int, groups: int = 1) -> Int[np.ndarray, "G E"]:
    """How many rows each expert gets from each group of ranks (one copy of every expert per group)."""
    ids = np.asarray(topk_idx).reshape(groups, -1)
    return np.stack([np.bincount(row[row >= 0], minlength=E) for row in ids]).astype(np.int64)
