"""What a model must answer, by a forward pass that shares no code with SGLang.

Of a model that transformers knows this is transformers' own; the others are computed here in
double precision, from the definition of their architecture.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional

#: Architectures that are computed here; transformers 5.6.0 does not know them.
_PLAIN = ("LagunaForCausalLM", "MiMoV2FlashForCausalLM")


@torch.no_grad()
def logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    """The log-probabilities of every token after each of ``ids``: a row for each, in float64."""
    config = json.loads((folder / "config.json").read_text())
    if config["architectures"][0] in _PLAIN:
        logits = _plain(config, load_file(folder / "model.safetensors"), torch.tensor(ids))
    else:
        logits = _of_transformers(folder, ids)
    return logits.double().log_softmax(dim=-1)


def _of_transformers(folder: Path, ids: list[int]) -> torch.Tensor:
    """Gemma 4 on a release sees one token less than it says, see ``replacements``, even windows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.sliding_window -= 1
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float64, attn_implementation="eager"
    )
    logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


Weights = dict[str, torch.Tensor]


def _plain(config: dict[str, Any], found: Weights, ids: torch.Tensor) -> torch.Tensor:
    """Attention and a gated product in each layer, both of what is normed, and added to it.

    What an architecture has beside that its weights tell: norms of queries and keys, a gate for
    each head, sinks.
    """
    weights = {name: weight.double() for name, weight in found.items()}
    hidden = weights["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        own = _below(weights, f"model.layers.{layer}.")
        normed = _norm(hidden, own["input_layernorm.weight"])
        hidden = hidden + _attention(_kind(config, layer), _below(own, "self_attn."), normed)
        normed = _norm(hidden, own["post_attention_layernorm.weight"])
        gate = functional.silu(normed @ own["mlp.gate_proj.weight"].T)
        inner = gate * (normed @ own["mlp.up_proj.weight"].T)
        hidden = hidden + inner @ own["mlp.down_proj.weight"].T
    return _norm(hidden, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def _below(weights: Weights, start: str) -> Weights:
    return {name[len(start) :]: one for name, one in weights.items() if name.startswith(start)}


def _norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6) -> torch.Tensor:
    return states * torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + epsilon) * weight


@dataclass(frozen=True)
class _Kind:
    """A kind of attention layer: how many tokens one sees, itself included; and its rotation."""

    heads: int
    seen: int | None
    theta: float
    rotated: int
    value_scale: float = 1.0


def _kind(config: dict[str, Any], layer: int) -> _Kind:
    heads = config["num_attention_heads"]
    if "layer_types" in config:
        kind = config["layer_types"][layer]
        rope = config["rope_parameters"][kind]
        rotated = int(config["head_dim"] * rope["partial_rotary_factor"])
        window = config["sliding_window"] if kind == "sliding_attention" else None
        return _Kind(heads, window, rope["rope_theta"], rotated)
    windowed = config["hybrid_layer_pattern"][layer]
    rotated = int(config["head_dim"] * config["partial_rotary_factor"])
    theta = config["swa_rope_theta" if windowed else "rope_theta"]
    window = config["sliding_window_size"] if windowed else None
    return _Kind(heads, window, theta, rotated, config["attention_value_scale"])


def _attention(kind: _Kind, own: Weights, states: torch.Tensor) -> torch.Tensor:
    """Of every token to those that it sees; queries, keys and values are (head, token, width)."""
    head = own["q_proj.weight"].shape[0] // kind.heads
    q, k = (_by_head(states @ own[f"{name}_proj.weight"].T, head) for name in "qk")
    v = states @ own["v_proj.weight"].T
    v = _by_head(v, v.shape[1] // len(k))
    if "q_norm.weight" in own:
        q, k = _norm(q, own["q_norm.weight"]), _norm(k, own["k_norm.weight"])
    q, k = _turned(q, kind), _turned(k, kind)
    k, v = (part.repeat_interleave(kind.heads // len(part), dim=0) for part in (k, v))
    place = torch.arange(len(states))
    back = place[:, None] - place[None, :]
    seen = (back >= 0) & (back < (kind.seen or len(states)))
    scores = (q @ k.mT * head**-0.5).masked_fill(~seen, -torch.inf)
    if "attention_sink_bias" in own:
        sinks = own["attention_sink_bias"][:, None, None].expand(-1, len(states), 1)
        scores = torch.cat([scores, sinks], dim=-1)
    found = scores.softmax(dim=-1)[..., : len(states)] @ v * kind.value_scale
    if "g_proj.weight" in own:
        found = found * functional.softplus(states @ own["g_proj.weight"].T).T[:, :, None]
    joined: torch.Tensor = found.movedim(0, 1).flatten(1) @ own["o_proj.weight"].T
    return joined


def _by_head(states: torch.Tensor, width: int) -> torch.Tensor:
    return states.reshape(len(states), -1, width).movedim(1, 0)


def _turned(states: torch.Tensor, kind: _Kind) -> torch.Tensor:
    """Rotary positions: the first half of what is rotated goes with the second half."""
    half = kind.rotated // 2
    frequencies = kind.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(states.shape[1])[:, None] * frequencies
    first, second = states[..., :half], states[..., half : 2 * half]
    cos, sin = angles.cos(), angles.sin()
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*turned, states[..., 2 * half :]], dim=-1)
