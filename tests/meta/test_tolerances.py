"""The bars: monotone, tied to their derivations, and complete as a table; a sample of honest layers stays below them."""

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from dropless.parity import tolerances
from dropless.parity.compare import judge
from dropless.parity.problem import DTYPES, Params, Problem, Routing
from dropless.parity.tolerances import COUNT, ELEMENT_BAR, ROUNDINGS, bar_table, row_bar, underflow, unit_roundoff
from dropless.reference import oracle
from dropless.reference.oracle_gauge import Noise

HEADROOM = 0.6
"""The share of the element bar that honest layers may use."""


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_row_bars_fall_with_width_and_stay_from_64():
    bars = [float(row_bar(width)) for width in range(1, 200)]
    assert all(a >= b for a, b in itertools.pairwise(bars))
    assert bars[0] < ELEMENT_BAR and bars[32] > bars[63] == bars[-1]
    assert np.array_equal(row_bar(np.array([1.0, 64.0, 1e9])), [row_bar(1), row_bar(64), row_bar(64)])


@pytest.mark.parametrize(
    ("dtype", "scalar"), [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16), ("float32", np.float32)]
)
def test_unit_roundoffs_and_underflow_are_those_of_the_dtypes(dtype, scalar):
    info = ml_dtypes.finfo(scalar)
    assert unit_roundoff(dtype) == float(info.eps) / 2
    if dtype == "float16":
        assert underflow(dtype) == float(info.smallest_subnormal) / 2
    else:
        assert underflow(dtype) == float(info.tiny)
    assert set(DTYPES) == {"bfloat16", "float16", "float32"}


def test_tf32_is_looser_than_float32_and_a_gauge_grows_with_depth_and_roundoff():
    assert unit_roundoff("float32", "tf32") > unit_roundoff("float32")
    assert unit_roundoff("bfloat16", "tf32") == unit_roundoff("bfloat16")
    noises = [Noise(Problem(T=1, K=1, E=1, D=1, F=1, dtype=d)) for d in ("float32", "float16", "bfloat16")]
    rounded = [noise.rounded("h", 1.0) for noise in noises]
    assert rounded == sorted(rounded)
    for noise in noises:
        depths = [noise.per_square(n) + noise.per_total(n) for n in (1, 2, 16, 4096)]
        assert depths == sorted(depths)
        sums = [noise.partial_sums(n, 1.0, 1.0) for n in (2, 3, 8, 64)]
        assert sums == sorted(sums)


def test_partial_sums_are_the_mean_over_all_orders():
    """Of sum_j s_j^2 over the partial sums that an addition rounds, j = 2 .. n."""
    terms = np.array([3.0, -1.0, 0.5, 2.0])
    means = [np.mean([(np.cumsum(p)[1:] ** 2).sum() for p in itertools.permutations(terms[:n])]) for n in range(1, 5)]
    noise = Noise(Problem(T=1, K=1, E=1, D=1, F=1, dtype="bfloat16"))
    for n, mean in enumerate(means, 1):
        got = noise.partial_sums(n, terms[:n].sum(), (terms[:n] ** 2).sum()) / noise.u2
        assert abs(got - mean) <= np.finfo(float).eps * n * (terms**2).sum() * n


def test_the_table_lists_every_rounding_once_and_every_row_says_why():
    names = [r.name for r in ROUNDINGS]
    assert len(names) == len(set(names)) and set(COUNT) == set(names)
    rows = bar_table()
    assert all(row.name and row.value and row.because for row in rows)
    assert len(rows) > len(ROUNDINGS)


def test_every_rounding_of_the_table_is_read_by_the_gauge():
    folder = Path(tolerances.__file__).parent.parent / "reference"
    text = "".join(path.read_text() for path in folder.glob("oracle*.py"))
    for name in COUNT:
        assert f'"{name}"' in text, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_honest_layers_use_at_most_sixty_percent_of_the_bar(dtype):
    """A sample; calibrate.py measures a thousand problems a dtype and records them."""
    calibrate = load("calibrate")
    for one, problems in ((calibrate.experts_ratios, 25), (calibrate.layer_ratios, 10)):
        for tensor, lines in calibrate.measure(dtype, problems, seed=11, one=one)["tensors"].items():
            assert max(lines["element"]) / 100 <= HEADROOM, tensor


def test_recorded_calibration_is_within_the_bars():
    record = json.loads((Path(__file__).parent / "recorded" / "gauge.json").read_text())
    assert record["element_bar"] == ELEMENT_BAR
    for seed in load("calibrate").OTHER_SEEDS:
        assert len(record["other_seeds"][str(seed)]) == 2 * len(DTYPES)
        for element, block in record["other_seeds"][str(seed)].values():
            assert element / 100 <= HEADROOM and block <= 100
    for dtype in DTYPES:
        experts, layer = record["experts"][dtype], record["layer"][dtype]
        assert experts["problems"] >= 1000 and layer["problems"] >= 1000 and experts["beyond_clamp_percent"] >= 5
        assert {"y", "x", "wi", "wo", "wi_bias", "wo_bias", "topk_weights"} <= experts["tensors"].keys()
        assert {"weights", "gate_kernel", "gate_bias", "balance", "z", "shared_wi"} <= layer["tensors"].keys()
        for lines in (*experts["tensors"].values(), *layer["tensors"].values()):
            assert max(lines["element"]) / 100 <= HEADROOM
            assert max(lines.get("row", [0])) <= 100


def test_tf32_operands_fail_where_float32_is_asked_for():
    """TF32 is its own precision, not a float32 that happened to be fast."""
    calibrate, honest = load("calibrate"), load("honest")
    rng = np.random.default_rng(0)
    problem, leaves, x, ids, w, dy = calibrate.draw("float32", rng)
    while problem.D < 16 or problem.T < 16:
        problem, leaves, x, ids, w, dy = calibrate.draw("float32", rng)
    params = Params(gate_kernel=np.zeros((problem.D, problem.E), x.dtype), **leaves)
    judged = oracle.judge_experts(problem, params, x, Routing(ids, w), dy)
    got = honest.experts(problem.replace(precision="tf32"), leaves, x, ids, w, dy, honest.How())
    for name in ("y", "x", "wi", "wo"):
        assert not judge(name, got[name], judged[name], dtype="float32").ok, name
