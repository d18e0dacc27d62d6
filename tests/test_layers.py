"""Imports point one way, the integers need no torch, and the public names are these."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lookahead_decoding

PACKAGE = Path(lookahead_decoding.__file__).parent
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")

INTEGERS = (
    *("errors", "tree", "window", "pool", "suffix", "recycle", "fileformat", "memory", "config", "draft", "sources"),
    *("acceptance", "plan", "budget", "verify", "statistics"),
)
LAYERS = (
    INTEGERS,
    ("sampling", "text", "cache", "attention", "view", "packing", "probe", "model", "pretrained", "gguf"),
    ("stopping", "request", "prompts", "retention", "session", "completion", "hub", "engine", "reference", "profile"),
    ("batch", "generation", "enabling", "compare", "check", "threads", "tune", "cli", "__main__"),
)
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}
LAYER_OF["__version__"] = 0  # the only name that modules take from the package itself

PUBLIC_NAMES = {
    "PRESETS",
    "CapacityError",
    "ChainSource",
    "Chunk",
    "Completion",
    "ConfigError",
    "DecodingStatistics",
    "DraftMemory",
    "DraftSource",
    "Engine",
    "FileFormatError",
    "LookaheadConfig",
    "LookaheadError",
    "ModelNotFoundError",
    "ModelOutputError",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "custom_generate",
    "disable",
    "enable",
    "generate",
}

BLOCKED = ("torch", "transformers", "tokenizers", "numpy")
BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocker())
"""


def imported(source: str, package: str) -> Iterator[str]:
    """The modules and folders of ours that a module of ``package`` imports from, in its functions too."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            module = importlib.util.resolve_name(module, package)
            names = [module] if "." in module else [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            ours, _, module = name.partition(".")
            if ours == "lookahead_decoding":
                yield module.partition(".")[0]


def test_the_import_reader_sees_every_way_to_import() -> None:
    source = """
import torch, lookahead_decoding.tree
from lookahead_decoding.pool import NgramPool
from lookahead_decoding import window
from . import plan
from .verify import walk
def later():
    from lookahead_decoding.engine import Engine
"""
    expected = ["engine", "plan", "pool", "tree", "verify", "window"]
    assert sorted(imported(source, "lookahead_decoding")) == expected
    deeper = "from ..tree import TokenTree\nfrom .. import pool\nfrom .main import main\nfrom . import chat"
    assert sorted(imported(deeper, "lookahead_decoding.cli")) == ["cli", "cli", "pool", "tree"]


def table_name(file: Path) -> str:
    """The name that the layers have for a file: its folder's, or its own."""
    return file.parts[0].removesuffix(".py")


def test_there_are_no_modules_that_the_layers_do_not_name() -> None:
    assert {table_name(file) for file in FILES} <= set(LAYER_OF)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_module_imports_from_its_own_and_earlier_layers_only(file: Path) -> None:
    package = ".".join(["lookahead_decoding", *file.parts[:-1]])
    source = (PACKAGE / file).read_text(encoding="utf-8")
    layer = LAYER_OF.get(table_name(file), 0)
    later = {name for name in imported(source, package) if LAYER_OF.get(name, len(LAYERS)) > layer}
    assert later == set()


def run_blocked(code: str) -> str:
    """What a fresh interpreter prints that cannot import torch, transformers, tokenizers or numpy."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKER + code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_integers_and_the_package_import_without_torch_and_transformers() -> None:
    imports = "\n".join(f"import lookahead_decoding.{name}" for name in INTEGERS)
    printed = run_blocked(
        f"{imports}\n"
        "from lookahead_decoding import LookaheadConfig, PRESETS\n"
        "from lookahead_decoding.acceptance import AcceptanceModel\n"
        "from lookahead_decoding.budget import CostCurve, share, usual_cost\n"
        "from lookahead_decoding.draft import load_source\n"
        "from lookahead_decoding.plan import TreeGrower\n"
        "from lookahead_decoding.window import JacobiWindow\n"
        "config = LookaheadConfig.from_dict({'window': 3, 'ngram': 5, 'sources': ['suffix', 'recycled', 'pool']})\n"
        "sources = {name: load_source(name, config) for name in config.sources}\n"
        "for source in sources.values():\n"
        "    source.extend([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6])\n"
        "acceptance = AcceptanceModel({name: source.weights for name, source in sources.items()})\n"
        "window = JacobiWindow(config.window, config.ngram, [8, 9], config.window_seed)\n"
        "grower = TreeGrower([6], sources, acceptance, max_depth=1, window=window)\n"
        "share([(grower, config.budget)], CostCurve(usual_cost('cpu', 'float32')).at(0))\n"
        "print(grower.finish().num_nodes)\n"
    )
    # The last token, five of the window's first row, and 7.
    assert printed == "7\n"


def test_what_needs_torch_fails_without_it() -> None:
    printed = run_blocked(
        "import lookahead_decoding\n"
        "for name in ('Engine', 'generate'):\n"
        "    try:\n"
        "        getattr(lookahead_decoding, name)\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    lines = printed.splitlines()
    assert len(lines) == 2
    assert all(line.endswith("is blocked") for line in lines)


def test_the_public_names_are_exactly_these() -> None:
    assert set(lookahead_decoding.__all__) == set(dir(lookahead_decoding)) == PUBLIC_NAMES
    assert len(lookahead_decoding.__all__) == len(PUBLIC_NAMES)


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_a_public_name_is_there(name: str) -> None:
    value = getattr(lookahead_decoding, name)
    assert getattr(value, "__name__", name) == name


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'lookahead_decoding' has no attribute 'enginee'"):
        _ = lookahead_decoding.enginee


def test_every_error_of_the_package_is_a_lookahead_error() -> None:
    for name in PUBLIC_NAMES:
        if name.endswith("Error"):
            assert issubclass(getattr(lookahead_decoding, name), lookahead_decoding.LookaheadError)
    assert issubclass(lookahead_decoding.ConfigError, ValueError)
