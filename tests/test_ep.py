"""Expert parallelism as a whole: any mesh gives the oracle's layer, wrong ones are killed, and ranks end together."""

import json
import os
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from dropless.optimized.xla import xla_ep
from dropless.optimized.xla.bounded import bounded_experts, worst_case_of
from dropless.parity import launch, registry, running
from dropless.parity.ep_cases import rank_routings
from dropless.parity.global_view import global_view
from dropless.parity.inputs import make_case
from dropless.parity.judge import experts_findings
from dropless.parity.kill import QUICK_COMPILE, SPREAD
from dropless.parity.law_tools import by_oracle
from dropless.parity.laws import laws_named
from dropless.parity.laws_ep import LAWS, MESHES
from dropless.parity.laws_exchange import LAWS as EXCHANGE_LAWS
from dropless.parity.mutants_ep import MUTANTS
from dropless.parity.placement import expert_mesh
from dropless.parity.problem import Experts, InvalidInput, Problem, Router

PROBLEM = Problem(T=16, K=2, E=8, D=8, F=8, experts=Experts(shared_F=8, wo_bias=True), router=Router(gate_bias=True))


@pytest.fixture(autouse=True)
def _compile_quickly(monkeypatch):
    monkeypatch.setattr(running, "OPTIONS", dict(QUICK_COMPILE))


@pytest.mark.world_size(8)
@pytest.mark.parametrize("law", LAWS, ids=lambda one: one.name)
def test_xla_ep_obeys_the_laws(law):
    """EP 1, 2, 4, 8, 2 x 4 and copies: y, every gradient, losses and routes are the oracle's."""
    findings = law.check(registry.complete(xla_ep.IMPLEMENTATION), make_case(PROBLEM))
    assert findings and all(f.ok for f in findings), [f.message for f in findings if not f.ok][:2]


def test_the_meshes_are_those_that_matter():
    assert {(m.ep, m.devices) for m in MESHES} >= {(1, 1), (2, 2), (4, 4), (8, 8), (4, 8)}
    assert any(m.replicated for m in MESHES)


def test_the_honest_global_view_passes_every_law_that_kills_a_mutant():
    """Mutants of expert parallelism are one-place changes of it; the kill matrix has them all."""
    target = global_view()
    for law in laws_named(sorted({m.law for m in MUTANTS})):
        findings = law.check(target, make_case(SPREAD))
        assert findings and all(f.ok for f in findings), (law.name, [f.message for f in findings if not f.ok][:2])


def test_each_class_has_two_mutants_and_its_law():
    classes = [m.fault for m in MUTANTS]
    assert all(classes.count(fault) >= 2 for fault in "ABEGHJ")
    known = {one.name: one.faults for one in (*LAWS, *EXCHANGE_LAWS)}
    assert all(m.fault in known[m.law] for m in MUTANTS)


@pytest.mark.world_size(4)
def test_a_bounded_capacity_reports_and_never_drops():
    """At demand nothing is reported; one row less overflows, is reported, and y is still the oracle's."""
    problem = Problem(T=16, K=2, E=8, D=8, F=8, mesh=expert_mesh(4))
    ids = rank_routings(problem, 4)["random"]
    case = make_case(problem, routing=ids)
    needed = int(np.bincount(ids.reshape(-1) // 2, minlength=4).max())
    for capacity, overflows in ((needed, False), (needed - 1, True)):
        run = jax.jit(lambda p, x, r, c=capacity: bounded_experts(c)(problem, p, x, r))
        y, bound = run(case.params, case.x, case.routing)
        assert bool(bound.overflowed) is overflows and int(bound.demand.max()) == needed
        assert all(f.ok for f in by_oracle(case, {"y": np.asarray(y)}, ("y",)))
    assert worst_case_of(problem) == 32
    with pytest.raises(InvalidInput, match="capacity is 0 rows a rank"):
        bounded_experts(0)


def test_what_xla_ep_declines_it_explains():
    problem = Problem(T=16, K=2, E=8, D=8, F=8)
    assert "capacity_factor is 1.0" in xla_ep.IMPLEMENTATION.can_run(problem.replace(capacity_factor=1.0)).reason
    if jax.device_count() == 8:
        wide = problem.replace(E=16, mesh=expert_mesh(16))
        assert "needs 16 devices, 8 are here" in xla_ep.IMPLEMENTATION.can_run(wide).reason
    with pytest.raises(InvalidInput, match="8 experts do not divide over 3 ranks"):
        problem.replace(mesh=expert_mesh(3))


def parity_of_ranks(size):
    """Runs in each process of `run_local`: the findings of one case spread over all devices, and y's bytes."""
    running.OPTIONS.update(QUICK_COMPILE)
    problem = Problem(**size, mesh=expert_mesh(jax.device_count()))
    case = make_case(problem)
    implementation = registry.complete(xla_ep.IMPLEMENTATION)
    findings = experts_findings(implementation, case)
    y = running.experts(implementation, case)["y"]
    return {"devices": jax.device_count(), "ok": [f.ok for f in findings], "y": y.tobytes().hex()}


def fail_on_rank_1(how):
    """Raises, dies or hangs on process 1, while process 0 waits for it."""
    if jax.process_index() == 1 and how == "raise":
        raise ValueError("rank one says no")
    if jax.process_index() == 1 and how == "die":
        os.kill(os.getpid(), 9)
    time.sleep(300)


def test_two_processes_give_what_one_gives():
    size = {"T": 8, "K": 2, "E": 4, "D": 8, "F": 8}
    here = launch.run_local(f"{_here()}:parity_of_ranks", size, processes=2, devices=1, limit=300)
    assert all(r["devices"] == 2 and len(r["ok"]) == 5 and all(r["ok"]) for r in here)
    problem = Problem(**size, mesh=expert_mesh(2))
    alone = running.experts(registry.complete(xla_ep.IMPLEMENTATION), make_case(problem))["y"]
    assert here[0]["y"] == here[1]["y"] == alone.tobytes().hex()


@pytest.mark.parametrize(
    ("how", "limit", "says"),
    [
        ("raise", 200.0, "rank one says no"),
        ("die", 200.0, "rank 1 of 2 ended with status -9"),
        ("hang", 6.0, "Timeout (0:00:0"),
    ],
)
def test_a_rank_that_fails_ends_all_in_time(how, limit, says):
    start = time.monotonic()
    with pytest.raises(launch.RankFailed) as error:
        launch.run_local(f"{_here()}:fail_on_rank_1", how, processes=2, limit=limit)
    assert says in str(error.value) and str(error.value).startswith("rank ")
    assert time.monotonic() - start < 150  # well before the sleep and the limit of the other rank would end


def test_launch_refuses_what_cannot_be_started(monkeypatch):
    with pytest.raises(InvalidInput, match="--ep is 0; accepted: 1 or more"):
        launch.start_devices(0)
    with pytest.raises(InvalidInput, match=f"--ep is 99 but {jax.device_count()} .* here"):
        launch.start_devices(99)
    with pytest.raises(
        InvalidInput, match="coordinator h:1, processes None, process None; accepted: all three or none"
    ):
        launch.join("h:1")
    with pytest.raises(InvalidInput, match="process is 2 of 2; accepted: 0 to 1"):
        launch.join("h:1", 2, 2)
    with pytest.raises(InvalidInput, match="0 processes"):
        launch.run_local("a:b", processes=0)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert launch.join() is False  # an allocation of one task has nobody to wait for


def test_compare_starts_its_ranks_and_prints_their_traffic(tmp_path):
    """A fresh process, since the number of devices is settled when JAX starts."""
    out = tmp_path / "r.json"
    sizes = "--tokens 16 --experts 8 --topk 2 --width 16 --expert-width 8".split()
    command = [
        sys.executable,
        "-m",
        "dropless.parity",
        "compare",
        "--ep",
        "4",
        "--skew",
        "zipf",
        "--no-timing",
        "--no-grad",
    ]
    ours = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(ours), "COLUMNS": "120"}
    command += [*sizes, "--impl", "xla_ep", "--ranks-per-node", "2", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | flags, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert "traffic of one dispatch, 4 ranks, 2 a node" in done.stdout and "x the mean rows" in done.stdout
    moved = json.loads(out.read_text())["cases"][0]["traffic"]
    assert moved["ranks"] == 4 and sum(moved["sent"]) <= sum(moved["sent_raw"]) and sum(moved["load"]) == 32


def _here() -> str:
    """This file as the processes of `run_local` can import it."""
    folder = os.path.dirname(__file__)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        {folder: 1, **dict.fromkeys(filter(None, [os.environ.get("PYTHONPATH")]))}
    )
    return "test_ep"
