"""What Transformer Engine can do here: facts read once, and pure functions of those facts that answer with a number.

`facts` reads the machine; everything else is a function of `Facts` and a problem, so that both answers of every question
can be tested on a machine without a GPU. Versions from 2.20.2 upward are supported: the first release whose bfloat16
grouped GEMM takes group sizes from device memory on Hopper.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from dataclasses import dataclass
from typing import NamedTuple

from ...parity.device import environment
from ...parity.doctor import version
from ...parity.interface import Support
from ...parity.problem import Problem, Router

OLDEST_TE = (2, 20, 2)
"""First release whose device-side grouped GEMM accepts bfloat16 on compute capability 9.0."""
OLDEST_CAPABILITY = 9.0
OLDEST_CUBLAS = (13, 4, 0)
"""Below it Transformer Engine refuses a device-side grouped GEMM on Hopper; below 13.8.1 `dropless doctor` warns."""
OLDEST_NCCL = (2, 30, 4)
"""Of NCCL expert parallelism."""
MOST_EXPERTS = 8160
"""The router kernel counts in bytes: 255 for each of 32 lanes."""
ALIGN = 8
"""Columns of a bfloat16 operand come in 16-byte pieces."""


class RecipeNeeds(NamedTuple):
    """What TE's grouped products ask of a machine and a problem under one recipe."""

    capability: float
    align: int
    """D and F are multiples of it."""
    host_sync: str
    """Why group sizes are copied to the host; "" where they are not."""


RECIPES = {
    "fp8-current": RecipeNeeds(9.0, 16, "TE quantises and multiplies FP8 groups one by one, by sizes on the host"),
    "mxfp8": RecipeNeeds(10.0, 128, ""),
}
"""Recipes of `te`; TE has no grouped product for the others."""


@dataclass(frozen=True)
class Facts:
    """What decides whether Transformer Engine runs; a version is () when the library is not there."""

    platform: str = "cpu"
    device: str = "cpu"
    devices: int = 1
    capability: float | None = None
    installed: bool = False
    te: tuple[int, ...] = ()
    cublas: tuple[int, ...] = ()
    nccl: tuple[int, ...] = ()


@functools.cache
def facts() -> Facts:
    """Reads this machine, once per process; imports nothing of Transformer Engine."""
    env = environment()
    return Facts(
        platform=env["platform"],
        device=env["device_kind"],
        devices=env["device_count"],
        capability=env["compute_capability"],
        installed=importlib.util.find_spec("transformer_engine") is not None,
        te=version(env["versions"].get("transformer_engine")),
        cublas=version(env["versions"].get("cublas")),
        nccl=version(env["versions"].get("nccl")),
    )


def machine(here: Facts) -> Support:
    """Whether one GPU of this machine can run the device-side grouped GEMM."""
    if here.platform != "gpu":
        return Support(
            False, f"the device is a {here.platform.upper()}; needs a GPU of compute capability 9.0 or newer"
        )
    if here.capability is None or here.capability < OLDEST_CAPABILITY:
        return Support(False, f"compute capability is {here.capability}; needs {OLDEST_CAPABILITY} or newer")
    if not here.installed:
        return Support(False, f"Transformer Engine is not installed; needs {_dots(OLDEST_TE)} or newer")
    for name, found, oldest in (("Transformer Engine", here.te, OLDEST_TE), ("cuBLAS", here.cublas, OLDEST_CUBLAS)):
        if found and found < oldest:
            return Support(False, f"{name} is {_dots(found)}; needs {_dots(oldest)} or newer")
    return Support(True)


def several(here: Facts) -> Support:
    """Whether this machine can also exchange tokens between GPUs by NCCL EP."""
    if not (one := machine(here)):
        return one
    if here.devices < 2:
        return Support(False, f"{here.devices} GPU is here; needs 2 or more")
    if here.nccl and here.nccl < OLDEST_NCCL:
        return Support(False, f"NCCL is {_dots(here.nccl)}; needs {_dots(OLDEST_NCCL)} or newer")
    return Support(True)


def single_device(problem: Problem, here: Facts) -> Support:
    """Whether `te` computes this problem on a machine that `machine` accepts; names the first value that it declines.

    Only a recipe asks more of the machine than `machine` does.
    """
    p = problem
    if p.mesh is not None and p.mesh.devices > 1:
        return Support(False, f"the mesh has {p.mesh.devices} devices; te runs on 1 (te_ep on several)")
    if p.capacity_factor is not None:
        return Support(False, f"capacity_factor is {p.capacity_factor}; te drops nothing, accepted: None")
    if not (gemm := device_side_gemm(p) if p.recipe == "none" else quantised_gemm(p, here)):
        return gemm
    return selection(p.router, p.K, p.E)


def device_side_gemm(problem: Problem) -> Support:
    """Whether both expert products can run with group sizes in device memory (TE's V2 path).

    A bias does not matter: it is added outside the product, so that it never forces the host-synchronising path.
    """
    p = problem
    if p.recipe != "none":
        return Support(
            False, f"recipe is {p.recipe!r}; this layer's products take unquantised operands, accepted: 'none'"
        )
    if p.dtype != "bfloat16":
        return Support(False, f"dtype is {p.dtype}; TE's device-side grouped GEMM accepts bfloat16")
    for axis in "DF":
        if getattr(p, axis) % ALIGN:
            return Support(False, f"{axis} is {getattr(p, axis)}; TE's grouped GEMM accepts multiples of {ALIGN}")
    return Support(True)


def quantised_gemm(problem: Problem, here: Facts) -> Support:
    """Whether both expert products can run with operands quantised by the problem's recipe."""
    p = problem
    if (needs := RECIPES.get(p.recipe)) is None:
        return Support(False, f"recipe is {p.recipe!r}; te multiplies {', '.join(map(repr, ('none', *RECIPES)))}")
    if here.capability is None or here.capability < needs.capability:
        return Support(
            False,
            f"recipe is {p.recipe!r} and compute capability {here.capability}; TE's grouped kernels for it need "
            f"{needs.capability} or newer",
        )
    if p.dtype != "bfloat16":
        return Support(False, f"dtype is {p.dtype}; te quantises bfloat16")
    for axis in "DF":
        if getattr(p, axis) % needs.align:
            return Support(
                False, f"{axis} is {getattr(p, axis)}; under {p.recipe} TE's products accept multiples of {needs.align}"
            )
    return Support(True)


def host_sync(problem: Problem) -> str:
    """Why `te` copies group sizes to the host for this problem; "" where it does not."""
    needs = RECIPES.get(problem.recipe)
    return needs.host_sync if needs else ""


def selection(router: Router, K: int, E: int) -> Support:
    """Whether TE's router kernel makes this router's choice of experts.

    It ranks scores, biased or not, and sums the K // group_topk best of a group to rank groups.
    """
    if E > MOST_EXPERTS:
        return Support(False, f"there are {E} experts; TE's router accepts up to {MOST_EXPERTS}")
    if router.groups == 1:
        return Support(True)
    if K % router.group_topk:
        return Support(
            False, f"top-k is {K} with group_topk {router.group_topk}; TE's router accepts multiples of group_topk"
        )
    if router.group_score_topk != K // router.group_topk:
        return Support(
            False,
            f"group_score_topk is {router.group_score_topk}; TE's router sums top-k // group_topk, "
            f"{K // router.group_topk} here",
        )
    return Support(True)


def fused_weights(router: Router, K: int) -> Support:
    """Whether TE's router kernel also computes this router's weights; where not, they are computed beside it."""
    if router.selection_bias:
        return Support(
            False, "selection_bias is True; TE's weights are (score + bias) - bias, which loses small scores"
        )
    if router.score == "softmax":
        if router.softmax_order == "after":
            return Support(not router.normalize, "" if not router.normalize else "normalize is True after a softmax")
        return Support(not router.normalize, "" if not router.normalize else "TE never renormalises softmax scores")
    if router.normalize and router.norm_eps != TE_EPS:
        return Support(False, f"norm_eps is {router.norm_eps:g}; TE's is {TE_EPS:g}")
    if router.normalize != (K > 1):
        return Support(
            False, f"normalize is {router.normalize}; TE normalises {router.score} when top-k > 1, it is {K}"
        )
    return Support(True)


TE_EPS = 1e-20
"""What TE adds to a sum of scores before dividing by it."""


def without(here: Facts, **changes: object) -> Facts:
    """Facts of another machine, for tests and for explanations."""
    return dataclasses.replace(here, **changes)  # type: ignore[arg-type]


def _dots(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
