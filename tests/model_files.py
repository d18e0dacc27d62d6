"""Tiny models as files: folders of Transformers, and a GGUF file; and the style that errors about them have."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from zoo import tiny

WIDTH = 32
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
CHAT_SPECIAL = ["<unk>", "<bos>", "<eos>", "<system>", "<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def sentence(error: BaseException) -> str:
    """The message of an error, which has to be a short sentence on one line."""
    message = str(error)
    assert "\n" not in message
    assert message[0].islower()
    assert not message.endswith(".")
    assert len(message) < 600
    return message


def save_tokenizer(folder: Path) -> None:
    vocab = {token: index for index, token in enumerate([*SPECIAL, *BYTES])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    tokenizer.save_pretrained(folder)


def save_model(folder: Path, kind: type[Any] = transformers.LlamaForCausalLM) -> None:
    config = kind.config_class(
        vocab_size=len(SPECIAL) + len(BYTES),
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    kind(config).save_pretrained(folder)


def save_chat_model(folder: Path, *, context: int) -> None:
    """A Llama of two layers that takes a chat and speaks ASCII, a token per character; no answer ends by itself."""
    characters = [*string.ascii_letters, *string.digits, *string.punctuation, "Ġ", "Ċ"]
    vocabulary = {token: i for i, token in enumerate([*CHAT_SPECIAL, *characters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(CHAT_SPECIAL)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    model = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=context, num_hidden_layers=2)
    with torch.no_grad():
        model.lm_head.weight[: len(CHAT_SPECIAL)] = 0
    model.save_pretrained(folder)


def write_gguf(
    path: Path, *, seed: int = 0, architecture: str = "llama", leave_out: str = "", parts: int = 1
) -> dict[str, torch.Tensor]:
    """Write a Llama of one layer; return the tensors as they are after dequantisation."""
    gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
    import numpy as np

    tokens = [*SPECIAL, *BYTES, "ab", "abc"]
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // 2)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    writer.add_uint16("split.count", parts)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(tokens), WIDTH),
        "output_norm": (WIDTH,),
        "blk.0.attn_norm": (WIDTH,),
        "blk.0.ffn_norm": (WIDTH,),
    }
    shapes |= {f"blk.0.attn_{part}": (WIDTH, WIDTH) for part in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{part}": (WIDTH, WIDTH) for part in ("gate", "up", "down")}
    random = np.random.default_rng(seed)
    written = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32)
        if name == leave_out:
            continue
        if name.startswith("blk.0.ffn_") and len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quants.quantize(values, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
            values = gguf.quants.dequantize(packed, kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
        written[name] = torch.from_numpy(values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written
