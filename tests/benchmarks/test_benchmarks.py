"""pytest-benchmark as the driver: every call of every implementation that agrees, on inputs that change each round.

    python -m pytest tests/benchmarks --benchmark-only

A layer is judged before it is timed, and the outputs of the last round are judged after; what disagrees fails here instead
of getting a time. `--benchmark-json FILE` keeps the raw rounds; the statistics of `dropless bench` come from its own
record.
"""

from __future__ import annotations

import jax
import pytest
from dropless.parity import complete, get
from dropless.parity.costs import cost
from dropless.parity.law_tools import use_oracle
from dropless.parity.measure import group_sizes
from dropless.parity.stages import WHATS, stage_call, stage_findings
from dropless.parity.workload import Request, build

SHAPES = {
    "mixtral-8x7b": Request(preset="mixtral-8x7b", tokens=256),
    "qwen3-30b-a3b": Request(preset="qwen3-30b-a3b", tokens=64),
}
IMPLEMENTATIONS = ("loop_and_pad", "blocked", "ragged_dot")


@pytest.fixture(scope="module", params=SHAPES)
def workload(request):
    use_oracle("oracle")
    return build(SHAPES[request.param])


@pytest.mark.parametrize("what", [w for w in WHATS if not w.startswith("layer")])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_speed(benchmark, workload, name, what):
    implementation = complete(get(name))
    stage = what.partition(" ")[0]
    if name != "loop_and_pad" and stage in implementation.composed:
        pytest.skip(f"{name}'s {stage} is the baseline's")
    call = stage_call(implementation, what, workload.cases)
    findings = stage_findings(what, call, workload.cases[0], 0, call(0), "oracle")
    assert findings and all(f.ok for f in findings), [f.message for f in findings if not f.ok]

    rounds, last = 9, []

    def variant():
        last.append(len(last) % len(workload.cases))
        return (last[-1],), {}

    out = benchmark.pedantic(call, setup=variant, rounds=rounds, warmup_rounds=1)
    after = stage_findings(what, call, workload.cases[last[-1]], last[-1], out, "oracle")
    assert after and all(f.ok for f in after), [f.message for f in after if not f.ok]
    rows = int(group_sizes(workload.cases[0]).sum())
    work = cost(workload.problem, what, rows)
    benchmark.extra_info |= {
        "implementation": name,
        "call": what,
        "case": workload.label,
        "useful_flops": work.flops,
        "compile_s": call.compile_s,
        "temp_bytes": call.temp_bytes,
        "backend": jax.default_backend(),
    }
