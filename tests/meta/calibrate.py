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
import honest_layer
from dropless.parity.problem import Clamp, Experts, Params, Problem, Routing
from dropless.parity.tolerances import ELEMENT_BAR, row_bar
from dropless.reference import oracle

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
OTHER_SEEDS = (1, 2)
"""Seeds of which only the largest values are recorded."""

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
    p = problem
    leaves = expert_leaves(problem, rng)
    ids = np.argsort(rng.random((p.T, p.E)), 1)[:, : p.K].astype(np.int32)
    ids[rng.random(ids.shape) < 0.1] = -1
    w = rng.dirichlet(np.ones(p.K), p.T) * float(rng.choice((1.0, 1.0, 2.5)))
    w[rng.random(w.shape) < 0.05] *= 1e-5
    w[rng.random(w.shape) < 0.02] = 0.0
    # float16 gradients of a scaled-down cotangent are subnormal from about 2**-14 on.
    by = float(rng.choice((1.0, 1.0, 2.0**-10, 2.0**-14, 2.0**-18))) if dtype == "float16" else 1.0
    return problem, leaves, normal(p, rng, p.T, p.D), ids, w.astype(np.float32), normal(p, rng, p.T, p.D, by=by)


def expert_leaves(p: Problem, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Kernels and biases; gpt-oss's clamp at 7 meets pre-activations of scale 4.5, a tenth of them beyond it."""
    scale = 4.5 if p.experts.clamp else float(rng.choice((0.3, 1.0, 3.0)))
    leaves = {
        "wi": normal(p, rng, p.E, p.D, p.wi_columns, by=scale / p.D**0.5),
        "wo": normal(p, rng, p.E, p.F, p.D, by=p.F**-0.5),
    }
    if p.experts.wi_bias:
        leaves["wi_bias"] = normal(p, rng, p.E, p.wi_columns, by=0.3 * scale)
    if p.experts.wo_bias:
        leaves["wo_bias"] = normal(p, rng, p.E, p.D)
    return leaves


def normal(problem: Problem, rng: np.random.Generator, *shape: int, by: float = 1.0) -> np.ndarray:
    """Normal numbers in storage dtype."""
    return (rng.standard_normal(shape) * by).astype(DTYPES[problem.dtype])


def experts_ratios(dtype: str, rng: np.random.Generator, precision: str):
    """(ratios of one random problem of fixed routing, kinks, problem, share beyond the clamp or None)."""
    problem, leaves, x, ids, w, dy = draw(dtype, rng, precision)
    how = honest.How.draw(rng)
    params = Params(gate_kernel=np.zeros((problem.D, problem.E), x.dtype), **leaves)
    judged = oracle.judge_experts(problem, params, x, Routing(ids, w), dy)
    with np.errstate(over="ignore", under="ignore"):
        # Early and late weighting are both honest, whichever the problem names.
        placed = problem.replace(experts_weight_placement=str(rng.choice(("late", "early"))))
        got = honest.experts(placed, leaves, x, ids, w, dy, how)
    beyond = beyond_clamp(problem, leaves, x) if problem.experts.clamp else None
    return ratios(got, judged), max(j.kinks for j in judged.values()), (problem, how), beyond


def layer_ratios(dtype: str, rng: np.random.Generator, precision: str):
    """The same for a live layer, replayed at the routes it chose."""
    problem = honest_layer.draw_layer(draw(dtype, rng, precision)[0], rng)
    p, how = problem, honest.How.draw(rng)
    leaves = {"gate_kernel": normal(p, rng, p.D, p.E, by=p.D**-0.5), **expert_leaves(p, rng)}
    if p.router.gate_bias:
        leaves["gate_bias"] = normal(p, rng, p.E, by=0.3)
    if p.router.selection_bias:
        leaves["expert_bias"] = (rng.standard_normal(p.E) * 0.1).astype(np.float32)
    if p.experts.shared_F:
        leaves["shared_wi"] = expert_leaves(p.replace(F=p.experts.shared_F), rng)["wi"][0]
        leaves["shared_wo"] = normal(p, rng, p.experts.shared_F, p.D, by=p.experts.shared_F**-0.5)
    x, dy = normal(p, rng, p.T, p.D), normal(p, rng, p.T, p.D)
    cotangents = tuple(float(np.float32(c * p.T)) for c in rng.uniform(-2, 2, 3))
    with np.errstate(over="ignore", under="ignore"):
        got = honest_layer.layer(p, leaves, x, dy, cotangents, how, rng)
    params = Params(**leaves)
    if not oracle.judge_route(p, params, x).admissible(got["topk_idx"]).ok.all():
        raise AssertionError(f"an honest router's choice is not admissible: {p} {how}")
    judged = oracle.judge_layer(p, params, x, got["topk_idx"], dy, loss_cotangents=cotangents)
    judged.pop("expert_bias", None)
    return ratios(got, judged), max(j.kinks for j in judged.values()), (p, how), None


def ratios(got: dict, judged: dict) -> dict[str, tuple[float, float]]:
    """Worst element and worst block (token, expert, tensor) of each tensor, as fractions of their bars."""
    out = {}
    for name, j in judged.items():
        error = abs(got[name].astype(np.float64) - j.value)
        with np.errstate(invalid="ignore", divide="ignore"):
            element = np.where(error == 0, 0.0, error / j.gauge).max() / ELEMENT_BAR
            block = 0.0
            if j.dof is not None:
                norm, gauge = (np.sqrt((a**2).reshape(len(j.dof), -1).sum(-1)) for a in (error, j.gauge))
                block = np.where(norm == 0, 0.0, norm / row_bar(j.dof) / gauge).max()
        out[name] = float(element), float(block)
    return out


def measure(dtype: str, problems: int, seed: int = 0, precision: str = "highest", one=experts_ratios) -> dict:
    """The distribution over `problems` random problems."""
    found: dict[str, list[tuple[float, float]]] = {}
    shares, kinky = [], 0
    for i in range(problems):
        measured, kinks, what, beyond = one(dtype, np.random.default_rng([seed, i]), precision)
        for name, pair in measured.items():
            found.setdefault(name, []).append(pair)
            if pair[0] > 0.6 or pair[1] > 1:
                print(f"{dtype} {precision} problem {i} {name} {pair} {what}", file=sys.stderr)
        kinky += kinks > 0
        shares += [] if beyond is None else [beyond]
    return {
        "problems": problems,
        "with_kinks": kinky,
        "beyond_clamp_percent": round(100 * float(np.mean(shares)), 1) if shares else None,
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
    record = {"seed": 0, "element_bar": ELEMENT_BAR, "columns": ["median", "p99", "max"], "experts": {}, "layer": {}}
    kinds = {"experts": experts_ratios, "layer": layer_ratios}
    for dtype in DTYPES:
        for kind, one in kinds.items():
            record[kind][dtype] = measure(dtype, problems, one=one)
    record["experts"]["float32, tf32"] = measure("float32", problems, precision="tf32")
    record["other_seeds"] = {
        str(seed): {
            f"{dtype}, {kind}": largest(measure(dtype, problems, seed, one=one))
            for kind, one in kinds.items()
            for dtype in DTYPES
        }
        for seed in OTHER_SEEDS
    }
    path = Path(__file__).parent / "recorded" / "gauge.json"
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(temporary, path)
    print(table(record))


def largest(part: dict) -> list[float]:
    """The largest element and block of any tensor, in percent of their bars."""
    return [max(t.get(kind, [0.0])[-1] for t in part["tensors"].values()) for kind in ("element", "row")]


def table(record: dict) -> str:
    """The record as Markdown: maxima over all problems, in percent of the bar."""
    lines = ["| tensor | " + " | ".join((*record["experts"], *(f"{d}, layer" for d in record["layer"]))) + " |"]
    lines.append("|---" * (1 + len(record["experts"]) + len(record["layer"])) + "|")
    parts = [*record["experts"].values(), *record["layer"].values()]
    names = sorted({name for part in parts for name in part["tensors"]})
    for name in names:
        cells = []
        for part in parts:
            found = part["tensors"].get(name)
            cells.append(
                "" if found is None else " / ".join(f"{found[k][2]:.0f}" for k in ("element", "row") if k in found)
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
