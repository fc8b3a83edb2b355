"""How much a suite does: which shapes, how many routings, how long a single call may take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .covering import covering_problems, tiny_problems
from .interface import Implementation, always
from .law import FEATURES, Law
from .laws import LAWS
from .presets import PRESETS
from .problem import DTYPES, Clamp, Experts, InvalidInput, Problem, Router


@dataclass(frozen=True)
class Profile:
    """A named amount of work."""

    name: str
    max_examples: int
    """Drawn routings for each law and shape."""
    timeout_s: float
    """Longest silence of a worker: one case, compilation included."""
    problems: Callable[[], tuple[Problem, ...]]
    oracle: str = "oracle"
    once: Callable[[], tuple[Problem, ...]] = tuple
    """Problems that run the laws of value and gradients once, on one pattern."""
    covering: Callable[[], tuple[Problem, ...]] = tuple
    """More shapes, each with FEW routings: all of them for the laws of EVERY_SHAPE, every SHARE-th for the others."""


FEW = 2
"""Pinned and as many drawn routings for each law and covering shape."""

SHARE = 4
"""A law outside EVERY_SHAPE meets one in so many of the covering shapes that it fits; neighbouring laws meet others."""

LARGE = Problem(T=4096, K=2, E=8, D=33, F=8)
"""For laws with a closed form: enough tokens that one lost row hides from any average."""

PLAIN = (
    Problem(T=24, K=2, E=8, D=33, F=96),
    Problem(T=16, K=3, E=3, D=96, F=33, dtype="bfloat16"),
)
"""Gated SiLU without bias: what a bare function must compute."""


def _quick() -> tuple[Problem, ...]:
    return tiny_problems()[:3]


def _gpu() -> tuple[Problem, ...]:
    """Every switch of the presets on one of three small shapes."""
    small = Problem(T=128, K=2, E=8, D=256, F=128, dtype="bfloat16")
    grouped = {"groups": 4, "group_topk": 2, "selection_bias": True, "scaling": 2.5}
    return (
        small,
        small.replace(router=Router(score="sigmoid", normalize=True, norm_eps=1e-20, **grouped), experts_shared_F=64),
        small.replace(
            router=Router(softmax_order="after", gate_bias=True, logits_dtype="activation"),
            experts=Experts(clamp=Clamp(), wi_bias=True, wo_bias=True, weight_placement="early"),
        ),
    )


def _presets() -> tuple[Problem, ...]:
    wide = (preset.problem(T=2048, dtype="bfloat16") for preset in PRESETS.values())
    # Beyond 2^31 numbers the float64 gradients and gauges of all experts do not fit a device; `compare` streams those.
    return tuple(p for p in wide if p.E * p.F * (p.wi_columns // p.F + 1) * p.D < 2**31)


PROFILES: Mapping[str, Profile] = {
    p.name: p
    for p in (
        Profile("quick", 5, 120.0, _quick),
        Profile("default", 20, 180.0, tiny_problems),
        Profile("thorough", 30, 300.0, tiny_problems, covering=covering_problems),
        Profile("gpu", 10, 300.0, _gpu, oracle="oracle_device", once=_presets),
    )
}
"""quick: three shapes, under two minutes on two cores. default: five. thorough: more routings of those, and the covering array on few. gpu: three small
shapes for all laws, and presets of up to 2^31 numbers once at full width, judged by the oracle that runs on the device."""

ONCE = (
    "value",
    "gradient-x",
    "gradient-topk_weights",
    "gradient-wi",
    "gradient-wo",
    "gradient-wi_bias",
    "gradient-wo_bias",
)
"""Laws that run at a profile's `once` problems; they share one run of the layer and of the oracle."""

EVERY_SHAPE = (
    *ONCE,
    "rows-once",
    "round-trip",
    "exact-experts",
    "exact-weight-gradient",
    "exact-gemm",
    "routes",
    "layer-routes",
    "layer-value",
    "layer-gradients",
)
"""Laws that say of a shape what is computed there, and so meet every covering shape; they share a few executables and the
oracle's answers. The others compare runs with each other or see to memory and execution: what breaks them is rarely one
pair of settings, and each compiles programs of its own."""

WIDER: Mapping[str, dict[str, object]] = {
    "bias": {"experts_wi_bias": True, "experts_wo_bias": True},
    "clamp": {"experts_clamp": Clamp()},
    "ungated": {"experts_gated": False},
    "gelu": {"experts_activation": "gelu_tanh"},
    "gelu-erf": {"experts_activation": "gelu_erf"},
    "relu2": {"experts_activation": "relu2"},
    "early": {"experts_weight_placement": "early"},
    "shared": {"experts_shared_F": 33},
}
"""What `--with` adds to a bare function's problems, as changes of a problem; the words of `FEATURES` come beside them."""


def profile(name: str) -> Profile:
    """The profile of that name; raises InvalidInput for another."""
    if name not in PROFILES:
        raise InvalidInput(f"profile is {name!r}; accepted: {', '.join(PROFILES)}")
    return PROFILES[name]


def covering_share(law: Law, fitting: Sequence[Problem]) -> tuple[Problem, ...]:
    """Those of the covering shapes that fit a law which it meets: every SHARE-th, from a place that rotates with the law.

    Laws of EVERY_SHAPE meet all, and so does a law that fits SHARE shapes or fewer; the choice is the same every time.
    """
    if law.name in EVERY_SHAPE or len(fitting) <= SHARE:
        return tuple(fitting)
    return tuple(fitting[[one.name for one in LAWS].index(law.name) % SHARE :: SHARE])


def is_bare(implementation: Implementation) -> bool:
    """Whether this is a function alone, which says nothing about what it supports."""
    return set(implementation.stages) <= {"experts", "experts_vjp"} and implementation.supports is always


def plain_problems(dtypes: Iterable[str], wider: Iterable[str]) -> tuple[Problem, ...]:
    """A bare function's problems: gated SiLU without bias in each dtype, then one for each word of `wider`."""
    problems = []
    for i, dtype in enumerate(dtypes):
        if dtype not in DTYPES:
            raise InvalidInput(f"dtype is {dtype!r}; accepted: {', '.join(DTYPES)}")
        problems.append(PLAIN[i % len(PLAIN)].replace(dtype=dtype))
    for i, word in enumerate(check_words(wider)):
        if word in WIDER:
            problems.append(PLAIN[0].replace(dtype=problems[i % len(problems)].dtype, **WIDER[word]))
    return tuple(problems)


def check_words(wider: Iterable[str]) -> tuple[str, ...]:
    """The words of `--with`; raises InvalidInput for an unknown one."""
    words = tuple(dict.fromkeys(wider))
    accepted = (*WIDER, *FEATURES)
    for word in words:
        if word not in accepted:
            raise InvalidInput(f"--with is {word!r}; accepted: {', '.join(accepted)}")
    return words
