"""A workload's layer meets the skew that was asked for, on each of its input variants."""

import numpy as np
import pytest
from dropless.parity.choice import choose
from dropless.parity.workload import Request, build


@pytest.mark.parametrize("preset", ["mixtral-8x7b", "deepseek-v3", "gpt-oss-20b"])
def test_the_router_chooses_the_drawn_skew(preset):
    workload = build(Request(preset=preset, tokens=64, width=256, expert_width=1, skew="zipf"))
    problem = workload.problem
    assert len({np.asarray(c.x).tobytes() for c in workload.cases}) == len(workload.cases) > 1
    for case in workload.cases:
        assert case.params is workload.cases[0].params
        live = choose(problem, case.params, case.x)
        assert np.array_equal(np.sort(live, axis=1), np.sort(np.asarray(case.routing.topk_idx), axis=1))
        loads = np.bincount(live.ravel(), minlength=problem.E)
        assert loads.max() > 1.5 * loads.mean()


def test_more_experts_than_columns_keep_the_drawn_routing_only():
    workload = build(Request(preset="qwen3-30b-a3b", tokens=64, width=32, expert_width=1, skew="one_hot"))
    loads = np.bincount(np.asarray(workload.cases[0].routing.topk_idx).ravel(), minlength=128)
    assert loads.max() == 48
