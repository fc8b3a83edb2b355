"""What of expert parallelism on GPUs shows without one: limits, arguments, and the whole wiring around a stand-in for TE.

The stand-in does what TE's headers promise and no more: handles carry the routing, blocks are padded with zeros, the
tail beyond them and what no product writes is NaN, counts come rounded up, and a second start is refused.
"""

import contextlib
import dataclasses
import inspect
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropless.optimized.te import exchange, group, grouped_gemm, nccl_ep, te_block, te_ep
from dropless.optimized.te.support import Facts
from dropless.parity import registry, running
from dropless.parity.inputs import make_case
from dropless.parity.interface import Implementation, Support, Unsupported
from dropless.parity.judge import experts_findings
from dropless.parity.law_tools import expect
from dropless.parity.laws_exchange import LAWS
from dropless.parity.placement import expert_mesh
from dropless.parity.problem import Experts, InvalidInput, Mesh, Problem, Router

GPUS = Facts(
    platform="gpu",
    device="H200",
    devices=8,
    capability=9.0,
    installed=True,
    te=(2, 20, 2),
    cublas=(13, 10),
    nccl=(2, 32, 3),
)
PROBLEM = Problem(T=16, K=2, E=8, D=8, F=8, dtype="bfloat16", mesh=expert_mesh(2, data=2))


class StandIn:
    """One process's TE: the group that it was started for, and the calls it saw."""

    def __init__(self):
        self.started: Any = None
        self.starts = 0

    def ep_bootstrap(self, **sizes):
        assert self.started is None, "EP bootstrap already initialized"
        assert self.guard, "no mesh resource is set"
        self.started, self.starts = sizes, self.starts + 1

    def ep_finalize(self):
        jax.clear_caches()
        self.started = None

    guard = 0

    @contextlib.contextmanager
    def global_shard_guard(self, resource):
        self.guard += 1
        yield
        self.guard -= 1

    def layout(self, ids, align=128):
        """rank_of_slot and row_of_slot [W, t, K], padded counts [W, e]: expert, then source rank, then token."""
        W = ids.shape[0]
        ep, E = self.ep, self.started["num_experts"]
        flat = ids.reshape(W // ep, -1)
        chosen = flat[..., None] == jnp.arange(E)
        counts = chosen.sum(1).reshape(W, E // ep)
        room = -(-counts // align) * align
        start = (jnp.cumsum(room, 1) - room).reshape(W // ep, E)
        place = jnp.cumsum(chosen, 1) - 1 + start[:, None]
        row = jnp.take_along_axis(place, jnp.maximum(flat, 0)[..., None], 2)[..., 0].reshape(ids.shape)
        rank = jnp.arange(W)[:, None, None] // ep * ep + ids // (E // ep)
        there = ids >= 0
        return jnp.where(there, rank, -1), jnp.where(there, row, -1), room.astype(jnp.int32)

    ep = 2

    def ep_prepare(self, config, ids):
        assert config.dispatch_output_per_expert_alignment == 128 and config.top_k == ids.shape[-1]
        _, _, room = self.layout(ids)
        handle = jax.lax.bitcast_convert_type(ids, jnp.uint8).reshape(ids.shape[0], -1)
        return room, room.sum(1, keepdims=True), handle

    def routing(self, config, handle):
        W = handle.shape[0]
        return jax.lax.bitcast_convert_type(handle.reshape(W, -1, config.top_k, 4), jnp.int32)

    def ep_dispatch_fwd(self, config, handle, ids, tokens, weights, capacity):
        assert capacity == self.started["recv_capacity_per_rank"]
        K = config.top_k
        slots = jnp.broadcast_to(tokens[:, :, None], (*tokens.shape[:2], K, tokens.shape[2]))
        return self._to_rows(config, handle, slots, capacity), self._to_rows(
            config, handle, weights[..., None], capacity
        )[..., 0]

    def ep_combine_fwd(self, config, handle, rows, num_local_tokens, out_partition_spec=None):
        found = self._to_slots(config, handle, rows)
        return found.astype(jnp.float32).sum(2).astype(rows.dtype)

    def ep_combine_bwd(self, config, handle, grad, capacity):
        slots = jnp.broadcast_to(grad[:, :, None], (*grad.shape[:2], config.top_k, grad.shape[2]))
        return self._to_rows(config, handle, slots, capacity)

    def ep_dispatch_bwd(self, config, handle, grad, weight_grad, num_local_tokens, out_partition_spec=None):
        found = self._to_slots(config, handle, grad).astype(jnp.float32).sum(2).astype(grad.dtype)
        return found, self._to_slots(config, handle, weight_grad[..., None])[..., 0]

    def _to_rows(self, config, handle, slots, capacity):
        ids = self.routing(config, handle)
        rank, row, room = self.layout(ids)
        W, width = ids.shape[0], slots.shape[-1]
        inside = (jnp.arange(capacity) < room.sum(1)[:, None])[..., None]
        rows = jnp.where(inside, jnp.zeros((), slots.dtype), jnp.full((W, capacity, width), jnp.nan, slots.dtype))
        at = jnp.where(row >= 0, row, capacity)
        return rows.at[jnp.maximum(rank, 0), at].set(slots, mode="drop")

    def _to_slots(self, config, handle, rows):
        rank, row, _ = self.layout(self.routing(config, handle))
        found = rows[jnp.maximum(rank, 0), jnp.maximum(row, 0)]
        return jnp.where((row >= 0)[..., None], found, jnp.zeros((), rows.dtype))

    def modules(self):
        @jax.tree_util.register_static
        @dataclasses.dataclass(frozen=True)
        class EpLayerConfig:
            top_k: int
            dispatch_output_per_expert_alignment: int = 0

        tex = {
            n: getattr(self, n)
            for n in ("ep_prepare", "ep_dispatch_fwd", "ep_combine_fwd", "ep_combine_bwd", "ep_dispatch_bwd")
        }
        ep = {"EpLayerConfig": EpLayerConfig, "ep_bootstrap": self.ep_bootstrap, "ep_finalize": self.ep_finalize}
        resource = types.SimpleNamespace
        contents = {
            "": {},
            ".jax": {},
            ".jax.cpp_extensions": tex,
            ".jax.ep": ep,
            ".jax.moe": {},
            ".jax.sharding": {"MeshResource": resource, "global_shard_guard": self.global_shard_guard},
        }
        found = {}
        for name, values in contents.items():
            module = types.ModuleType(f"transformer_engine{name}")
            module.__dict__.update(values)
            found[module.__name__] = module
        for name, module in found.items():
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(found[parent], child, module)
        return found


def gemm(lhs, rhs, contracting_dims):
    """TE's grouped product: rows beyond the blocks come back NaN. It has constant operands too, empty ones among them."""
    (a, sizes), (b, b_sizes) = lhs, rhs
    a = jnp.concatenate([a, jnp.zeros((0, *a.shape[1:]), a.dtype)]) * jnp.cos(jnp.zeros(1, a.dtype))
    ends = jnp.cumsum(sizes)
    row = jnp.arange(a.shape[0])
    own = ((ends - sizes)[:, None] <= row) & (row < ends[:, None])
    wide = jnp.float32
    if b_sizes is not None:
        kept = [jnp.where(own[..., None], v[None].astype(wide), 0) for v in (a, b)]
        return jnp.einsum("epa,epb->eab", *kept).astype(a.dtype)
    kernels = (b if contracting_dims[1] == (1,) else jnp.swapaxes(b, 1, 2)).astype(wide)
    out = jnp.einsum("pa,pab->pb", a.astype(wide), kernels[jnp.argmax(own, 0)])
    return jnp.where(own.any(0)[:, None], out, jnp.nan).astype(a.dtype)


@pytest.fixture
def te(monkeypatch):
    stand_in = StandIn()
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for module in (te_ep, te_block, exchange):
        monkeypatch.setattr(module, "facts", lambda: GPUS)
    monkeypatch.setattr(grouped_gemm, "_te", lambda: ((lambda data, sizes: (data, sizes)), gemm))
    monkeypatch.setattr(grouped_gemm, "_device_side", lambda dtype: Support(True))
    monkeypatch.setattr(group, "_STATE", group._State())
    yield stand_in
    group.finish()
    running.forget_results()


@pytest.mark.world_size(4)
@pytest.mark.parametrize("placement", ["late", "early"])
def test_te_ep_agrees_with_the_oracle(te, placement):
    """Forward and every gradient, with biases, uneven tokens and an idle expert, over data and expert ranks."""
    problem = PROBLEM.replace(T=15, experts=Experts(wi_bias=True, wo_bias=True, weight_placement=placement))
    ids = np.array(make_case(problem).routing.topk_idx)
    ids[ids == 3] = -1
    for f in experts_findings(te_ep.IMPLEMENTATION, make_case(problem, routing=ids)):
        assert f.ok, f.message
    assert te.starts == 1


@pytest.mark.world_size(4)
@pytest.mark.parametrize("stage", ["experts", "exchange"])
def test_a_routing_state_is_prepared_again_where_its_buffer_may_have_moved(te, stage, monkeypatch):
    """TE knows a state by its address: one program uses it twice, a scan's backward may not."""
    case, prepared = make_case(PROBLEM), []
    for module in (nccl_ep, te_ep, exchange):
        monkeypatch.setattr(module, "prepare", lambda *a, own=module.prepare: prepared.append(1) or own(*a))
    t = PROBLEM.T // 4

    def loss(x, routing):
        if stage == "experts":
            return te_ep.experts(PROBLEM, case.params, x, routing).astype(jnp.float32).sum()
        rows, _, state = exchange.ep_dispatch(PROBLEM, x.reshape(4, t, -1), routing)
        return exchange.ep_combine(PROBLEM, jnp.nan_to_num(rows), state).astype(jnp.float32).sum()

    def several(x, routings):
        return jax.lax.scan(lambda total, one: (total + loss(x, one), None), 0.0, routings)[0]

    jax.jit(jax.grad(loss)).lower(case.x, case.routing)
    assert len(prepared) == 1
    routings = jax.tree.map(lambda a: jnp.stack([a, a]), case.routing)
    prepared.clear()
    jax.make_jaxpr(lambda x, r: several(x, r))(case.x, routings)
    forward = len(prepared)
    backward = jax.make_jaxpr(jax.grad(several))(case.x, routings)
    assert len(prepared) > 2 * forward
    # One a direction: a third would be constants that the scan hoists, on which XLA of JAX 0.11.2 ends the process.
    assert len(list(_shard_maps(backward.jaxpr))) == (2 if stage == "experts" else 0)


def _shard_maps(jaxpr):
    """Every shard_map, inside whatever holds it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _shard_maps(inner)


@pytest.mark.world_size(4)
def test_steps_without_an_outer_jit_are_programs_with_pinned_results(te):
    """Eagerly too y is that of one program, and rows lie by rank."""
    case = make_case(PROBLEM)
    whole = jax.jit(te_ep.experts, static_argnums=0)(PROBLEM, case.params, case.x, case.routing)
    np.testing.assert_array_equal(te_ep.experts(PROBLEM, case.params, case.x, case.routing), whole)
    rows, _, _ = exchange.ep_dispatch(PROBLEM, case.x.reshape(4, PROBLEM.T // 4, -1), case.routing)
    assert len({str(shard.index) for shard in rows.addressable_shards}) == 4  # slices have no hash before 3.12


@pytest.mark.world_size(4)
def test_a_layer_without_an_outer_jit_uses_a_routing_state_in_the_program_that_made_it(te, monkeypatch):
    case, where = make_case(PROBLEM), []

    def seen(name):
        own = getattr(te_ep, name)

        def step(problem, *args):
            where.append((name, all(isinstance(a, jax.core.Tracer) for a in args[:1])))
            return own(problem, *args)

        monkeypatch.setattr(te_ep, name, step)

    for name in ("prepare", "dispatch", "combine", "combine_gradient", "dispatch_gradient"):
        seen(name)

    def loss(x):
        return te_ep.experts(PROBLEM, case.params, x, case.routing).astype(jnp.float32).sum()

    te_ep.experts(PROBLEM, case.params, case.x, case.routing)
    eager = jax.grad(loss)(case.x)
    assert {name for name, _ in where} == {"prepare", "dispatch", "combine", "combine_gradient", "dispatch_gradient"}
    assert all(traced for _, traced in where), where
    np.testing.assert_array_equal(eager, jax.jit(jax.grad(loss))(case.x))


@pytest.mark.world_size(4)
@pytest.mark.parametrize("law", LAWS, ids=lambda one: one.name)
def test_te_exchange_obeys_the_laws(te, law):
    stages = {"ep_dispatch": exchange.ep_dispatch, "ep_combine": exchange.ep_combine}
    group.start(PROBLEM)  # a law's executables are kept between tests, and a kept one starts no group
    findings = law.check(Implementation(name="te_exchange", stages=stages), make_case(PROBLEM))
    assert findings and all(f.ok for f in findings), [f.message for f in findings if not f.ok][:3]


@pytest.mark.world_size(4)
def test_a_process_has_one_group(te):
    assert group.start(PROBLEM) == group.start(PROBLEM.replace(T=8)) and te.starts == 1
    for other in ({"K": 1}, {"D": 16}, {"E": 16}, {"T": 32}, {"mesh": expert_mesh(2)}):
        with pytest.raises(
            InvalidInput, match="this process started NCCL EP for data 2 x expert 2, 8 experts, top-k 2"
        ):
            group.start(PROBLEM.replace(**other))
        assert "another process" in te_ep.supports(PROBLEM.replace(**other)).reason
    group.finish()
    assert group.start(PROBLEM.replace(K=1)).K == 1 and te.starts == 2


@pytest.mark.parametrize(
    ("change", "here", "says"),
    [
        ({}, {"devices": 1}, "1 GPU is here; needs 2 or more"),
        ({}, {"platform": "cpu"}, "the device is a CPU"),
        ({}, {"capability": 8.0}, "compute capability is 8.0"),
        ({}, {"devices": 2}, "the mesh data 2 x expert 2 needs 4 GPUs, 2 are here"),
        ({"mesh": expert_mesh(1)}, {}, "has 1 expert rank; NCCL EP needs 2 or more"),
        ({"D": 4}, {}, "D is 4; NCCL EP sends 16 bytes or more"),
        ({"T": 40000}, {}, "there are 10000 tokens a rank; NCCL EP accepts 1 to 8192"),
        ({"dtype": "float32"}, {}, "dtype is float32"),
        ({"capacity_factor": 1.0}, {}, "capacity_factor is 1.0"),
        ({"mesh": Mesh(axes=(("a", 2), ("b", 2), ("e", 2)), ep_axis="e")}, {}, "has 2 data axes; TE accepts one"),
    ],
)
def test_limits_name_the_number_that_failed(change, here, says):
    assert group.limits(GPUS, PROBLEM)
    found = group.limits(dataclasses.replace(GPUS, **here), PROBLEM.replace(**change))
    assert not found and says in found.reason and "\n" not in found.reason


def test_without_two_gpus_both_are_listed_with_the_reason():
    for name in ("te_ep", "te_block"):
        assert "needs a GPU" in registry.get(name).available().reason
    with pytest.raises(Unsupported, match="needs a GPU"):
        te_ep.experts(PROBLEM, *(None,) * 3)  # type: ignore[arg-type]


def _moe_2_20(x, gate_kernel, wi, wo, wi_0_bias=None, expert_bias=None, *, num_experts, num_experts_per_tok, activation_type,
              score_function, use_pre_softmax, num_groups, group_topk, scaling_factor, apply_topk_weights_early, ep_axis,
              data_parallelism_axes, wi_kernel_axes, dtype, recv_capacity_per_rank=None): ...  # fmt: skip


def _moe_2_19(x, gate_kernel, wi_0, wi_1, wo, *, num_experts, num_experts_per_tok, ep_axis): ...


def test_te_block_calls_the_signature_that_is_there():
    params = make_case(PROBLEM).params
    _, new = te_block.arguments(inspect.signature(_moe_2_20), PROBLEM, params, 512)
    inspect.signature(_moe_2_20).bind(None, **new)
    assert new["wi"] is params.wi and new["recv_capacity_per_rank"] == 512 and new["use_pre_softmax"] is True
    assert new["data_parallelism_axes"] == ("data",) and new["wi_kernel_axes"] == ()
    _, old = te_block.arguments(inspect.signature(_moe_2_19), PROBLEM, params, 512)
    inspect.signature(_moe_2_19).bind(None, **old)
    np.testing.assert_array_equal(np.concatenate([old["wi_0"], old["wi_1"]], axis=-1), np.asarray(params.wi))
    with pytest.raises(Unsupported, match="accepted: wi, or wi_0 and wi_1"):
        te_block.arguments(inspect.signature(lambda x: x), PROBLEM, params, 512)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"experts_shared_F": 8}, "shared_F is 8"),
        ({"experts_wo_bias": True}, "biases"),
        ({"experts_gated": False}, "gated is False"),
        ({"experts_activation": "relu2"}, "activation is 'relu2'"),
        ({"router_logits_dtype": "float32"}, "logits_dtype is 'float32'"),
        ({"router_normalize": True}, "never renormalises softmax"),
        ({"router_score": "sigmoid"}, "normalises sigmoid when top-k > 1"),
        ({"T": 15}, "15 tokens on 4 ranks"),
    ],
)
def test_te_block_declines_what_moe_computes_otherwise(change, says):
    fitting = PROBLEM.replace(router=Router(logits_dtype="activation"))
    assert te_block.computes(fitting)
    found = te_block.computes(fitting.replace(**change))
    assert not found and says in found.reason, expect("", False, found.reason)
