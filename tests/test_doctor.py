"""Known-bad combinations: each rule applies exactly where it should, whatever machine this is."""

import pytest
from dropless.parity.doctor import RULES, diagnose, version

GOOD = {
    "platform": "gpu",
    "device_kind": "NVIDIA H200",
    "compute_capability": 9.0,
    "matmul_precision": "default",
    "versions": {
        "jax": "0.11.2",
        "cublas": "13.8.1.2",
        "cudnn": "9.22.0",
        "nccl": "2.30.4",
        "transformer_engine": "2.20.2",
    },
}


def names(**changes):
    env = {**GOOD, **{k: v for k, v in changes.items() if k in GOOD}}
    env["versions"] = {**GOOD["versions"], **{k: v for k, v in changes.items() if k not in GOOD}}
    return {d.rule.name for d in diagnose(env)}


def test_a_good_machine_has_nothing_to_say():
    assert names() == set()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cublas": "13.2.1"}, {"cuBLAS 13.2", "cuBLAS below 13.4 on Hopper", "cuBLAS below 13.8.1"}),
        ({"cublas": "13.3.0"}, {"cuBLAS below 13.4 on Hopper", "cuBLAS below 13.8.1"}),
        ({"cublas": "13.2.1", "compute_capability": 10.0}, {"cuBLAS 13.2", "cuBLAS below 13.8.1"}),
        ({"cublas": "13.8.0"}, {"cuBLAS below 13.8.1"}),
        ({"cublas": "13.20.0"}, set()),
        ({"cublas": None}, set()),
        ({"nccl": "2.30.3"}, {"NCCL below 2.30.4"}),
        ({"transformer_engine": "2.19.0"}, {"Transformer Engine below 2.20.2"}),
        ({"transformer_engine": "2.19.0", "compute_capability": 10.0}, set()),
        ({"transformer_engine": None}, {"GPU without Transformer Engine"}),
        ({"compute_capability": 8.0}, {"compute capability below 9.0"}),
        ({"jax": "0.9.0"}, {"JAX outside the tested range"}),
        ({"jax": "0.13.0"}, {"JAX outside the tested range"}),
        ({"jax": "0.12.0"}, set()),
        ({"matmul_precision": "tensorfloat32"}, {"default matmul precision below float32"}),
        ({"platform": "cpu", "cublas": "13.2"}, {"no GPU"}),
    ],
)
def test_each_rule_applies_where_it_should(changes, expected):
    assert names(**changes) == expected


def test_versions_compare_as_numbers():
    assert version("13.10.0") > version("13.9.9")
    assert version("2.20.2+abc") == (2, 20, 2)
    assert version(None) == version("unknown") == ()


def test_every_rule_says_what_it_does_and_what_to_do():
    for rule in RULES:
        assert rule.consequence and rule.remedy, rule.name
