"""GGUF files: converted once into a folder that Transformers loads, which stays in the cache.

The folder's name comes from the file's content, so a file that was moved is known again and one that was
changed is not. Its manifest holds the sha256 of every file, all checked each time it is used; a damaged
folder is converted again. The logger ``lookahead_decoding.gguf`` tells of both.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from lookahead_decoding.errors import (
    CapacityError,
    ConfigError,
    FileFormatError,
    LookaheadError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from lookahead_decoding.pretrained import gist, is_out_of_memory, load_tokenizer_and_model, quiet

logger = logging.getLogger(__name__)

_FORM = 1
"""Of a converted folder; part of its name. What changes the folder's files takes a new number."""
_MANIFEST = "manifest.json"
_MAGIC = b"GGUF"


def cache_dir() -> Path:
    """The folder for converted models: ``$LOOKAHEAD_CACHE``, or the user's cache folder.

    Raises:
        ConfigError: ``LOOKAHEAD_CACHE`` is not set and the package platformdirs is missing.
    """
    chosen = os.environ.get("LOOKAHEAD_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(_extra("platformdirs").user_cache_dir("lookahead-decoding"))


def converted(gguf: Path) -> Path:
    """The folder that holds a GGUF file's model as safetensors, converted first if there is none.

    Processes that want the same one at once convert once: a lock keeps the others waiting, and the folder
    gets its name only when it is complete.

    Raises:
        ModelNotFoundError: the file cannot be read.
        FileFormatError: it is no GGUF file, is damaged, or lacks weights.
        UnsupportedModelError: Transformers cannot convert it, or it is one part of several.
        CapacityError: the converted model does not fit the memory or the disk.
        ConfigError: a package is missing, or the cache folder cannot be written.
    """
    name = f"{gguf.stem}-{_sha256_of_gguf(gguf)[:16]}-{_FORM}"
    models = cache_dir() / "models"
    target = models / name
    if _is_intact(target):
        return target
    filelock = _extra("filelock")
    for module in ("gguf", "accelerate"):
        _extra(module)
    try:
        models.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(models / f"{name}.lock"):
            if not _is_intact(target):  # another process may have been faster
                _replace(target, gguf)
    except OSError as error:
        raise ConfigError(
            f"the cache folder {str(models)!r} cannot be used ({gist(error)}); set LOOKAHEAD_CACHE to a folder "
            "that can be written"
        ) from error
    return target


def dequantised_size(folder: Path, dtype: torch.dtype) -> int:
    """How many bytes the weights of a converted folder take in memory."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 4 * dtype.itemsize


def _extra(module: str) -> Any:
    """Import a package of the extra ``gguf``."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"cannot import {module}, which GGUF files and so the default model need; "
            "run `pip install 'lookahead-decoding[gguf]'`"
        ) from error


def _replace(target: Path, gguf: Path) -> None:
    """Convert, and put the result in the target's place; called under the target's lock."""
    staging = target.with_name(f".{target.name}")
    shutil.rmtree(staging, ignore_errors=True)  # left by a process that was killed
    result = staging / "result"
    result.mkdir(parents=True)
    try:
        size = _dequantised_size(gguf)
        free = shutil.disk_usage(staging).free
        if free < 1.02 * size:
            raise CapacityError(
                f"converting {str(gguf)!r} takes {mebibytes(size)} of disk and {str(target.parent)!r} has "
                f"{mebibytes(free)} left; free some, or set LOOKAHEAD_CACHE to another folder"
            )
        if target.exists():
            logger.warning("%s is damaged and is converted again", target)
        logger.info(
            "converting %s once: its weights, dequantised to float32, take %s of disk in %s, and twice that "
            "of memory meanwhile",
            gguf,
            mebibytes(size),
            target.parent,
        )
        _convert(gguf, staging / "source", result)
        _write_manifest(result)
        if target.exists():
            target.rename(staging / "damaged")
        result.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _dequantised_size(gguf: Path) -> int:
    """How many bytes the weights take in float32, read from the file's header."""
    library = _extra("gguf")
    try:
        reader = library.GGUFReader(gguf)
        split = reader.get_field("split.count")
        parts = 1 if split is None else int(split.contents())
        elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
    except Exception as error:  # the reader trusts the file, and fails wherever that leads it
        raise FileFormatError(f"the GGUF file {str(gguf)!r} is damaged or cut short: {gist(error)}") from error
    if parts > 1:
        raise UnsupportedModelError(
            f"the GGUF file {str(gguf)!r} is one of {parts} parts; join them with `llama-gguf-split --merge`"
        )
    return 4 * elements


def _convert(gguf: Path, source: Path, result: Path) -> None:
    """Write the model and its tokenizer into the folder ``result``, the weights as float32.

    Transformers is shown the file alone, in the folder ``source``: what lies beside it must not matter.
    """
    source.mkdir()
    (source / "model.gguf").symlink_to(gguf.absolute())
    file = {"gguf_file": "model.gguf", "local_files_only": True}
    try:
        with quiet():
            dequantise = transformers.GgufConfig(dequantize=True)
            tokenizer, model = load_tokenizer_and_model(
                str(source), str(gguf), file, {**file, "dtype": torch.float32, "quantization_config": dequantise}
            )
            model.save_pretrained(str(result))
            tokenizer.save_pretrained(str(result))
    except LookaheadError:
        raise
    except SafetensorError as error:  # such as a disk that is full
        raise OSError(str(error)) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's; those that Transformers makes up have no number
        if is_out_of_memory(error):
            raise CapacityError(f"the model in {str(gguf)!r} does not fit the memory: {gist(error)}") from error
        raise UnsupportedModelError(
            f"the GGUF file {str(gguf)!r} cannot be converted by Transformers: {gist(error)}"
        ) from error


def _write_manifest(folder: Path) -> None:
    (folder / _MANIFEST).write_text(json.dumps(_hashes(folder), indent=1) + "\n", encoding="utf-8")


def _is_intact(folder: Path) -> bool:
    """Whether a converted folder holds what its manifest says; a third of a second for half a gigabyte."""
    try:
        return bool(json.loads((folder / _MANIFEST).read_text(encoding="utf-8")) == _hashes(folder))
    except (OSError, ValueError):
        return False


def _hashes(folder: Path) -> dict[str, str]:
    """The sha256 of each file but the manifest."""
    return {file.name: _sha256(file) for file in sorted(folder.iterdir()) if file.name != _MANIFEST}


def _sha256_of_gguf(gguf: Path) -> str:
    try:
        with gguf.open("rb") as stream:
            magic = stream.read(len(_MAGIC))
        if magic != _MAGIC:
            raise FileFormatError(f"the file {str(gguf)!r} is no GGUF file: it begins with {magic!r}, not {_MAGIC!r}")
        return _sha256(gguf)
    except OSError as error:
        raise ModelNotFoundError(f"the file {str(gguf)!r} cannot be read: {gist(error)}") from error


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def mebibytes(size: int) -> str:
    """A size for people."""
    return f"{size / 2**20:,.1f} MiB"
