"""The laws can fail: every mutant is killed by the law that it names, and is right where its fault does not show."""

import dataclasses
import functools

import numpy as np
import pytest
from dropless.parity import complete, get, running
from dropless.parity.kill import PLAIN, QUICK_COMPILE, RICH, SEEDS, Matrix, kill_matrix
from dropless.parity.laws import LAWS, laws_named
from dropless.parity.mutants import MUTANTS, mutants_named
from dropless.parity.problem import InvalidInput
from dropless.parity.spec import CaseSpec, freeze
from dropless.parity.suite import run_case

BUILT = {m.name: dataclasses.replace(m, build=functools.cache(m.build)) for m in MUTANTS}
"""Each mutant built once, so that the tests here share its executables."""


def survivors(matrix: Matrix) -> list[str]:
    """The mutants that live, with what their law said."""
    return [f"{r.mutant} survives {r.law} ({r.cells[r.law]}): {r.said}" for r in matrix.rows if not r.killed]


@pytest.mark.parametrize("fault", sorted({m.fault for m in MUTANTS}))
def test_every_mutant_is_killed_by_the_law_it_names_at_three_seeds(fault):
    matrix = kill_matrix([m for m in BUILT.values() if m.fault == fault], whole=False)
    assert len(matrix.seeds) == 3 and matrix.rows
    assert not survivors(matrix), "\n".join(survivors(matrix))
    assert matrix.kill_rate == 1


@pytest.mark.parametrize("name", [m.name for m in MUTANTS if m.ordinary and "experts" in m.stages and not m.raises])
def test_a_mutant_is_right_on_balanced_routing(name, monkeypatch):
    """T*K/E = 8 rows an expert, ascending ids, no empty slot: what a test with one comfortable batch would see."""
    monkeypatch.setattr(running, "OPTIONS", QUICK_COMPILE)
    base = np.arange(PLAIN.T * PLAIN.K).reshape(PLAIN.T, PLAIN.K) % PLAIN.E
    spec = CaseSpec(PLAIN, 0, freeze(np.sort(base, axis=1)))
    for law in laws_named(["value", "gradient-wi"]):
        # What a layer keeps between calls (K) is a fault of the later ones: this one must be the first.
        mutant = mutants_named([name])[0] if BUILT[name].fault == "K" else BUILT[name]
        verdict = run_case(law, mutant.build(), spec)
        assert verdict.status == "agree", f"{law.name}: {verdict.finding and verdict.finding.message}"


def test_honest_code_is_not_killed_where_mutants_are():
    mutants = [BUILT[n] for n in ("two-per-cent-too-large", "row-past-a-tile-lost", "bias-inside-the-weights")]
    matrix = kill_matrix(mutants, honest=[complete(get("loop_and_pad"))], whole=False)
    assert matrix.honest == {"loop_and_pad": []}
    assert matrix.ok
    assert not kill_matrix([]).ok  # no mutant at all is no proof


def test_at_least_two_mutants_for_each_class_that_one_device_can_show():
    count = {fault: sum(m.fault == fault for m in MUTANTS) for fault in "ABCDEFGHKM"}
    assert all(n >= 2 for n in count.values()), count
    assert {m.law for m in MUTANTS} <= {law.name for law in LAWS}
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert all(m.summary.endswith(".") for m in MUTANTS)
    assert RICH.router.selection_bias and len(SEEDS) == 3


def test_an_unknown_mutant_is_refused_in_one_line():
    with pytest.raises(InvalidInput, match="no mutant is called"):
        mutants_named(["nobody"])
