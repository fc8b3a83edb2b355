"""Measures honest layers against the gauge: `python tests/meta/calibrate.py [problems a dtype]` writes recorded/gauge.json.

Each problem draws a shape, a layer and one honest way of computing it; the record holds, for each dtype and tensor, the
distribution of the worst |error| / gauge of a problem, as a percentage of the element bar, and of rows.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import honest
from dropless.parity.problem import Clamp, Experts, Params, Problem, Routing
from dropless.parity.tolerances import ELEMENT_BAR, row_bar
from dropless.reference import oracle

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
KINDS = ("silu", "silu", "clamp", "gelu_tanh", "gelu_erf", "relu2")


def draw(dtype: str, rng: np.random.Generator, precision: str = "highest"):
    """(problem, leaves, x, ids, weights, dy): weights random, some tiny or zero, some slots empty; scales vary."""
    kind = str(rng.choice(KINDS))
    E = int(rng.choice((1, 2, 3, 6)))
    problem = Problem(
        T=int(rng.choice((1, 5, 17, 40))),
        K=int(rng.integers(1, E + 1)),
        E=E,
        D=int(rng.choice((1, 4, 16, 33, 96))),
        F=int(rng.choice((1, 3, 16, 48))),
        dtype=dtype,
        precision=precision,
        experts=Experts(
            gated=kind == "clamp" or bool(rng.integers(2)),
            activation="silu" if kind == "clamp" else kind,
            clamp=Clamp() if kind == "clamp" else None,
            wi_bias=bool(rng.integers(2)),
            wo_bias=bool(rng.integers(2)),
            weight_placement=str(rng.choice(("late", "early"))),
        ),
    )
    p, store = problem, DTYPES[dtype]
    # A pre-activation scale of 4.5 puts a tenth of them beyond gpt-oss's clamp of 7.
    scale = 4.5 if kind == "clamp" else float(rng.choice((0.3, 1.0, 3.0)))

    def normal(*shape, by=1.0):
        return (rng.standard_normal(shape) * by).astype(store)

    leaves = {"wi": normal(p.E, p.D, p.wi_columns, by=scale / np.sqrt(p.D)), "wo": normal(p.E, p.F, p.D, by=p.F**-0.5)}
    if p.experts.wi_bias:
        leaves["wi_bias"] = normal(p.E, p.wi_columns, by=0.3 * scale)
    if p.experts.wo_bias:
        leaves["wo_bias"] = normal(p.E, p.D)
    ids = np.argsort(rng.random((p.T, p.E)), 1)[:, : p.K].astype(np.int32)
    ids[rng.random(ids.shape) < 0.1] = -1
    w = rng.dirichlet(np.ones(p.K), p.T) * float(rng.choice((1.0, 1.0, 2.5)))
    w[rng.random(w.shape) < 0.05] *= 1e-5
    w[rng.random(w.shape) < 0.02] = 0.0
    # float16 gradients of a scaled-down cotangent are subnormal from about 2**-14 on.
    by = float(rng.choice((1.0, 1.0, 2.0**-10, 2.0**-14, 2.0**-18))) if dtype == "float16" else 1.0
    return problem, leaves, normal(p.T, p.D), ids, w.astype(np.float32), normal(p.T, p.D, by=by)


def ratios(problem, leaves, x, ids, w, dy, how) -> tuple[dict[str, tuple[float, float]], int]:
    """Worst element and worst row of each tensor as fractions of their bars, and the number of kinks."""
    params = Params(gate_kernel=np.zeros((problem.D, problem.E), x.dtype), **leaves)
    judged = oracle.judge_experts(problem, params, x, Routing(ids, w), dy)
    with np.errstate(over="ignore", under="ignore"):
        got = honest.experts(problem, leaves, x, ids, w, dy, how)
    out, kinks = {}, 0
    for name, j in judged.items():
        error = abs(got[name].astype(np.float64) - j.value)
        with np.errstate(invalid="ignore", divide="ignore"):
            element = np.where(error == 0, 0.0, error / j.gauge).max() / ELEMENT_BAR
            row = 0.0
            if j.dof is not None:
                norm, gauge = (np.sqrt((a**2).reshape(len(j.dof), -1).sum(-1)) for a in (error, j.gauge))
                row = np.where(norm == 0, 0.0, norm / row_bar(j.dof) / gauge).max()
        out[name], kinks = (float(element), float(row)), max(kinks, j.kinks)
    return out, kinks


def measure(dtype: str, problems: int, seed: int = 0, precision: str = "highest") -> dict:
    """The distribution over `problems` random problems."""
    found: dict[str, list[tuple[float, float]]] = {}
    beyond, kinky = [], 0
    for i in range(problems):
        rng = np.random.default_rng([seed, i])
        drawn = draw(dtype, rng, precision)
        how = honest.How.draw(rng)
        measured, kinks = ratios(*drawn, how)
        for name, pair in measured.items():
            found.setdefault(name, []).append(pair)
            if max(pair) > 0.6:
                print(f"{dtype} {precision} problem {i} {name} {pair} {drawn[0]} {how}", file=sys.stderr)
        kinky += kinks > 0
        if drawn[0].experts.clamp:
            beyond.append(beyond_clamp(*drawn[:3]))
    return {
        "problems": problems,
        "with_kinks": kinky,
        "beyond_clamp_percent": round(100 * float(np.mean(beyond)), 1) if beyond else None,
        "tensors": {name: summary(pairs) for name, pairs in sorted(found.items())},
    }


def summary(pairs: list[tuple[float, float]]) -> dict[str, list[float]]:
    """Median, 99th percentile and maximum over problems, in percent of the element bar and of the row bar."""
    elements, rows = np.array(pairs).T * 100
    lines = {"element": elements} | ({"row": rows} if rows.any() else {})
    return {name: [round(float(v), 1) for v in (*np.quantile(a, (0.5, 0.99)), a.max())] for name, a in lines.items()}


def beyond_clamp(problem: Problem, leaves: dict, x: np.ndarray) -> float:
    """Share of gate pre-activations above the limit or up ones beyond it, over all experts."""
    pre = np.einsum("td,edi->tei", x.astype(np.float32), leaves["wi"].astype(np.float32))
    if "wi_bias" in leaves:
        pre = pre + leaves["wi_bias"].astype(np.float32)
    gate, up = pre[..., : problem.F], pre[..., problem.F :]
    limit = problem.experts.clamp.limit
    return float(np.mean(np.concatenate([gate > limit, abs(up) > limit])))


def main(problems: int) -> None:
    record = {"seed": 0, "element_bar": ELEMENT_BAR, "columns": ["median", "p99", "max"], "percent_of_bar": {}}
    for dtype in DTYPES:
        record["percent_of_bar"][dtype] = measure(dtype, problems)
        print(json.dumps(record["percent_of_bar"][dtype]))
    record["percent_of_bar"]["float32, tf32"] = measure("float32", problems, precision="tf32")
    path = Path(__file__).parent / "recorded" / "gauge.json"
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(temporary, path)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
