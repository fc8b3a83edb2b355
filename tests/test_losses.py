"""The auxiliary losses at values worked out by hand, and the ways in which published ones went wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropless.parity.compare import judge, same_bits
from dropless.parity.interface import Judged
from dropless.parity.problem import Problem, Router
from dropless.parity.tolerances import SUMMATION, TRANSCENDENTAL
from dropless.reference import losses as reference

E = 4
CERTAIN = 200.0
"""exp(-200) underflows: softmax over logits 200 apart is one-hot, exactly."""

losses = jax.jit(reference.losses, static_argnums=0)


def problem_of(topk_idx, experts=E, **router):
    tokens, k = np.shape(topk_idx)
    return Problem(T=tokens, K=k, E=experts, D=1, F=1, router=Router(**router))


def measured(topk_idx, logits, *, experts=E, mask=None, segment_ids=None, **router):
    topk_idx = np.asarray(topk_idx, np.int32)
    mask = None if mask is None else jnp.asarray(mask, bool)
    segment_ids = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
    problem = problem_of(topk_idx, experts, **router)
    return losses(problem, jnp.asarray(logits, jnp.float32), jnp.asarray(topk_idx), mask=mask, segment_ids=segment_ids)


def certain(experts):
    """One expert each, and logits that leave no doubt about it."""
    experts = np.asarray(experts, np.int32)
    return experts[:, None], CERTAIN * np.eye(E, dtype=np.float32)[experts]


def slope(name, topk_idx, logits, **kwargs):
    return jax.jit(jax.grad(lambda z: getattr(measured(topk_idx, z, **kwargs), name)))(jnp.asarray(logits, jnp.float32))


def close(got, want):
    return judge("loss", got, Judged(np.float64(want), np.float64(want * SUMMATION * TRANSCENDENTAL)), dtype="float32")


def test_uniform_probabilities_give_one_for_any_routing():
    for topk_idx in ([[0, 1]] * 8, [[0, 1], [2, 3]] * 4, [[0, 3]] * 7 + [[1, 2]]):
        got = measured(topk_idx, np.zeros((8, E)))
        assert got.balance.tolist() == 1.0 and got.sequence.tolist() == 1.0


def test_more_segments_than_one_product_sums():
    """Segments of two tokens on one expert, and one that is balanced; the last of them lie in a second product."""
    pairs = reference.SEGMENTS + 2
    idx, logits = certain([0, 0] * pairs + [0, 1, 2, 3])
    ids = [*np.repeat(np.arange(pairs), 2), *[pairs] * 4]
    got = measured(idx, logits, segment_ids=ids).sequence
    assert close(got, (E * pairs + 1) / (pairs + 1)).ok


@pytest.mark.parametrize("k", [1, 2])
def test_collapse_onto_k_experts_gives_experts_over_k(k):
    logits = np.where(np.arange(E) < k, CERTAIN, 0)[None].repeat(8, 0)
    assert measured([list(range(k))] * 8, logits).balance.tolist() == E / k


def test_the_loss_varies_with_the_routing():
    collapsed = measured(*certain([0] * 8)).balance.tolist()
    balanced = measured(*certain([0, 1, 2, 3] * 2)).balance.tolist()
    assert (collapsed, balanced) == (4.0, 1.0)


def test_two_layers_unbalanced_in_opposite_ways_do_not_cancel():
    """Each layer reads 2; averaged over their concatenation it would read 1."""
    a, b = certain([0, 1] * 4), certain([2, 3] * 4)
    assert [measured(*layer).balance.tolist() for layer in (a, b)] == [2.0, 2.0]
    both = [np.concatenate(pair) for pair in zip(a, b, strict=True)]
    assert measured(*both).balance.tolist() == 1.0
    segments = measured(*both, segment_ids=[5] * 8 + [-3] * 8)
    assert (segments.balance.tolist(), segments.sequence.tolist()) == (1.0, 2.0)


def test_masked_tokens_count_in_no_loss():
    """Eight tokens on experts 0 and 1 read 2; eight more on expert 0, if they counted, 2.5."""
    real = certain([0, 1] * 4)
    padded = certain([0, 1] * 4 + [0] * 8)
    mask = [True] * 8 + [False] * 8
    assert measured(*padded).balance.tolist() == 2.5
    nowhere = padded[0].copy()
    nowhere[8:] = -1
    garbage = padded[1].copy()
    garbage[8:] = np.nan
    want = measured(*real)
    for idx, logits in ((padded[0], padded[1]), (nowhere, garbage)):
        got = measured(idx, logits, mask=mask, segment_ids=[0] * 8 + [1] * 8)
        assert [v.tolist() for v in jax.tree.leaves(got)] == [v.tolist() for v in jax.tree.leaves(want)]
        for name in ("balance", "sequence", "z"):
            grad = slope(name, idx, logits, mask=mask)
            assert same_bits("dlogits", grad[8:], np.zeros((8, E), np.float32)).ok
            assert bool(jnp.isfinite(grad).all())


def test_each_segment_is_judged_alone_and_absent_ones_do_not_count():
    idx, logits = certain([0] * 4 + [0, 1, 2, 3])
    assert measured(idx, logits, segment_ids=[0] * 4 + [1] * 4).sequence.tolist() == (4 + 1) / 2
    mask = [True] * 4 + [False] * 4
    assert measured(idx, logits, segment_ids=[0] * 4 + [1] * 4, mask=mask).sequence.tolist() == 4.0
    assert measured(idx, logits).sequence.tolist() == measured(idx, logits).balance.tolist()


def test_probabilities_are_over_all_experts_not_the_chosen():
    """A never-chosen expert's logit has a slope: at counts (8, 0, 0, 0), E * P_t0 / T has d/dz_3 = -E P_0 P_3 / T."""
    logits = np.array([[np.log(2), 0, 0, 0]] * 8)  # P = (2, 1, 1, 1) / 5
    grad = slope("balance", [[0]] * 8, logits)
    want = np.full((8, E), -E * 2 / 25 / 8)
    want[:, 0] = E * 2 / 5 * 3 / 5 / 8
    finding = judge("dlogits", grad, Judged(want, np.abs(want) * SUMMATION * TRANSCENDENTAL), dtype="float32")
    assert finding.ok, finding.message


def test_sigmoid_and_sqrtsoftplus_scores_are_divided_by_their_sum():
    z = np.log([3.0, 1.0, 1.0, 1 / 3])
    for score, s in (("sigmoid", np.array([3, 2, 2, 1]) / 4), ("sqrtsoftplus", np.sqrt(np.log1p(np.exp(z))))):
        got = measured([[0], [0]], [z, z], score=score)
        finding = close(got.balance, E * s[0] / s.sum())
        assert finding.ok, finding.message


def test_z_is_the_mean_of_the_squared_logsumexp():
    got = measured([[0], [1]], [[0, 0, 0, 0], np.log([1, 2, 3, 4])])
    finding = close(got.z, (np.log(4) ** 2 + np.log(10) ** 2) / 2)
    assert finding.ok, finding.message


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("name", ["balance", "sequence", "z"])
def test_gradients_are_finite_at_a_zero_router_and_perfect_balance(name, score):
    idx = [[0], [1], [2], [3]] * 2
    assert np.isfinite(np.asarray(slope(name, idx, np.zeros((8, E)), score=score, segment_ids=[0] * 8))).all()


def test_no_real_token_gives_zero():
    for tokens, mask in ((0, None), (3, [False] * 3)):
        got = measured(np.zeros((tokens, 1)), np.full((tokens, E), np.nan), mask=mask, segment_ids=[0] * tokens)
        assert [v.tolist() for v in jax.tree.leaves(got)] == [0.0, 0.0, 0.0]
        assert all(v.dtype == jnp.float32 for v in jax.tree.leaves(got))


def test_slots_without_an_expert_are_not_counted():
    """Counts (2, 0, 0, 0) of four tokens with P uniform: E / (K T^2) * 2 * T/E = 2 / T."""
    assert measured([[0], [-1], [0], [-1]], np.zeros((4, E))).balance.tolist() == 0.5
