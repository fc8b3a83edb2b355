"""Presets against the models' published numbers, written here a second time."""

import numpy as np
import pytest
from dropless.parity.choice import choose
from dropless.parity.inputs import make_case
from dropless.parity.presets import PRESETS
from dropless.parity.problem import Clamp, Experts, InvalidInput, Problem, Router

SOFTMAX = Router(score="softmax", softmax_order="before", logits_dtype="activation")
NORMALISED = Router(score="softmax", softmax_order="before", normalize=True, logits_dtype="activation")
GPT_OSS = Router(score="softmax", softmax_order="after", gate_bias=True, logits_dtype="activation")
DEEPSEEK = Router(
    score="sigmoid",
    normalize=True,
    norm_eps=1e-20,
    groups=8,
    group_topk=4,
    group_score_topk=2,
    scaling=2.5,
    selection_bias=True,
    logits_dtype="float32",
)
CLAMPED = Experts(clamp=Clamp(alpha=1.702, limit=7.0, offset=1.0), wi_bias=True, wo_bias=True)

PUBLISHED = {
    "mixtral-8x7b": (8, 2, 4096, 14336, NORMALISED, Experts()),
    "mixtral-8x22b": (8, 2, 6144, 16384, NORMALISED, Experts()),
    "deepseek-v3": (256, 8, 7168, 2048, DEEPSEEK, Experts(shared_F=2048)),
    "qwen3-30b-a3b": (128, 8, 2048, 768, NORMALISED, Experts()),
    "qwen3-235b-a22b": (128, 8, 4096, 1536, NORMALISED, Experts()),
    "gpt-oss-20b": (32, 4, 2880, 2880, GPT_OSS, CLAMPED),
    "gpt-oss-120b": (128, 4, 2880, 2880, GPT_OSS, CLAMPED),
    "olmoe-1b-7b": (64, 8, 2048, 1024, SOFTMAX, Experts()),
}


def test_every_model_is_there():
    assert set(PRESETS) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_numbers_are_the_published_ones(name):
    E, K, D, F, router, experts = PUBLISHED[name]
    want = Problem(T=8192, E=E, K=K, D=D, F=F, dtype="bfloat16", router=router, experts=experts)
    assert PRESETS[name].problem() == want


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_setting_says_where_it_was_read(name):
    preset = PRESETS[name]
    default, problem = Problem(T=1, K=1, E=1, D=1, F=1), preset.problem()
    for group in ("router", "experts"):
        own, usual = getattr(problem, group), getattr(default, group)
        for field in type(own).__dataclass_fields__:
            if getattr(own, field) != getattr(usual, field):
                assert preset.values[f"{group}_{field}"].origin, field
    assert all(v.origin for v in preset.values.values())
    assert preset.source.count("/") == 1 and preset.provenance()["E"].startswith(f"{problem.E} (")


@pytest.mark.parametrize("name", PUBLISHED)
def test_shrunk_keeps_the_experts_topk_and_router(name):
    full, small = PRESETS[name].problem(), PRESETS[name].shrunk().problem()
    assert (small.E, small.K, small.router, small.dtype) == (full.E, full.K, full.router, full.dtype)
    assert full.replace(T=512, D=256, F=128, experts_shared_F=128 if full.experts.shared_F else 0) == small
    assert "shrunk" in PRESETS[name].shrunk().tags and "shrunk" not in PRESETS[name].tags


def test_overrides_reach_into_the_groups():
    preset = PRESETS["deepseek-v3"].shrunk()
    problem = preset.problem(T=16, E=8, K=2, router_groups=1, router_group_topk=1, dtype="float32")
    assert (problem.T, problem.E, problem.dtype, problem.router.groups) == (16, 8, "float32", 1)
    with pytest.raises(InvalidInput, match="6 experts do not divide into 8 groups"):
        preset.problem(E=6, K=2)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shrunk_preset_routes_live_as_asked(name):
    problem = PRESETS[name].shrunk().problem(T=64, F=1, experts_shared_F=0)
    case = make_case(problem, pattern="zipf", live=True)
    wanted = np.sort(np.asarray(case.routing.topk_idx), axis=1)
    assert np.array_equal(np.sort(choose(problem, case.params, case.x), axis=1), wanted)
    loads = np.sort(np.bincount(wanted.ravel(), minlength=problem.E))
    assert loads[-1] > 2 * loads.mean()
