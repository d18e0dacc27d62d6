"""Tiny random-weight models, one per architecture: no download, and weights large enough to notice a fault.

Transformers' default ``initializer_range`` of 0.02 makes tiny models that hardly see a wrong position or mask;
0.3 makes them see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedConfig, PreTrainedModel

VOCAB = 211
WINDOW = 8
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}
_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2


def _like_llama(config: type[PreTrainedConfig], **options: Any) -> Callable[..., PreTrainedConfig]:
    return lambda **overrides: config(**{**_SIZES, **_TOKENS, **options, **overrides})


def _like_gpt2(config: type[PreTrainedConfig], **options: Any) -> Callable[..., PreTrainedConfig]:
    sizes = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": VOCAB, "n_positions": 512}
    return lambda **overrides: config(**{**sizes, **_TOKENS, **options, **overrides})


_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
    "original_max_position_embeddings": 64,
}

CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": _like_llama(hf.LlamaConfig),
    "llama-dynamic-rope": _like_llama(
        hf.LlamaConfig,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "mistral": _like_llama(hf.MistralConfig, sliding_window=WINDOW, head_dim=16),
    "qwen2": _like_llama(hf.Qwen2Config),
    "qwen3": _like_llama(hf.Qwen3Config, head_dim=16),
    "qwen3-mixed": _like_llama(
        hf.Qwen3Config, head_dim=16, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "gemma2": _like_llama(hf.Gemma2Config, head_dim=16, sliding_window=WINDOW),
    "gemma3": _like_llama(hf.Gemma3TextConfig, head_dim=16, sliding_window=WINDOW, layer_types=_ALTERNATING),
    "phi": _like_llama(hf.PhiConfig),
    "phi3": _like_llama(hf.Phi3Config),
    "phi3-longrope": _like_llama(hf.Phi3Config, original_max_position_embeddings=64, rope_parameters=_LONGROPE),
    "gpt2": _like_gpt2(hf.GPT2Config),
    "gptj": _like_gpt2(hf.GPTJConfig, rotary_dim=8),
    "codegen": _like_gpt2(hf.CodeGenConfig, rotary_dim=8),
    "gpt-bigcode": _like_gpt2(hf.GPTBigCodeConfig),
    "gpt-neox": _like_llama(hf.GPTNeoXConfig),
    "opt": lambda **overrides: hf.OPTConfig(
        **{
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "vocab_size": VOCAB,
            "max_position_embeddings": 512,
            "word_embed_proj_dim": 64,
            **_TOKENS,
            **overrides,
        }
    ),
    "falcon": _like_llama(hf.FalconConfig, alibi=False),
    "stablelm": _like_llama(hf.StableLmConfig),
    "starcoder2": _like_llama(hf.Starcoder2Config, sliding_window=WINDOW),
    "cohere": _like_llama(hf.CohereConfig),
    "olmo2": _like_llama(hf.Olmo2Config),
    "granite": _like_llama(hf.GraniteConfig),
    "smollm3": _like_llama(hf.SmolLM3Config, no_rope_layers=[1, 1, 0, 1]),
    "mixtral": _like_llama(hf.MixtralConfig, num_local_experts=4),
    "gpt-oss": _like_llama(
        hf.GptOssConfig, head_dim=16, num_local_experts=4, sliding_window=WINDOW, layer_types=_ALTERNATING
    ),
    "llama4": _like_llama(
        hf.Llama4TextConfig,
        intermediate_size_mlp=96,
        head_dim=16,
        num_local_experts=2,
        attention_chunk_size=WINDOW,
        layer_types=["chunked_attention", "full_attention"] * 2,
    ),
    "deepseek-v3": _like_llama(
        hf.DeepseekV3Config,
        moe_intermediate_size=32,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        first_k_dense_replace=1,
    ),
}

MIXTURES = {"mixtral", "gpt-oss", "llama4", "deepseek-v3"}
"""Their expert layers do not run in float64 on a CPU."""


def tiny(name: str, *, seed: int = 0, initializer_range: float = 0.3, dtype: torch.dtype = torch.float32,
         **overrides: Any) -> PreTrainedModel:  # fmt: skip
    """A model of this architecture with random weights, in evaluation mode."""
    torch.manual_seed(seed)
    config = CONFIGS[name](initializer_range=initializer_range, **overrides)
    return hf.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
