"""The comparator itself: small faults are caught, in every shape that published criteria let pass, and nothing passes by being empty."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dropless.parity.compare import BINS, Finding, judge, merge, same_bits
from dropless.parity.inputs import make_case
from dropless.parity.interface import Implementation, Judged
from dropless.parity.judge import experts_findings, layer_findings
from dropless.parity.problem import DTYPES, Problem, Routing
from dropless.parity.registry import complete, get
from dropless.parity.tolerances import unit_roundoff
from dropless.reference import oracle


def tokens(T: int, D: int = 8, seed: int = 0) -> tuple[np.ndarray, Judged]:
    """An honest bfloat16 y of T tokens and its judge: four roundings on the way, and the last."""
    rng = np.random.default_rng(seed)
    value = rng.standard_normal((T, D))
    u = unit_roundoff("bfloat16")
    got = value
    for _ in range(4):
        got = got * (1 + u * rng.uniform(-1, 1, value.shape) / 2)
    return got.astype(ml_dtypes.bfloat16), Judged(value, u * np.sqrt(5.0) * abs(value), 0, np.full(T, float(D)))


def verdict(got: np.ndarray, judged: Judged, tensor: str = "y") -> Finding:
    return judge(tensor, got, judged, dtype=got.dtype)


@pytest.fixture(scope="module", params=DTYPES)
def layer(request):
    """A case with its exact answer, and the same answer rounded to storage dtype."""
    problem = Problem(T=32, K=8, E=8, D=64, F=32, dtype=request.param)
    case = make_case(problem, seed=1, pattern="balanced")
    weights = np.asarray(case.routing.topk_weights).copy()
    weights[5, 3] = 0.02
    case = case.replace(routing=Routing(case.routing.topk_idx, jnp.asarray(weights)))
    judged = oracle.judge_experts(problem, case.params, case.x, case.routing, case.cotangent)
    honest = {n: j.value.astype("float32" if n == "topk_weights" else problem.dtype) for n, j in judged.items()}
    return case, judged, honest


def test_honest_values_pass(layer):
    got, judged = tokens(65536)
    finding = verdict(got, judged)
    assert finding.ok and 0 < finding.measured < 1
    assert sum(finding.histogram) == got.size and len(finding.histogram) == BINS
    _, judged, honest = layer
    assert all(verdict(honest[name], j, name).ok for name, j in judged.items())


def test_one_lost_token_of_65536_is_caught():
    got, judged = tokens(65536)
    got[54321] = 0
    finding = verdict(got, judged)
    assert not finding.ok and finding.token == 54321 and "54321" in finding.message


def test_two_percent_of_lost_tokens_are_caught():
    got, judged = tokens(65536)
    got[::50] = 0
    assert not verdict(got, judged).ok


@pytest.mark.parametrize("factor", (0.0, -1.0, 0.5, 1.02, 1.01))
def test_scaled_answers_are_caught(layer, factor):
    """1 % lies within bfloat16's own roundings, which add up to 1.2 % of a row here; 2 % does not, in any tensor."""
    case, judged, honest = layer
    if factor == 1.01 and case.problem.dtype == "bfloat16":
        factor = 0.98
    for name, j in judged.items():
        got = (factor * honest[name].astype(np.float64)).astype(honest[name].dtype)
        assert not verdict(got, j, name).ok, name


def test_kernels_of_the_next_expert_are_caught(layer):
    _, judged, honest = layer
    for name in ("wi", "wo"):
        assert not verdict(np.roll(honest[name], 1, axis=0), judged[name], name).ok


def test_one_lost_choice_of_weight_2_percent_is_caught(layer):
    case, judged, _ = layer
    ids = np.asarray(case.routing.topk_idx).copy()
    ids[5, 3] = -1
    lost = oracle.judge_experts(case.problem, case.params, case.x, Routing(ids, case.routing.topk_weights))
    finding = verdict(lost["y"].value.astype(case.problem.dtype), judged["y"])
    assert not finding.ok and finding.token == 5


def test_one_percent_error_of_one_token_is_caught(layer):
    case, judged, honest = layer
    wrong = honest["y"].copy()
    wrong[3] = (wrong[3].astype(np.float64) * (1.02 if case.problem.dtype == "bfloat16" else 1.01)).astype(wrong.dtype)
    finding = verdict(wrong, judged["y"])
    assert not finding.ok and finding.token == 3


def test_checks_come_in_order():
    got, judged = tokens(4)
    assert judge("y", "a string", judged, dtype=got.dtype).check == "ran"
    assert judge("y", got.astype(np.float32)[:2], judged, dtype=got.dtype).check == "dtype"
    assert judge("y", got[:2], judged, dtype=got.dtype).check == "shape"
    got[1, 1] = np.nan
    finding = verdict(got, judged)
    assert (finding.check, finding.ok, finding.index, finding.token) == ("finite", False, (1, 1), 1)


def test_nan_must_be_where_the_oracle_has_it():
    got, judged = tokens(4)
    value = judged.value.copy()
    value[2] = np.nan
    view = judged._replace(value=value)
    assert verdict(got, view).check == "finite"
    got[2] = np.nan
    assert verdict(got, view).ok


def test_a_gauge_of_zero_demands_the_exact_value():
    view = Judged(np.zeros((2, 3)), np.zeros((2, 3)))
    got = np.zeros((2, 3), np.float32)
    assert verdict(got, view, "wi").ok
    got[1, 2] = np.finfo(np.float32).tiny
    finding = verdict(got, view, "wi")
    assert not finding.ok and finding.expert == 1 and finding.measured == np.inf


def test_a_comparison_of_nothing_is_no_pass():
    empty = Judged(np.zeros((0, 3)), np.zeros((0, 3)))
    assert not judge("y", np.zeros((0, 3), np.float32), empty, dtype=np.float32).ok
    assert judge("y", np.zeros((0, 3), np.float32), empty, dtype=np.float32, empty_ok=True).ok
    nan = Judged(np.full((2, 3), np.nan), np.full((2, 3), np.nan))
    assert not judge("y", np.full((2, 3), np.nan, np.float32), nan, dtype=np.float32).ok


def test_a_zero_cotangent_is_no_pass():
    case = make_case(Problem(T=4, K=1, E=2, D=4, F=3), seed=0)
    silent = case.replace(cotangent=jnp.zeros_like(case.cotangent))
    for findings in (experts_findings, layer_findings):
        (finding,) = findings(get("loop_and_pad"), silent)
        assert not finding.ok and finding.tensor == "cotangent"


def test_an_implementation_that_raises_is_a_finding():
    def experts(problem, params, x, routing):
        raise RuntimeError("out of luck\nand more lines")

    case = make_case(Problem(T=4, K=1, E=2, D=4, F=3), seed=0)
    (finding,) = experts_findings(complete(Implementation(name="broken", stages={"experts": experts})), case)
    assert (finding.check, finding.ok) == ("ran", False) and "out of luck" in finding.message


def test_the_device_judges_as_the_host_does():
    got, judged = tokens(64)
    got[7] *= 2
    with jax.enable_x64(True):
        view = Judged(*(jnp.asarray(a) for a in judged[:2]), 0, jnp.asarray(judged.dof))
        with_jax = [verdict(np.asarray(got), view), judge("y", jnp.asarray(got), view, dtype=got.dtype)]
    want = verdict(got, judged)
    for finding in with_jax:
        assert (finding.ok, finding.index, finding.token, finding.histogram) == (False, want.index, 7, want.histogram)
        assert np.float32(finding.measured) == np.float32(want.measured)


def test_bits():
    a = np.array([0.0, np.nan, 1.0], np.float32)
    assert same_bits("y", a.copy(), a).ok
    assert not same_bits("y", np.array([-0.0, np.nan, 1.0], np.float32), a).ok
    finding = same_bits("group_sizes", np.array([1, 2]), np.array([1, 3]))
    assert not finding.ok and finding.expert == 1 and "1 of 2" in finding.message
    assert same_bits("y", np.float32(1), np.float32(1)).ok and not same_bits("y", np.float32(1), np.float32(2)).ok
    assert same_bits("y", a.astype(np.float64), a).check == "dtype"
    assert same_bits("y", a[:2], a).check == "shape"


def test_pieces_merge_into_the_worst():
    good = Finding(tensor="wi", check="values", ok=True, measured=0.4, kinks=1, histogram=(1, 0))
    worse = good.replace(measured=0.6)
    broken = good.replace(ok=False, check="finite", measured=None)
    assert merge([good, worse]).measured == 0.6 and merge([good, worse]).histogram == (2, 0)
    assert merge([good, worse, broken]).check == "finite" and merge([good, broken]).kinks == 2
