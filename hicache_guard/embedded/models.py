"""Tiny hybrid models of random weights, which a release serves within seconds on a CPU.

The weights are large enough that a token depends on what is attended to, so that foreign KV shows
in the answers; the same each time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

#: Tokens of every model; the first few mean something special, and the last is told as token 0
#: among the log-probabilities of a prompt.
WORDS = 1024
ORDINARY = range(10, WORDS - 1)

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """``module`` of ``sglang.srt.models`` serves it, as was seen of ``releases``."""

    module: str
    config: dict[str, Any]
    weights: Callable[[dict[str, Any]], Weights]
    releases: tuple[str, ...]


class _Dice:
    def __init__(self) -> None:
        self._dice = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, scale: float | None = None) -> torch.Tensor:
        """Normal random numbers, by default of a size that a product with them keeps."""
        return torch.randn(*shape, generator=self._dice) * (scale or shape[-1] ** -0.5)


_COMMON = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
    "dtype": "float32",
}


def _ends(dice: _Dice, hidden: int) -> Weights:
    """What is before the layers and after them."""
    return {
        "model.embed_tokens.weight": dice(WORDS, hidden, scale=1.0),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": dice(WORDS, hidden, scale=0.15),
    }


def _rest(dice: _Dice, at: str, hidden: int, inner: int) -> Weights:
    """What a layer has beside attention."""
    return {
        f"{at}.mlp.gate_proj.weight": dice(inner, hidden),
        f"{at}.mlp.up_proj.weight": dice(inner, hidden),
        f"{at}.mlp.down_proj.weight": dice(hidden, inner),
        f"{at}.input_layernorm.weight": torch.ones(hidden),
        f"{at}.post_attention_layernorm.weight": torch.ones(hidden),
    }


# -- window, full, window, full ------------------------------------------------------------------

_WINDOW_AND_FULL = ["sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
_LAGUNA = _COMMON | {
    "architectures": ["LagunaForCausalLM"],
    "model_type": "laguna",
    "num_hidden_layers": 4,
    "num_attention_heads_per_layer": [4] * 4,
    "hidden_act": "silu",
    "gating": True,
    "sliding_window": 64,
    "layer_types": _WINDOW_AND_FULL * 2,
    "mlp_layer_types": ["dense"] * 4,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "rope_parameters": dict.fromkeys(_WINDOW_AND_FULL, _ROPE),
}


def _laguna(config: dict[str, Any]) -> Weights:
    dice = _Dice()
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    found = _ends(dice, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.self_attn.q_proj.weight": dice(heads * head, hidden, scale=0.25),
            f"{at}.self_attn.k_proj.weight": dice(kv_heads * head, hidden, scale=0.25),
            f"{at}.self_attn.v_proj.weight": dice(kv_heads * head, hidden, scale=0.25),
            f"{at}.self_attn.o_proj.weight": dice(hidden, heads * head, scale=0.25),
            f"{at}.self_attn.g_proj.weight": dice(heads, hidden),
            f"{at}.self_attn.q_norm.weight": torch.full((head,), 1.5),
            f"{at}.self_attn.k_norm.weight": torch.full((head,), 1.5),
        } | _rest(dice, at, hidden, inner)
    return found


# -- six window layers after one full --------------------------------------------------------------

# MiMo-V2-Flash: sinks, values narrower than keys, other heads in window layers. Its experts are
# left out (``moe_layer_freq``), whose kernels no CPU has. transformers does not know it; what it
# makes of the configuration under the name of Qwen 2 keeps all but the full layers' theta, which
# is the release's default then, 10000.
_SPARSE = [0, 1, 1, 1, 1, 1, 1]
_MIMO = _COMMON | {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": len(_SPARSE),
    "hidden_act": "silu",
    "hybrid_layer_pattern": _SPARSE,
    "moe_layer_freq": [0] * len(_SPARSE),
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "layernorm_epsilon": 1e-6,
    "head_dim": 48,
    "v_head_dim": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 48,
    "swa_v_head_dim": 32,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_value_scale": 0.7,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "swa_rope_theta": 10000.0,
}


def _mimo(config: dict[str, Any]) -> Weights:
    dice = _Dice()
    hidden, inner, heads = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    found = _ends(dice, hidden)
    for layer, windowed in enumerate(config["hybrid_layer_pattern"]):
        at = f"model.layers.{layer}"
        kind = "swa_" if windowed else ""
        kv_heads, head, v_head = (
            config[kind + name] for name in ("num_key_value_heads", "head_dim", "v_head_dim")
        )
        found |= {
            f"{at}.self_attn.q_proj.weight": dice(heads * head, hidden, scale=0.15),
            f"{at}.self_attn.k_proj.weight": dice(kv_heads * head, hidden, scale=0.15),
            f"{at}.self_attn.v_proj.weight": dice(kv_heads * v_head, hidden, scale=0.25),
            f"{at}.self_attn.o_proj.weight": dice(hidden, heads * v_head, scale=0.25),
        } | _rest(dice, at, hidden, inner)
        if windowed:
            found[f"{at}.self_attn.attention_sink_bias"] = dice(heads, scale=1.0)
    return found


# -- five window layers before one full ----------------------------------------------------------

# Gemma 4, as no release gives Gemma 3 a pool for its window layers. One width of heads, as
# transformers 5.6.0 tells newer releases no other; no softcap, for which Triton's interpreter has
# no tanh; and ``moe_intermediate_size``, of experts that there are not, as 0.5.12 divides it.
_GEMMA = _COMMON | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 64,
    "global_head_dim": 32,
    "v_head_dim": 32,
    "swa_head_dim": 32,
    "swa_v_head_dim": 32,
    "swa_num_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
    "moe_intermediate_size": 256,
    "vocab_size_per_layer_input": WORDS,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
        },
    },
}


def _gemma(config: dict[str, Any]) -> Weights:
    """Little of a token's own embedding: what a layer adds has the size of its norm, 1."""
    dice = _Dice()
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    found = _ends(dice, hidden) | {"model.embed_tokens.weight": dice(WORDS, hidden, scale=0.05)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.self_attn.q_proj.weight": dice(heads * head, hidden),
            f"{at}.self_attn.k_proj.weight": dice(kv_heads * head, hidden),
            f"{at}.self_attn.v_proj.weight": dice(kv_heads * head, hidden),
            f"{at}.self_attn.o_proj.weight": dice(hidden, heads * head),
            f"{at}.self_attn.q_norm.weight": torch.ones(head),
            f"{at}.self_attn.k_norm.weight": torch.ones(head),
            f"{at}.pre_feedforward_layernorm.weight": torch.ones(hidden),
            f"{at}.post_feedforward_layernorm.weight": torch.ones(hidden),
            f"{at}.layer_scalar": torch.ones(1),
        } | _rest(dice, at, hidden, inner)
    return found


#: Releases that were seen to serve each, with answers as the reference has them.
_SEEN = (
    "0.5.12", "0.5.12.post1", "0.5.14", "0.5.15", "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18",
    "0.5.23",
)  # fmt: skip
_SEEN_BOTH = (*_SEEN, "0.5.13", "0.5.13.post1")

MODELS = {
    "alternating": Model("laguna", _LAGUNA, _laguna, _SEEN_BOTH),
    "mimo": Model("mimo_v2", _MIMO, _mimo, _SEEN_BOTH),
    "gemma": Model("gemma4_causal", _GEMMA, _gemma, _SEEN),
}


def write(name: str, folder: Path) -> None:
    """Write a model as a release, and transformers, read it."""
    model = MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config, indent=1))
    generation = {"bos_token_id": 1, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    weights = model.weights(model.config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def module_of(folder: Path) -> str:
    """The module of ``sglang.srt.models`` that serves a model, where it is built as one of ours."""
    architectures = json.loads((folder / "config.json").read_text())["architectures"]
    found = [one.module for one in MODELS.values() if one.config["architectures"] == architectures]
    return found[0] if found else ""
