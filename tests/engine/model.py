"""A tiny model of random weights with window and full layers, which an engine serves in seconds.

``LagunaForCausalLM`` is the smallest architecture of every release from 0.5.12 on that has both
kinds of layers. Run: ``python model.py FOLDER``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, INNER, WORDS, WINDOW = 4, 128, 4, 2, 32, 256, 1024, 32
KINDS = ["sliding_attention", "full_attention"] * (LAYERS // 2)


def config() -> dict[str, object]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    return {
        "architectures": ["LagunaForCausalLM"],
        "model_type": "laguna",
        "vocab_size": WORDS,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_attention_heads_per_layer": [HEADS] * LAYERS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "gating": True,
        "sliding_window": WINDOW,
        "layer_types": KINDS,
        "mlp_layer_types": ["dense"] * LAYERS,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "rope_parameters": dict.fromkeys(sorted(set(KINDS)), rope),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        "dtype": "float32",
    }


def weights() -> dict[str, torch.Tensor]:
    """Large enough that a token depends on what is attended to, so that foreign KV shows."""
    dice = torch.Generator().manual_seed(0)

    def drawn(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=dice) * scale

    found = {
        "model.embed_tokens.weight": drawn(WORDS, HIDDEN, scale=1.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": drawn(WORDS, HIDDEN, scale=0.15),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.self_attn.q_proj.weight": drawn(HEADS * HEAD, HIDDEN, scale=0.25),
            f"{at}.self_attn.k_proj.weight": drawn(KV_HEADS * HEAD, HIDDEN, scale=0.25),
            f"{at}.self_attn.v_proj.weight": drawn(KV_HEADS * HEAD, HIDDEN, scale=0.25),
            f"{at}.self_attn.o_proj.weight": drawn(HIDDEN, HEADS * HEAD, scale=0.25),
            f"{at}.self_attn.g_proj.weight": drawn(HEADS, HIDDEN, scale=HIDDEN**-0.5),
            f"{at}.self_attn.q_norm.weight": torch.full((HEAD,), 1.5),
            f"{at}.self_attn.k_norm.weight": torch.full((HEAD,), 1.5),
            f"{at}.mlp.gate_proj.weight": drawn(INNER, HIDDEN, scale=HIDDEN**-0.5),
            f"{at}.mlp.up_proj.weight": drawn(INNER, HIDDEN, scale=HIDDEN**-0.5),
            f"{at}.mlp.down_proj.weight": drawn(HIDDEN, INNER, scale=INNER**-0.5),
            f"{at}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{at}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    return found


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(), indent=1))
    generation = {"bos_token_id": 1, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    write(Path(sys.argv[1]))
