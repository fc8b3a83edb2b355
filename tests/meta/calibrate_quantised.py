"""Measures honest quantised layers against the gauge: `python tests/meta/calibrate_quantised.py [draws a shape]`.

Writes recorded/gauge_quantised.json: for each recipe and tensor, the distribution of the worst |error| / gauge of a
problem in percent of the element bar, and of rows; and what faults of 30 % measure on the same problems.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from calibrate import expert_leaves, normal, ratios, summary
from dropless.parity.problem import RECIPES, Clamp, Experts, Params, Problem, Routing
from dropless.parity.registry import get
from dropless.parity.running import QUICK_COMPILE
from dropless.reference import oracle

SHAPES = (
    Problem(T=40, K=2, E=3, D=96, F=48, dtype="bfloat16"),
    Problem(T=17, K=3, E=6, D=33, F=16, experts=Experts(gated=False, activation="relu2", wi_bias=True)),
    Problem(
        T=9,
        K=2,
        E=3,
        D=64,
        F=33,
        dtype="bfloat16",
        experts=Experts(clamp=Clamp(), wi_bias=True, wo_bias=True, weight_placement="early"),
    ),
    Problem(T=17, K=2, E=2, D=1, F=1, dtype="bfloat16"),
)
IMPLEMENTATIONS = ("loop_and_pad", "blocked")


def draw(problem: Problem, rng: np.random.Generator):
    """(params, x, routing, cotangent): some slots are empty, some weights tiny."""
    p = problem
    leaves = expert_leaves(p, rng)
    ids = np.argsort(rng.random((p.T, p.E)), 1)[:, : p.K].astype(np.int32)
    ids[rng.random(ids.shape) < 0.1] = -1
    w = rng.dirichlet(np.ones(p.K), p.T).astype(np.float32)
    params = Params(gate_kernel=np.zeros((p.D, p.E), leaves["wi"].dtype), **leaves)
    return params, normal(p, rng, p.T, p.D), Routing(ids, w), normal(p, rng, p.T, p.D)


def evaluator(problem: Problem, implementation: str):
    """A compiled (params, x, routing, cotangent) -> tensors by name."""
    experts = get(implementation).stage("experts")

    @functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(params, x, routing, dy):
        def of(params, x, weights):
            return experts(problem, params, x, Routing(routing.topk_idx, weights))

        y, vjp = jax.vjp(of, params, x, routing.topk_weights)
        d_params, dx, dw = vjp(dy)
        return {"y": y, "x": dx, "topk_weights": dw, **d_params.named()}

    return run


def measure(recipe: str, draws: int) -> dict:
    """The distribution over all shapes and draws, half of them by each emulation."""
    found: dict[str, list[tuple[float, float]]] = {}
    faulty: dict[str, list[float]] = {}
    for s, shape in enumerate(SHAPES):
        problem = shape.replace(recipe=recipe)
        run = evaluator(problem, IMPLEMENTATIONS[s % 2])
        for i in range(draws):
            case = draw(problem, np.random.default_rng([s, i]))
            params, x, routing, dy = case
            judged = oracle.judge_experts(problem, params, x, routing, dy)
            got = {name: np.asarray(value) for name, value in run(*case).items() if name in judged}
            for name, pair in ratios(got, judged).items():
                found.setdefault(name, []).append(pair)
                if pair[0] > 0.6 or pair[1] > 1:
                    print(f"{recipe} shape {s} draw {i} {name} {pair}", file=sys.stderr)
            if s == 0:
                loud = {name: (a.astype(np.float32) * 1.3).astype(a.dtype) for name, a in got.items()}
                for name, pair in ratios(loud, judged).items():
                    faulty.setdefault(f"{name} x 1.3", []).append(max(pair))
                for name, pair in ratios(lost_heaviest(case, got, run), judged).items():
                    if name in ("y", "wo"):
                        faulty.setdefault(f"{name}, one token's heaviest expert lost", []).append(max(pair))
    return {
        "problems": draws * len(SHAPES),
        "tensors": {name: summary(pairs) for name, pairs in sorted(found.items())},
        "faults": {name: round(100 * min(values), 1) for name, values in faulty.items()},
    }


def lost_heaviest(case, got: dict, run) -> dict:
    """What the layer gives when the heaviest slot of token 0 is dropped."""
    params, x, routing, dy = case
    ids = routing.topk_idx.copy()
    ids[0, np.where(ids[0] >= 0, routing.topk_weights[0], -1).argmax()] = -1
    lost = run(params, x, Routing(ids, routing.topk_weights), dy)
    return {name: np.asarray(lost[name]) for name in got}


def main(draws: int, recipes: tuple[str, ...]) -> None:
    record = {"columns": ["median", "p99", "max"], "recipes": {r: measure(r, draws) for r in recipes}}
    path = Path(os.environ.get("GAUGE_RECORD", Path(__file__).parent / "recorded" / "gauge_quantised.json"))
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(temporary, path)
    print(table(record))


def table(record: dict) -> str:
    """The record as Markdown: maxima of element / row in percent of the bar; for faults, the smallest of the larger."""
    parts = record["recipes"]
    lines = ["| tensor | " + " | ".join(parts) + " |", "|---" * (1 + len(parts)) + "|"]
    names = sorted({name for part in parts.values() for name in part["tensors"]})
    for name in names:
        cells = [
            " / ".join(f"{part['tensors'][name][k][2]:.0f}" for k in ("element", "row") if k in part["tensors"][name])
            for part in parts.values()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for fault in next(iter(parts.values()))["faults"]:
        lines.append(f"| {fault} | " + " | ".join(f"{part['faults'][fault]:.0f}" for part in parts.values()) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30, tuple(sys.argv[2:]) or tuple(r for r in RECIPES if r != "none"))
