"""``lookahead info``."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lookahead_decoding.cli.options import AsJson, ModelOptions, NamedModel, Verbose
from lookahead_decoding.cli.prompt import has_chat_template
from lookahead_decoding.cli.report import mebibytes, tuning
from lookahead_decoding.cli.setup import open_engine
from lookahead_decoding.config import DEFAULT_MODEL, PRESETS
from lookahead_decoding.errors import ConfigError

if TYPE_CHECKING:
    from lookahead_decoding.engine import Engine

_DISTRIBUTIONS = ("lookahead-decoding", "torch", "transformers")
_SHOWN_OF_PRESETS = (
    "window",
    "ngram",
    "guesses",
    "sources",
    "budget",
    "adaptive",
    "verify_window",
    "keep_bonus",
    "verify_during_warmup",
)


def info(*, model: NamedModel = None, load: ModelOptions, as_json: AsJson = False, verbose: Verbose = False) -> int:
    """Show versions, devices, threads, the cache, the presets; and what MODEL is like, if it is named."""
    facts = _machine()
    if model is not None:
        engine, choice = open_engine(model, load, verbose=verbose)
        facts["threads"] |= {"chosen": choice.threads, "reason": choice.reason}
        facts["model"] = {**_model(engine), "tuned": _tuned(engine)}
    facts["presets"] = {name: config.to_dict() for name, config in PRESETS.items()}
    if as_json:
        print(json.dumps(facts))
    else:
        _print(facts)
    return 0


def _machine() -> dict[str, Any]:
    import torch

    from lookahead_decoding.hub import default_model_origin
    from lookahead_decoding.threads import available_threads

    versions = {name: importlib.metadata.version(name) for name in _DISTRIBUTIONS}
    gpus = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    return {
        "versions": {**versions, "python": platform.python_version()},
        "devices": ["cpu", *gpus],
        "threads": {
            "available": available_threads(),
            "chosen": None,
            "reason": "measured on the model, once one is loaded",
        },
        "cache": _cache(),
        "default_model": {"name": DEFAULT_MODEL, "origin": default_model_origin()},
    }


def _cache() -> dict[str, Any]:
    """The folder of converted models, and what is in it; the reason, if there can be none."""
    from lookahead_decoding.hub import cache_dir

    try:
        folder = cache_dir()
    except ConfigError as error:
        return {"folder": None, "bytes": 0, "reason": str(error)}
    return {"folder": str(folder), "bytes": sum(f.lstat().st_size for f in folder.rglob("*") if f.is_file())}


def _model(engine: Engine) -> dict[str, Any]:
    runner = engine.runner
    switch = runner.rope_switch
    return {
        "name": engine.name,
        "architecture": type(engine.model).__name__,
        "parameters": sum(parameter.numel() for parameter in engine.model.parameters()),
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "device": str(runner.device),
        "layers": dict(Counter(runner.layer_types)),
        "attention": runner.attention,
        "packed_weights": runner.packs_weights,
        "kv_bytes_per_token": runner.spec.bytes_per_token,
        "context": runner.max_position,
        "rope_switch": None if switch is None else switch.position,
        "vocabulary": runner.vocab_size,
        "chat_template": has_chat_template(engine),
    }


def _tuned(engine: Engine) -> dict[str, Any]:
    """What ``lookahead tune`` found for the model as it was loaded."""
    from lookahead_decoding.profile import path_of

    profile = engine.profile
    return {
        "summary": tuning(engine),
        "file": None if profile is None else str(path_of(profile.key)),
        "config": None if profile is None else profile.fields,
    }


def _print(facts: dict[str, Any]) -> None:
    """The facts for people."""
    threads, cache, default = facts["threads"], facts["cache"], facts["default_model"]
    chosen = "" if threads["chosen"] is None else f"{threads['chosen']} chosen: "
    rows = {
        "versions": ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        "devices": ", ".join(facts["devices"]),
        "threads": f"{threads['available']} available; {chosen}{threads['reason']}",
        "cache": cache.get("reason") or f"{cache['folder']} ({mebibytes(cache['bytes'])})",
        "default model": f"{default['name']} from {default['origin']}",
    }
    if (model := facts.get("model")) is not None:
        layers = ", ".join(f"{count} {kind}" for kind, count in model["layers"].items())
        switch = "none" if model["rope_switch"] is None else f"at position {model['rope_switch']}"
        rows |= {
            "model": f"{model['name']}, {model['dtype']} on {model['device']}",
            "architecture": f"{model['architecture']}, {model['parameters'] / 1e6:,.0f}M parameters",
            "layers": layers,
            "attention": model["attention"],
            "KV cache": f"{model['kv_bytes_per_token']:,} bytes per token",
            "context": f"{model['context']} tokens; rope switch: {switch}",
            "chat template": "yes" if model["chat_template"] else "no",
            "tuned": model["tuned"]["summary"],
        }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:{width}}  {value}")
    print()
    Console().print(_preset_table(facts["presets"]))


def _preset_table(presets: dict[str, dict[str, Any]]) -> Table:
    """A column per preset."""
    table = Table("preset", *presets, box=None)
    for field in _SHOWN_OF_PRESETS:
        values = (fields[field] for fields in presets.values())
        table.add_row(field, *(", ".join(value) if isinstance(value, list) else str(value) for value in values))
    return table
