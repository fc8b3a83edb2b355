"""Options that several commands share, and what they turn into."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import launch, registry
from .interface import Implementation
from .problem import InvalidInput

PRESET = Annotated[str | None, typer.Option(help="Routing shape of a real model. [default: qwen3-30b-a3b]")]
FULL = Annotated[bool, typer.Option("--full", help="The preset's real widths and 8,192 tokens; otherwise shrunk.")]
TOKENS = Annotated[int | None, typer.Option(help="T.")]
EXPERTS = Annotated[int | None, typer.Option(help="E.")]
TOPK = Annotated[int | None, typer.Option(help="K, experts per token.")]
WIDTH = Annotated[int | None, typer.Option(help="D, model width.")]
EXPERT_WIDTH = Annotated[int | None, typer.Option(help="F, width of one expert.")]
GROUPS = Annotated[int | None, typer.Option(help="Groups of experts for group-limited selection; 1 for none.")]
SKEW = Annotated[
    str | None, typer.Option(help="Named pattern of loads (zipf, balanced, one-hot, ...). [default: zipf]")
]
EXPONENT = Annotated[float, typer.Option(help="Of --skew zipf.")]
TEXT = Annotated[
    list[Path] | None,
    typer.Option(
        help="Text files: each token id gets a fixed random embedding, so rows repeat as words do and a random router "
        "shows the skew of language. Repeatable."
    ),
]
TRACE = Annotated[Path | None, typer.Option(help="An .npz with topk_idx and topk_weights [T, K] to replay.")]
X = Annotated[Path | None, typer.Option("--x", help="An .npy with tokens [T, D].")]
DTYPE = Annotated[str | None, typer.Option(help="bfloat16, float16 or float32. [default: float32, bfloat16 on a GPU]")]
PRECISION = Annotated[str, typer.Option(help="Of float32 products: highest or tf32.")]
PRECISIONS = Annotated[
    str,
    typer.Option(
        help="Of float32 products: highest or tf32. Or a list, to see them side by side: fp32, bf16, fp16, fp8-current, "
        "fp8-delayed, fp8-block, mxfp8, nvfp4."
    ),
]
EP = Annotated[int | None, typer.Option(help="Expert-parallel ranks; virtual devices without a GPU.")]
RANKS_PER_NODE = Annotated[
    int | None, typer.Option(help="Expert-parallel ranks of one node, for the traffic. [default: 8, or all]")
]
COORDINATOR = Annotated[
    str | None,
    typer.Option(
        help="host:port of process 0, when no SLURM, Open MPI or Kubernetes tells. With --processes, --process."
    ),
]
PROCESSES = Annotated[int | None, typer.Option(help="How many processes run this command together.")]
PROCESS = Annotated[int | None, typer.Option(help="Which of them this is, from 0.")]
LIMIT = Annotated[float, typer.Option(help="Seconds after which a run of several processes is ended, with tracebacks.")]
IMPL = Annotated[
    list[str] | None,
    typer.Option(help="A registered name or package.module:attribute. Repeatable. [default: all that can run]"),
]
SEED = Annotated[int, typer.Option(help="Of parameters, tokens, routings and cotangents.")]
OUT = Annotated[Path | None, typer.Option("--out", help="Where the record goes. [default: dropless-<time>.json here]")]

RECORDED = (
    "preset full tokens experts topk width expert_width groups skew exponent text trace x dtype precision ep ranks_per_node impl grad timing "
    "seed presets skews budget"
).split()
"""Options that a record keeps."""

DEFAULT_IMPLEMENTATIONS = ("loop_and_pad", "blocked", "ragged_dot", "te")
PARALLEL_IMPLEMENTATIONS = ("loop_and_pad", "xla_ep", "te_ep", "te_block")
"""With --ep."""


def record_path(path: Path | None, stem: str) -> Path:
    """Where a record will go; raises InvalidInput now, not after minutes of work, when that cannot be written."""
    target = path or Path(f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}.json")
    check_writable(target)
    return target


def check_writable(path: Path | None) -> None:
    """Raises InvalidInput unless a file can be put there (None is fine)."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        raise InvalidInput(f"{path} is a folder; accepted: a file name")
    if not folder.is_dir():
        raise InvalidInput(f"{path} has no folder {folder}; accepted: a file in a folder that exists")
    if not os.access(folder, os.W_OK):
        raise InvalidInput(
            f"{path} cannot be written: no permission in {folder}; accepted: a file in a writable folder"
        )


def start_devices(ep: int | None, processes: int = 1) -> None:
    """With --ep, makes sure that there are that many devices, virtual ones without a GPU, before JAX starts."""
    if ep is not None:
        launch.start_devices(ep, processes)


def implementations(names: list[str] | None, ep: int | None = None) -> list[Implementation]:
    """The named implementations, completed; by default every usual one that is available on this machine."""
    if names:
        if os.getcwd() not in sys.path:  # package.module:attribute is found from the current folder
            sys.path.insert(0, os.getcwd())
        return [registry.complete(registry.get(n)) for n in dict.fromkeys(names)]
    found = []
    for name in PARALLEL_IMPLEMENTATIONS if ep else DEFAULT_IMPLEMENTATIONS:
        implementation = registry.get(name)
        if implementation.available():
            found.append(registry.complete(implementation))
    return found
