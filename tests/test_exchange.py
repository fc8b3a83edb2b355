"""Moving tokens between ranks: the reference and both transports under the laws, capacity, traffic, and every refusal."""

import itertools

import jax
import numpy as np
import pytest
from dropless.optimized.xla import exchange as xla
from dropless.optimized.xla.mesh import device_mesh
from dropless.optimized.xla.transport import plan_exchange
from dropless.parity import running
from dropless.parity.demand import demand, group_counts, worst_case_rows
from dropless.parity.ep_cases import FAMILIES, rank_routings, token_payload, tokens_of
from dropless.parity.inputs import make_case
from dropless.parity.interface import Implementation
from dropless.parity.laws_exchange import LAWS
from dropless.parity.placement import expert_mesh, token_axes, token_ranks
from dropless.parity.problem import Experts, InvalidInput, Mesh, Problem, Routing
from dropless.parity.traffic import traffic
from dropless.reference import exchange as reference

PROBLEM = Problem(T=12, K=3, E=8, D=8, F=4)
BFLOAT16 = Problem(
    T=8, K=2, E=8, D=8, F=4, dtype="bfloat16", mesh=expert_mesh(2, data=2), experts=Experts(weight_placement="early")
)
OURS = {
    "reference": (reference.ep_dispatch, reference.ep_combine),
    "padded": xla.exchange_of("padded"),
    "ragged": xla.exchange_of("ragged"),
}
QUICK = ("ep-rows", "ep-round-trip", "ep-tail", "ep-demand")
"""Laws that share two executables; the others compile their own."""
PLANS = {
    "reference": (PROBLEM, QUICK),
    "padded": (PROBLEM, tuple(one.name for one in LAWS)),
    "ragged": (BFLOAT16, QUICK),
}
"""float32, late, on four ranks; bfloat16, early, on data x expert."""


@pytest.fixture(autouse=True)
def _compile_quickly(monkeypatch):
    monkeypatch.setattr(running, "OPTIONS", dict(running.QUICK_COMPILE))


@pytest.mark.world_size(8)
@pytest.mark.parametrize("name", OURS)
def test_every_exchange_obeys_the_laws(name):
    """All ten families of routings, bit for bit."""
    dispatch, combine = OURS[name]
    target = Implementation(name=name, stages={"ep_dispatch": dispatch, "ep_combine": combine})
    problem, names = PLANS[name]
    case = make_case(problem)
    for law in (one for one in LAWS if one.name in names):
        findings = law.check(target, case)
        assert findings and all(f.ok for f in findings), (law.name, [f.message for f in findings if not f.ok][:2])


def test_worst_case_rows_is_the_tightest_bound():
    """Against every load that a few tokens can make; a buffer of no rows is one block."""
    for n, K, e, align in itertools.product((1, 2, 3), (1, 2, 3), (1, 2, 3), (1, 2, 3, 4)):
        loads = (g for g in itertools.product(range(n + 1), repeat=e) if sum(g) <= n * min(K, e))
        want = max(sum(-(-one // align) * align for one in g) for g in loads)
        assert worst_case_rows(n, K, e, align) == max(want, align)
    assert worst_case_rows(0, 2, 4, 128) == 128
    with pytest.raises(InvalidInput, match="alignment 0; accepted"):
        worst_case_rows(4, 2, 2, 0)


def test_demand_counts_rows_by_rank():
    ids = np.array([[0, 3], [0, -1], [2, 3], [-1, -1]])
    np.testing.assert_array_equal(demand(ids, E=4, ep=2), [2, 3])
    np.testing.assert_array_equal(demand(ids, E=4, ep=2, align=4), [4, 8])
    np.testing.assert_array_equal(demand(ids, E=4, ep=2, groups=2), [2, 1, 0, 2])
    np.testing.assert_array_equal(group_counts(ids, E=4, groups=2), [[2, 0, 0, 1], [0, 0, 1, 1]])


def test_families_do_what_their_names_say():
    problem = Problem(T=24, K=2, E=8, D=8, F=4)
    found = rank_routings(problem, 4)
    assert set(found) == set(FAMILIES)
    for ids in found.values():
        assert all(len(set(real)) == len(real) for real in (row[row >= 0].tolist() for row in ids))
    rank = np.arange(24) // 6
    to = {name: np.where(ids >= 0, ids // 2, -1) for name, ids in found.items()}
    assert (to["one rank"] == 3).all() and (to["idle rank"] != 0).all()
    assert (to["never local"] != rank[:, None]).all() and (to["silent rank"][rank == 0] == -1).all()
    assert (to["only local"] == rank[:, None]).all() and (to["full row"][rank != 0] == -1).all()
    assert [int((found["uneven"][rank == r, 0] >= 0).sum()) for r in range(4)] == [0, 3, 6, 2]


def test_payloads_name_every_token():
    x = token_payload(100, 8)
    assert x is not None
    np.testing.assert_array_equal(tokens_of(x, 100), np.arange(100))
    assert tokens_of(np.zeros((1, 8)), 100) == -1 and token_payload(256, 8) is None


def test_placement_puts_the_expert_axis_innermost():
    mesh = Mesh(axes=(("e", 4), ("d", 2), ("copy", 2)), ep_axis="e", replicated=("copy",))
    assert token_axes(mesh) == ("d", "e") and token_ranks(mesh) == 8 and mesh.devices == 16


def test_traffic_counts_raw_once_a_rank_and_once_a_node():
    """Four ranks, two a node: a token to both experts of rank 1, and one to both ranks of the other node."""
    problem = Problem(T=4, K=2, E=8, D=10, F=1, dtype="bfloat16")
    ids = np.array([[2, 3], [4, 6], [4, -1], [7, 0]])  # experts of ranks 1 1 | 2 3 | 2 | 3 0
    moved = traffic(problem, ids, 4, ranks_per_node=2)
    row = 20
    assert moved.sent_raw.tolist() == [2 * row, 2 * row, 0, row]
    assert moved.sent.tolist() == [row, 2 * row, 0, row]
    assert moved.sent_network.tolist() == [0, row, 0, row]
    assert moved.received.tolist() == [row, row, row, row]
    assert moved.load.tolist() == [1, 2, 2, 2] and moved.imbalance == 2 / 1.75
    np.testing.assert_array_equal(moved.load, demand(ids, E=8, ep=4))
    # Inside nodes the busiest direction is one row; the network carries one row a rank.
    assert moved.seconds(link=row, network=1e12) == 1.0 and moved.seconds(link=1e12, network=row) == 1.0
    with pytest.raises(InvalidInput, match="4 ranks with 3 a node"):
        traffic(problem, ids, 4, ranks_per_node=3)
    with pytest.raises(InvalidInput, match="link speeds are 0"):
        moved.seconds(link=0)
    assert traffic(problem, np.full((4, 2), -1), 4).imbalance == 1.0


@pytest.mark.parametrize("side", [reference, xla], ids=["reference", "xla"])
def test_wrong_meshes_and_shapes_are_one_clear_line(side):
    def dispatch(problem, ranks, tokens):
        return side.ep_dispatch(problem, np.ones((ranks, 2, 8), np.float32), _routing(tokens, problem.K))

    with pytest.raises(InvalidInput, match="8 experts do not divide over 3 ranks; accepted: a number of ranks that"):
        dispatch(PROBLEM, 3, 6)
    with pytest.raises(InvalidInput, match="tokens lie on 2 ranks; accepted: 4, as the mesh data 2 x expert 2 has it"):
        dispatch(PROBLEM.replace(mesh=expert_mesh(2, data=2)), 2, 4)
    with pytest.raises(InvalidInput, match="the routing has 5 tokens; accepted: 8"):
        dispatch(PROBLEM, 4, 5)


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        (Mesh(axes=(("e", 16),), ep_axis="e"), "the mesh e 16 needs 16 devices, 8 are here; accepted: up to 8"),
        (Mesh(axes=(("e", 2), ("e", 2)), ep_axis="e"), "mesh axes are e, e; accepted: different names"),
        (Mesh(axes=(("e", 2), ("d", 0)), ep_axis="e"), "mesh axis d has size 0"),
        (Mesh(axes=(("e", 2),), ep_axis="e", replicated=("c",)), "replicated axis 'c' is not in the mesh"),
        (Mesh(axes=(("e", 2),), ep_axis="e", replicated=("e",)), "the expert axis 'e' is replicated"),
    ],
)
@pytest.mark.world_size(8)
def test_grids_that_cannot_be_built_say_why(mesh, says):
    if jax.device_count() != 8:
        pytest.skip("the message names eight devices")
    with pytest.raises(InvalidInput) as error:
        device_mesh(mesh)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_transport_is_refused():
    with pytest.raises(InvalidInput, match="transport is 'pigeon'; accepted: padded, ragged"):
        plan_exchange(np.zeros((1, 1), np.int32), 2, 2, 1, "e", "pigeon")  # type: ignore[arg-type]


def _routing(tokens, K):
    return Routing(np.zeros((tokens, K), np.int32), np.ones((tokens, K), np.float32))  # type: ignore[arg-type]
