"""Recorded routings and tokens as files: `FILE.npz` with topk_idx and topk_weights, `FILE.npy` with x."""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from .problem import InvalidInput, Routing


def read_trace(path: str | Path, *, E: int | None = None) -> Routing:
    """The routing in an .npz file, as NumPy arrays: topk_idx int32 [T, K], topk_weights float32 [T, K].

    Ids are -1 (no expert) or up to E-1, distinct within a token; weights are finite, and set to 0 where the id is -1.
    Raises InvalidInput, naming the offending value, for anything else.
    """
    path = Path(path)
    stored = _load(path)
    if not isinstance(stored, dict):
        raise InvalidInput(f"{path} holds one array; accepted: an .npz with topk_idx and topk_weights")
    if {"topk_idx", "topk_weights"} - set(stored):
        raise InvalidInput(f"{path} holds {', '.join(stored) or 'nothing'}; accepted: topk_idx and topk_weights")
    ids, weights = stored["topk_idx"], stored["topk_weights"]
    check_ids(ids, E, where=str(path))
    if weights.shape != ids.shape:
        raise InvalidInput(
            f"{path}: topk_weights has shape {weights.shape}; accepted: the shape of topk_idx, {ids.shape}"
        )
    if weights.dtype.kind not in "fiuV" or (weights.dtype.kind == "V" and weights.dtype.names):
        raise InvalidInput(f"{path}: topk_weights is {weights.dtype}; accepted: real numbers")
    weights = np.where(ids < 0, 0, weights).astype(np.float32)
    if not np.isfinite(weights).all():
        t, k = np.argwhere(~np.isfinite(weights))[0]
        raise InvalidInput(f"{path}: the weight of token {t}, slot {k} is {weights[t, k]}; accepted: finite numbers")
    return Routing(ids.astype(np.int32), weights)  # pyright: ignore[reportArgumentType]


def write_trace(path: str | Path, routing: Routing) -> Path:
    """Writes `routing` as .npz, whole or not at all; returns the path."""
    path = Path(path)
    ids = np.asarray(routing.topk_idx, np.int32)
    check_ids(ids, None, where=str(path))
    arrays = {"topk_idx": ids, "topk_weights": np.asarray(routing.topk_weights, np.float32)}
    if not path.parent.is_dir():
        raise InvalidInput(f"{path.parent} is no folder; accepted: a folder that exists")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez_compressed(file, **arrays)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def read_x(path: str | Path) -> Float[np.ndarray, "T D"]:
    """Tokens [T, D] from an .npy file of real numbers; NaN and Inf are kept, since a layer must contain them."""
    path = Path(path)
    x = _load(path)
    if isinstance(x, dict):
        raise InvalidInput(f"{path} holds several arrays; accepted: an .npy with one array [T, D]")
    if x.ndim != 2 or x.dtype.kind not in "fiu" or x.shape[1] < 1:
        raise InvalidInput(f"{path} holds {x.dtype} of shape {x.shape}; accepted: real numbers [T, D], D at least 1")
    return x


def check_ids(ids: Int[np.ndarray, "T K"], E: int | None = None, *, where: str = "routing") -> None:
    """Raises InvalidInput unless `ids` is a whole-number [T, K] of -1 or experts below E, distinct within each token."""
    if ids.dtype.kind not in "iu":
        raise InvalidInput(f"{where}: topk_idx is {ids.dtype}; accepted: whole numbers")
    if ids.ndim != 2 or ids.shape[1] < 1:
        raise InvalidInput(f"{where}: topk_idx has shape {ids.shape}; accepted: [T, K], K at least 1")
    top = np.inf if E is None else E
    wrong = np.argwhere((ids < -1) | (ids >= top))
    if len(wrong):
        t, k = wrong[0]
        accepted = "-1 or more" if E is None else f"-1 to {E - 1}"
        raise InvalidInput(f"{where}: token {t}, slot {k} names expert {ids[t, k]}; accepted: {accepted}")
    ranked = np.sort(ids, axis=1)
    twice = np.argwhere((ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] >= 0))
    if len(twice):
        t, k = twice[0]
        raise InvalidInput(f"{where}: token {t} names expert {ranked[t, k]} twice; accepted: distinct experts")


def _load(path: Path) -> np.ndarray | dict[str, np.ndarray]:
    if not path.is_file():
        raise InvalidInput(f"{path} is not a file; accepted: a file written by NumPy")
    try:
        # NumPy leaves the file open when an archive is cut short, unless it is handed an open one.
        with open(path, "rb") as file:
            stored = np.load(file, allow_pickle=False)
            return stored if isinstance(stored, np.ndarray) else {name: stored[name] for name in stored.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidInput(f"{path} cannot be read as NumPy data ({error}); accepted: .npz or .npy") from error
