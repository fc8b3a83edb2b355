"""Weight layouts: every way there and back is exact, and a wrong layout shows by shape or by value."""

import jax.numpy as jnp
import numpy as np
import pytest
from dropless.parity.adapters import LAYOUTS, check_params, from_params, leaf_shapes, to_params
from dropless.parity.inputs import make_params, make_x
from dropless.parity.problem import Experts, InvalidInput, Problem, Router

PROBLEMS = [
    Problem(
        T=3,
        K=2,
        E=4,
        D=6,
        F=5,
        dtype="bfloat16",
        router=Router(gate_bias=bias, selection_bias=bias),
        experts=Experts(gated=gated, wi_bias=bias, wo_bias=bias, shared_F=shared),
    )
    for gated, bias, shared in ((True, True, 7), (True, False, 0), (False, True, 0), (False, False, 7))
]
GATED = Problem(T=5, K=1, E=3, D=6, F=4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "problem", PROBLEMS, ids=lambda p: f"{p.experts.gated}-{p.experts.wi_bias}-{p.experts.shared_F}"
)
def test_there_and_back_is_exact(problem, layout):
    params = make_params(problem)
    back = to_params(problem, layout, from_params(problem, layout, params))
    assert back.named().keys() == params.named().keys()
    for name, leaf in params.named().items():
        assert back.named()[name].dtype == leaf.dtype and np.array_equal(back.named()[name], leaf), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_computes_what_its_owner_computes(layout):
    """The first product in the layout's own words, against wi's halves: gate first, then up."""
    params, x = make_params(GATED), make_x(GATED).astype(np.float64)
    weights = from_params(GATED, layout, params)
    wi = np.asarray(params.wi[1]).astype(np.float64)
    gate, up = x @ wi[:, :4], x @ wi[:, 4:]

    def of(name):
        return np.asarray(weights[name][1]).astype(np.float64)

    if layout == "split":
        got = x @ of("wi_0"), x @ of("wi_1")
    elif layout == "interleaved":
        both = x @ of("gate_up_proj")
        got = both[:, ::2], both[:, 1::2]
    elif layout == "torch":
        both = x @ of("gate_up_proj").T
        got = both[:, :4], both[:, 4:]
    else:
        got = x @ of("gate_proj").T, x @ of("up_proj").T
    assert np.array_equal(np.round(got[0] - gate, 12), np.zeros_like(gate))
    assert np.array_equal(np.round(got[1] - up, 12), np.zeros_like(up))


@pytest.mark.parametrize("held, read", [("torch", "interleaved"), ("interleaved", "torch"), ("torch", "per_expert")])
def test_a_wrong_layout_shows_by_shape_or_name(held, read):
    weights = from_params(GATED, held, make_params(GATED))
    with pytest.raises(InvalidInput, match=r"accepted: \(|accepted: "):
        to_params(GATED, read, weights)


def test_interleaved_columns_read_as_halves_show_by_value():
    # D = 2F: the shapes of the two layouts agree, so only the values can tell.
    problem = GATED.replace(D=8, F=4)
    params = make_params(problem)
    weights = from_params(problem, "interleaved", params)
    weights["down_proj"] = jnp.swapaxes(weights["down_proj"], 1, 2)
    wrong = to_params(problem, "torch", weights)
    assert wrong.wi.shape == params.wi.shape
    assert (np.asarray(wrong.wi) != np.asarray(params.wi)).mean() > 0.9


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda w: w.pop("wo"), "lacks wo"),
        (lambda w: w.update(w2=1), "got w2; accepted: gate_kernel"),
        (lambda w: w.update(wi_0=w["wi_0"][:2]), r"wi_0 has shape \(2, 6, 4\); accepted: \(3, 6, 4\)"),
        (lambda w: w.update(wo=w["wo"].astype(jnp.bfloat16)), "wo is bfloat16; accepted: float32"),
        (lambda w: w.update(wo_bias=jnp.zeros((3, 6))), "got wo_bias"),
    ],
)
def test_errors_name_the_weight(change, message):
    weights = from_params(GATED, "split", make_params(GATED))
    change(weights)
    with pytest.raises(InvalidInput, match=message):
        to_params(GATED, "split", weights)


def test_a_list_of_too_few_experts_is_named():
    weights = from_params(GATED, "per_expert", make_params(GATED))
    weights["up_proj"].pop()
    with pytest.raises(InvalidInput, match="up_proj holds 2 arrays; accepted: one per expert, 3"):
        to_params(GATED, "per_expert", weights)


def test_an_unknown_layout_is_named():
    with pytest.raises(InvalidInput, match="layout is 'keras'; accepted: split, interleaved, torch, per_expert"):
        to_params(GATED, "keras", {})


def test_params_are_checked_against_the_problem():
    params = make_params(GATED)
    check_params(GATED, params)
    assert set(leaf_shapes(GATED)) == {"gate_kernel", "wi", "wo"}
    with pytest.raises(InvalidInput, match=r"params.wo_bias is None; accepted: an array of shape \(3, 6\)"):
        check_params(GATED.replace(experts_wo_bias=True), params)
    with pytest.raises(InvalidInput, match=r"params.gate_bias is given but the problem has none"):
        check_params(GATED, params.replace(gate_bias=jnp.ones(3)))
    with pytest.raises(InvalidInput, match=r"params.wi has shape"):
        check_params(GATED.replace(experts_gated=False), params)
