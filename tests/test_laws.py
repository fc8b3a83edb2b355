"""Every law on every implementation that runs here, at small unlike shapes and routings drawn by Hypothesis."""

import dataclasses
import inspect

import pytest
from dropless.parity import complete, get
from dropless.parity.covering import covering_problems, tiny_problems
from dropless.parity.laws import LAWS, laws_named
from dropless.parity.problem import InvalidInput
from dropless.parity.routings import pinned
from dropless.parity.spec import CaseSpec, freeze, parse_case
from dropless.parity.suite import Settings, run_law
from dropless.parity.verdict import BAD

HERE = ("loop_and_pad", "blocked", "ragged_dot", "loop_host")
SHAPES = {"plain": tiny_problems()[0], "clamp": tiny_problems()[1], "groups": tiny_problems()[2]}
EXAMPLES = 3

WHOLE = ("rows-once", "value", "gradient-x", "gradient-topk_weights", "gradient-wi", "gradient-wo", "no-tokens")
"""Laws that the slower implementations are held to here; `dropless check` runs them all."""

FEW = [(name, "plain", WHOLE) for name in ("ragged_dot", "loop_host")]
ALL = [("loop_and_pad", "plain", ()), *(("blocked", shape, ()) for shape in SHAPES)]


@pytest.mark.parametrize(("name", "shape", "laws"), [pytest.param(*c, id=f"{c[0]}/{c[1]}") for c in (*ALL, *FEW)])
def test_honest_code_keeps_every_law(name, shape, laws):
    implementation = complete(get(name))
    shapes, settings = (SHAPES[shape],), Settings(max_examples=EXAMPLES)
    if name == "loop_host":  # which compiles anew for each count of rows that a routing gives an expert
        settings = dataclasses.replace(settings, covering=shapes, few=2)
    # What runs once a suite compiles programs of its own: once an implementation is enough.
    chosen = [law for law in laws_named(laws) if law.scope != "once" or shape == "plain"]
    verdicts = [run_law(law, implementation, shapes, settings) for law in chosen]
    failed = [f"{v.law}: {v.finding.message if v.finding else v.reason} {v.case}" for v in verdicts if v.status in BAD]
    assert not failed, "\n".join(failed)
    assert sum(v.status == "agree" for v in verdicts) >= min(len(chosen), 4)


def test_capacity_is_different_on_purpose_and_says_so():
    problem = SHAPES["plain"].replace(capacity_factor=1.0)
    verdict = run_law(laws_named(["exact-experts"])[0], complete(get("capacity")), (problem,), Settings())
    assert verdict.status == "cannot run" and "drops on purpose" in verdict.reason


def test_each_law_says_what_it_is_in_one_sentence():
    names = [law.name for law in LAWS]
    assert len(names) == len(set(names))
    for law in LAWS:
        assert law.statement.endswith(".") and law.statement.count(". ") == 0, law.name
        assert law.judged_by in ("bits", "gauge") and law.faults
        assert list(inspect.signature(law.check).parameters) == ["implementation", "case"]


def test_every_class_of_faults_that_a_layer_can_show_has_a_law():
    assert set("ABCDEFGHJK") <= set("".join(law.faults for law in LAWS))


def test_a_case_survives_its_text():
    for problem in (*tiny_problems(), *covering_problems()):
        spec = CaseSpec(problem, 3, freeze([[*range(problem.K)]] * problem.T))
        assert parse_case(spec.literal()) == spec
    for spec in pinned(SHAPES["groups"], 1):
        assert parse_case(spec.literal()) == spec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "case is a list"),
        ("{", "not a Python literal"),
        ("{'T': 1, 'K': 1, 'E': 1, 'D': 1, 'seed': 0}", "no F"),
        ("{'T': 1, 'K': 1, 'E': 1, 'D': 1, 'F': 1}", "topk_idx and pattern"),
        ("{'T': 2, 'K': 1, 'E': 1, 'D': 1, 'F': 1, 'topk_idx': [[0]]}", "2 lists of 1 ids"),
        ("{'T': 1, 'K': 2, 'E': 1, 'D': 1, 'F': 1, 'topk_idx': [[0, 1]]}", "top-k is 2"),
    ],
)
def test_a_case_that_makes_no_sense_is_refused_in_one_line(text, words):
    with pytest.raises(InvalidInput, match=words):
        parse_case(text)


def test_the_readme_states_every_law_and_mutant():
    from pathlib import Path

    from dropless.parity.mutants import MUTANTS

    text = (Path(__file__).parent.parent / "parity" / "README.md").read_text()
    missing = [law.name for law in LAWS if f"`{law.name}` | {law.stage} | {law.judged_by}" not in text]
    missing += [m.name for m in MUTANTS if f"`{m.name}` | `{m.law}`" not in text]
    assert not missing
