"""The covering array covers: counted here by another route than the generator's."""

import dataclasses
import itertools

import pytest
from dropless.parity import covering
from dropless.parity.covering import FACTORS, MOST, covering_problems, covering_rows, tiny_problems, to_problem
from dropless.parity.job import Job, load
from dropless.parity.laws import LAWS
from dropless.parity.problem import DTYPES, SCORES, InvalidInput
from dropless.parity.profiles import EVERY_SHAPE, SHARE, covering_share
from dropless.parity.verdict import Verdict, is_settled, merge_verdicts


def settings_of(problem):
    """The levels of a finished problem, read from its fields; sizes as classes, as the module's docstring says."""
    r, e = problem.router, problem.experts
    bias = {(False, False): "none", (True, False): "first", (False, True): "second", (True, True): "both"}
    K = "E" if problem.K == problem.E else "15 to 17" if problem.K in (15, 16, 17) else problem.K
    return {
        "E": "1 to 8" if problem.E <= 8 else problem.E,
        "K": K,
        "D": problem.D,
        "F": problem.F,
        "groups": (r.groups, r.group_topk),
        "activation": e.activation,
        "form": "clamp" if e.clamp else e.gated,
        "dtype": problem.dtype,
        "score": (r.score, r.softmax_order),
        "normalize": r.normalize,
        "router_bias": bias[r.gate_bias, r.selection_bias],
        "scaling": r.scaling,
        "logits_dtype": r.logits_dtype,
        "expert_bias": bias[e.wi_bias, e.wo_bias],
        "placement": e.weight_placement,
        "shared": e.shared_F > 0,
    }


def pairs(problem):
    levels = settings_of(problem)
    return set(itertools.combinations(levels.items(), 2))


@pytest.fixture(scope="module")
def feasible():
    """All pairs of all valid, affordable problems: sizes in full, each other setting with each size and each other."""
    plain = {name: levels[0] for name, levels in FACTORS.items()}
    sizes = ("E", "K", "D", "F", "groups")
    others = [name for name in FACTORS if name not in sizes]
    found, some = set(), {}
    for levels in itertools.product(*(FACTORS[name] for name in sizes)):
        row = plain | dict(zip(sizes, levels, strict=True))
        if is_valid(row) and not (row["K"] != "E" and row["K"] == row["E"]):
            seen = settings_of(to_problem(row))
            found |= set(itertools.combinations([(n, seen[n]) for n in sizes], 2))
            for name in sizes:
                some.setdefault((name, seen[name]), row)
    for row in some.values():
        for name in others:
            for level in FACTORS[name]:
                if is_valid(row | {name: level}):
                    found |= pairs(to_problem(row | {name: level}))
    for a, b in itertools.combinations(others, 2):
        for x, y in itertools.product(FACTORS[a], FACTORS[b]):
            if is_valid(plain | {a: x, b: y}):
                found |= pairs(to_problem(plain | {a: x, b: y}))
    return found


def is_valid(row):
    """Asks `Problem` itself, and then whether the problem is affordable and its groups have two experts or more."""
    try:
        p = to_problem(row)
    except InvalidInput:
        return False
    small = 3 * p.E * p.D * p.F <= 12e6 and p.T * p.K * p.D * p.F <= 20e6
    return small and p.E >= 2 * p.router.groups * (p.router.groups > 1)


def test_every_feasible_pair_is_covered(feasible):
    covered = set().union(*(pairs(p) for p in covering_problems()))
    assert len(feasible) > 1300
    assert not feasible - covered


def test_every_topk_of_every_number_of_experts_is_there():
    want = {(E, E if K == "E" else K) for E in FACTORS["E"] for K in FACTORS["K"] if K == "E" or K <= E}
    assert want == {(p.E, p.K) for p in covering_problems()}


def test_the_array_is_small_and_cheap():
    problems = covering_problems()
    assert len(problems) == len(set(problems)) == MOST == 40
    assert all(p.T <= 24 and is_valid(row) for p, row in zip(problems, covering_rows(), strict=True))


def test_a_missing_pair_would_be_seen(feasible):
    """Each of the problems is there for a reason: most of them are the only one with some pair."""
    problems = covering_problems()
    alone = [p for p in problems if feasible - set().union(*(pairs(q) for q in problems if q is not p))]
    assert len(alone) >= 35


def test_the_array_is_the_same_every_time():
    first = covering_rows()
    covering.covering_rows.cache_clear()
    assert covering_rows() == first


def test_tiny_problems_are_unlike_and_small():
    problems = tiny_problems()
    assert len(problems) == 5
    assert {p.dtype for p in problems} == set(DTYPES)
    assert {p.router.score for p in problems} == set(SCORES)
    assert {p.experts.weight_placement for p in problems} == {"late", "early"}
    assert {p.experts.activation for p in problems} == {"silu", "gelu_tanh", "gelu_erf", "relu2"}
    assert any(p.experts.clamp for p in problems) and any(not p.experts.gated for p in problems)
    assert any(p.experts.shared_F for p in problems) and any(p.router.groups > 1 for p in problems)
    assert all(p.E * p.D * p.F < 1e6 and p.T * p.K * p.D * p.F < 3e6 for p in problems)


def test_laws_of_what_is_computed_meet_every_shape_and_the_others_share_them():
    problems = covering_problems()
    shares = {law.name: covering_share(law, problems) for law in LAWS}
    assert set(EVERY_SHAPE) <= set(shares)
    assert all(shares[name] == problems for name in EVERY_SHAPE)
    others = [name for name in shares if name not in EVERY_SHAPE]
    assert all(len(shares[name]) == len(problems) / SHARE for name in others)
    met = [sum(p in shares[name] for name in others) for p in problems]
    assert min(met) >= len(others) // SHARE - 1  # no shape is met by a few laws only


def test_a_law_that_fits_few_shapes_meets_them_all():
    law = next(law for law in LAWS if law.name not in EVERY_SHAPE)
    few = covering_problems()[:SHARE]
    assert covering_share(law, few) == few
    assert 0 < len(covering_share(law, covering_problems()[: SHARE + 1])) < SHARE + 1


def test_a_law_judged_shape_by_shape_says_what_it_says_at_once():
    bench = load(Job("loop_and_pad", max_examples=1))
    for name in ("update-bias", "groups"):
        whole = bench.run(name)
        parts = merge_verdicts([bench.run(name, part=i) for i in range(bench.parts)])
        assert bench.parts == len(bench.shapes) == 3
        assert (parts.status, parts.reason, parts.examples) == ("agree", whole.reason, whole.examples)


def test_the_first_failure_decides_a_law_and_ends_it():
    agree, other = Verdict("value", "experts", "agree", examples=3, percent=40.0), Verdict("value", "experts", "agree")
    bad = Verdict("value", "experts", "disagree", case="{}", examples=2)
    absent = Verdict("value", "experts", "cannot run", "needs two experts")
    assert merge_verdicts([absent, agree, other]).status == "agree"
    assert merge_verdicts([other, agree]).percent == 40.0
    assert merge_verdicts([absent, agree, bad]) == dataclasses.replace(bad, examples=5)
    assert merge_verdicts([absent, absent]).reason == "needs two experts"
    once, drawn = (next(law for law in LAWS if law.scope == scope) for scope in ("once", "drawn"))
    assert is_settled(once, agree) and is_settled(drawn, bad)
    assert not is_settled(drawn, agree) and not is_settled(once, absent)
