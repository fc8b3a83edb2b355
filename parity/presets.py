"""Real models' MoE layers as data: every number and switch beside the configuration key that it was read from.

A value's origin is a key of the model's published `config.json`, or "code" with what the published modeling code does
where no key says it. `Preset.shrunk()` keeps the experts, top-k and router of a model and makes the rest small enough
for a CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from .problem import Clamp, Problem


class Value(NamedTuple):
    """One setting of a preset."""

    value: Any
    origin: str
    """`key` or `key = value` of config.json, or "code: ..." for what only the modeling code says."""


@dataclass(frozen=True)
class Preset:
    """One model's MoE layer; keys of `values` are those of `Problem.replace`: E, K, router_score, experts_clamp ..."""

    name: str
    source: str
    """The model whose config.json the keys belong to."""
    values: Mapping[str, Value]
    tags: frozenset[str] = frozenset()
    """primary: the default comparisons; ci: cheap enough for every run, shrunk; shrunk: sizes are not the model's."""
    T: int = 8192
    """Tokens per layer call when none are asked for."""

    def problem(self, *, T: int | None = None, **overrides: Any) -> Problem:
        """The layer as a Problem; `overrides` are those of `Problem.replace`, such as dtype or experts_weight_placement."""
        given = {key: v.value for key, v in self.values.items()} | {"T": self.T if T is None else T} | overrides
        # All at once: a half-applied set, such as new sizes beside old groups, might be no valid problem.
        return Problem(T=1, K=1, E=1, D=1, F=1).replace(**given)

    def shrunk(self) -> Preset:
        """The same experts, top-k and router at 512 tokens of width 256 and experts of width 128."""
        small = {"D": Value(256, "shrunk"), "F": Value(128, "shrunk")}
        if "experts_shared_F" in self.values:
            small["experts_shared_F"] = Value(128, "shrunk")
        values = MappingProxyType({**self.values, **small})
        return dataclasses.replace(self, values=values, tags=self.tags | {"shrunk"}, T=512)

    def provenance(self) -> dict[str, str]:
        """Setting -> value and where it was read, for a table."""
        return {key: f"{v.value} ({v.origin})" for key, v in self.values.items()}


_MODEL_DTYPE = "code: the router is a linear layer in the model's dtype"
_SOFTMAX_FIRST = "code: softmax over all logits, then top-k"


def _preset(name: str, source: str, tags: tuple[str, ...] = (), **values: tuple[Any, str]) -> Preset:
    settings = {"dtype": Value("bfloat16", "torch_dtype"), **{key: Value(*pair) for key, pair in values.items()}}
    return Preset(name, source, MappingProxyType(settings), frozenset(tags))


def _mixtral(name: str, source: str, D: int, F: int, tags: tuple[str, ...] = ()) -> Preset:
    return _preset(
        name,
        source,
        tags,
        E=(8, "num_local_experts"),
        K=(2, "num_experts_per_tok"),
        D=(D, "hidden_size"),
        F=(F, "intermediate_size"),
        experts_activation=("silu", "hidden_act"),
        router_score=("softmax", _SOFTMAX_FIRST),
        router_normalize=(True, "code: the chosen weights are divided by their sum"),
        router_logits_dtype=("activation", _MODEL_DTYPE),
    )


def _qwen3(name: str, source: str, D: int, F: int, tags: tuple[str, ...] = ()) -> Preset:
    return _preset(
        name,
        source,
        tags,
        E=(128, "num_experts"),
        K=(8, "num_experts_per_tok"),
        D=(D, "hidden_size"),
        F=(F, "moe_intermediate_size"),
        experts_activation=("silu", "hidden_act"),
        router_score=("softmax", _SOFTMAX_FIRST),
        router_normalize=(True, "norm_topk_prob = true"),
        router_logits_dtype=("activation", _MODEL_DTYPE),
    )


def _gpt_oss(name: str, source: str, E: int, tags: tuple[str, ...] = ()) -> Preset:
    return _preset(
        name,
        source,
        tags,
        E=(E, "num_local_experts"),
        K=(4, "num_experts_per_tok"),
        D=(2880, "hidden_size"),
        F=(2880, "intermediate_size"),
        experts_activation=("silu", "hidden_act"),
        experts_clamp=(
            Clamp(alpha=1.702, limit=7.0, offset=1.0),
            "swiglu_limit = 7.0; code: alpha 1.702, up + 1, gate and up interleaved",
        ),
        experts_wi_bias=(True, "code: gate_up_proj_bias"),
        experts_wo_bias=(True, "code: down_proj_bias"),
        router_score=("softmax", "code: top-k of the logits, then softmax over the chosen"),
        router_softmax_order=("after", "code: top-k of the logits, then softmax over the chosen"),
        router_gate_bias=(True, "code: the router has a bias"),
        router_logits_dtype=("activation", _MODEL_DTYPE),
    )


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        _mixtral("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", 4096, 14336, ("primary", "ci")),
        _mixtral("mixtral-8x22b", "mistralai/Mixtral-8x22B-v0.1", 6144, 16384),
        _preset(
            "deepseek-v3",
            "deepseek-ai/DeepSeek-V3",
            ("primary", "ci"),
            E=(256, "n_routed_experts"),
            K=(8, "num_experts_per_tok"),
            D=(7168, "hidden_size"),
            F=(2048, "moe_intermediate_size"),
            experts_activation=("silu", "hidden_act"),
            experts_shared_F=(2048, "n_shared_experts = 1, of moe_intermediate_size"),
            router_score=("sigmoid", "scoring_func = sigmoid"),
            router_selection_bias=(True, "topk_method = noaux_tc: e_score_correction_bias ranks, and enters no weight"),
            router_groups=(8, "n_group"),
            router_group_topk=(4, "topk_group"),
            router_group_score_topk=(2, "code: a group's score is the sum of its two best biased scores"),
            router_normalize=(True, "norm_topk_prob = true"),
            router_norm_eps=(1e-20, "code: added to the sum"),
            router_scaling=(2.5, "routed_scaling_factor"),
            router_logits_dtype=("float32", "code: hidden states and router weight are widened first"),
        ),
        _qwen3("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 2048, 768, ("primary", "ci")),
        _qwen3("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", 4096, 1536),
        _gpt_oss("gpt-oss-20b", "openai/gpt-oss-20b", 32, ("ci",)),
        _gpt_oss("gpt-oss-120b", "openai/gpt-oss-120b", 128),
        _preset(
            "olmoe-1b-7b",
            "allenai/OLMoE-1B-7B-0924",
            ("ci",),
            E=(64, "num_experts"),
            K=(8, "num_experts_per_tok"),
            D=(2048, "hidden_size"),
            F=(1024, "intermediate_size"),
            experts_activation=("silu", "hidden_act"),
            router_score=("softmax", _SOFTMAX_FIRST),
            router_normalize=(False, "norm_topk_prob = false"),
            router_logits_dtype=("activation", _MODEL_DTYPE),
        ),
    )
}
"""Name -> preset. Where published codes differ (masked groups at 0 or at -inf, weights rounded to the model's dtype),
the contract's meaning holds: -inf, and float32 weights."""
