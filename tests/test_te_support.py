"""What `te` says it can do, both ways, on a machine that has none of it."""

import dataclasses
import subprocess
import sys

import jax
import pytest
from dropless.optimized.te import support
from dropless.optimized.te.support import Facts
from dropless.parity import registry
from dropless.parity.problem import Mesh, Problem, Router

HOPPER = Facts(
    platform="gpu",
    device="NVIDIA H200",
    devices=2,
    capability=9.0,
    installed=True,
    te=(2, 20, 2),
    cublas=(13, 10, 0),
    nccl=(2, 32, 3),
)
BF16 = Problem(T=64, K=4, E=8, D=64, F=32, dtype="bfloat16")
DEEPSEEK = Router(
    score="sigmoid",
    normalize=True,
    norm_eps=1e-20,
    groups=4,
    group_topk=2,
    group_score_topk=2,
    scaling=2.5,
    selection_bias=True,
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"platform": "cpu", "capability": None}, ("CPU", "9.0")),
        ({"capability": 8.0}, ("8.0", "9.0")),
        ({"capability": None}, ("None", "9.0")),
        ({"installed": False, "te": ()}, ("not installed", "2.20.2")),
        ({"te": (2, 19, 0)}, ("2.19.0", "2.20.2")),
        ({"cublas": (13, 2, 0)}, ("13.2.0", "13.4.0")),
    ],
)
def test_a_machine_that_cannot_run_te_is_told_the_number_that_failed(changes, words):
    told = support.machine(dataclasses.replace(HOPPER, **changes))
    assert not told
    assert all(word in told.reason for word in words), told.reason


@pytest.mark.parametrize("changes", [{}, {"te": (2, 21)}, {"capability": 10.0}, {"cublas": ()}, {"devices": 1}])
def test_a_machine_that_can_run_te_is_accepted(changes):
    assert support.machine(dataclasses.replace(HOPPER, **changes)) == (True, "")


def test_several_gpus_are_counted_and_nccl_is_read():
    assert support.several(HOPPER)
    assert support.several(dataclasses.replace(HOPPER, devices=1)).reason.startswith("1 GPU")
    assert "2.29.7" in support.several(dataclasses.replace(HOPPER, nccl=(2, 29, 7))).reason
    assert "CPU" in support.several(Facts()).reason


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"experts_wi_bias": True, "experts_wo_bias": True},
        {"experts_gated": False, "experts_activation": "relu2"},
        {"experts_weight_placement": "early", "experts_shared_F": 24},
        {"router": DEEPSEEK},
        {"router_score": "sqrtsoftplus", "router_gate_bias": True, "router_logits_dtype": "activation"},
        {"router_softmax_order": "after"},
        {"K": 8},
        {"T": 0},
    ],
)
def test_what_te_computes(changes):
    assert support.single_device(BF16.replace(**changes), HOPPER) == (True, "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float32"}, ("float32", "bfloat16")),
        ({"dtype": "float16"}, ("float16", "bfloat16")),
        ({"recipe": "mxfp8"}, ("mxfp8", "9.0", "10.0")),
        ({"capacity_factor": 1.25}, ("1.25", "None")),
        ({"D": 33}, ("D is 33", "8")),
        ({"F": 12}, ("F is 12", "8")),
        ({"mesh": Mesh(axes=(("ep", 2),), ep_axis="ep")}, ("2 devices", "te_ep")),
        ({"E": 8168, "K": 4}, ("8168", "8160")),
        ({"router": dataclasses.replace(DEEPSEEK, group_score_topk=1)}, ("group_score_topk is 1", "2 here")),
        ({"router": DEEPSEEK, "K": 3}, ("top-k is 3", "group_topk 2")),
    ],
)
def test_what_te_declines_names_the_switch(changes, words):
    told = support.single_device(BF16.replace(**changes), HOPPER)
    assert not told
    assert all(word in told.reason for word in words), told.reason


@pytest.mark.parametrize(
    ("router", "K", "fused"),
    [
        (Router(), 2, True),
        (Router(normalize=True), 2, False),
        (Router(softmax_order="after"), 2, True),
        (Router(softmax_order="after", normalize=True), 2, False),
        (Router(score="sigmoid", normalize=True, norm_eps=1e-20), 2, True),
        (Router(score="sigmoid", normalize=True), 2, False),
        (Router(score="sigmoid"), 2, False),
        (Router(score="sigmoid"), 1, True),
        (Router(score="sqrtsoftplus", normalize=True, norm_eps=1e-20), 4, True),
        (DEEPSEEK, 4, False),
    ],
)
def test_whose_weights_a_router_gets(router, K, fused):
    """Weights come from TE's kernel only where it computes exactly the contract's; else a reason names the switch."""
    told = support.fused_weights(router, K)
    assert bool(told) == fused
    assert bool(told.reason) != fused


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="this is about machines without a GPU")
def test_te_is_listed_with_its_reason():
    assert "te" in registry.names()
    told = registry.get("te").available()
    assert not told
    assert "9.0" in told.reason


def test_asking_imports_nothing_of_transformer_engine():
    code = (
        "import sys\n"
        "from dropless.parity import registry\n"
        "from dropless.parity.problem import Problem\n"
        "te = registry.get('te')\n"
        "te.available(), te.supports(Problem(T=8, K=2, E=4, D=16, F=8))\n"
        "print([m for m in sys.modules if m.startswith('transformer_engine')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
