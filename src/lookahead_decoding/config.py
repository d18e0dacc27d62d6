"""What a user may set: one frozen, checked value."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookahead_decoding.errors import ConfigError
from lookahead_decoding.pool import DEFAULT_MAX_BYTES

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_DTYPE = "bfloat16"
MAX_NEW_TOKENS = 256
MAX_BUDGET = 4096

BUILTIN_SOURCES = {
    "suffix": "lookahead_decoding.sources:Suffix",
    "recycled": "lookahead_decoding.sources:Recycled",
    "prompt_ngrams": "lookahead_decoding.sources:PromptNgrams",
    "pool": "lookahead_decoding.sources:WindowNgrams",
}
"""Draft sources by name; any other is given as ``module:attr`` (see docs/draft-sources.md)."""

_ENDLESS = ("suffix", "recycled")

WINDOW = "window"
"""The name under which the Jacobi window's own guesses are credited."""


@dataclass(frozen=True)
class LookaheadConfig:
    """How far and how wide a step guesses. Nothing here changes the text, only the speed.

    Attributes:
        window: W, columns of the Jacobi window; 0 turns the lookahead branch off.
        ngram: N, tokens per n-gram; the window is N-1 rows deep. 2 is plain Jacobi decoding.
        guesses: G, n-grams that a pool keeps and proposes behind a token; 0 turns all drafts off, whatever their
            source.
        sources: where drafts come from, in the order in which a token named twice is credited.
            ``suffix``: what followed the longest earlier occurrence of the text's end. ``recycled``: what the model
            thought would follow the last tokens elsewhere. ``pool``: n-grams the window produced.
            ``prompt_ngrams``: n-grams of prompt and output.
            ``module:attr``: your own :class:`~lookahead_decoding.draft.DraftSource`.
            Those that live on the window are left out without one.
        budget: nodes per step at most, the last accepted token included; None is as many as the sources name,
            or as pay.
        adaptive: grow the tree only as far as it is expected to pay on this machine; False always fills the budget.
        verify_window: verify the window's own tokens like drafts.
        keep_bonus: keep the token the model draws behind an n-gram that matched to its end. The released code
            of the paper drops it.
        verify_during_warmup: verify drafts while the window's rows are still being filled.
        window_seed: seed of the window's first row.
        pool_bytes: bound on the memory of each source but ``suffix``, which holds the text.
        prefill_chunk: prompt tokens per forward pass.
    """

    window: int = 0
    ngram: int = 4
    guesses: int = 7
    sources: tuple[str, ...] = ("suffix", "recycled", "pool")
    budget: int | None = 64
    adaptive: bool = True
    verify_window: bool = True
    keep_bonus: bool = True
    verify_during_warmup: bool = True
    window_seed: int = 0
    pool_bytes: int = DEFAULT_MAX_BYTES
    prefill_chunk: int = 512

    def __post_init__(self) -> None:
        for field, least, most in (
            *((("budget", 1, MAX_BUDGET),) if self.budget is not None else ()),
            ("window", 0, 1024),
            ("ngram", 2, 64),
            ("guesses", 0, 1024),
            ("window_seed", 0, 2**63 - 1),
            ("pool_bytes", 4096, 2**40),
            ("prefill_chunk", 1, 2**20),
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{field} is a whole number; got {value!r}")
            if not least <= value <= most:
                raise ConfigError(f"{field} goes from {least} to {most}; got {value}")
        for field in ("adaptive", "verify_window", "keep_bonus", "verify_during_warmup"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(f"{field} is true or false; got {getattr(self, field)!r}")
        self._check_sources()
        if self.window and self.budget is not None and self.window_nodes > self.budget:
            raise ConfigError(
                f"a window of {self.window} columns and ngram {self.ngram} takes {self.window_nodes} nodes per step "
                f"and the budget is {self.budget}; give a larger budget, null for no bound, or a smaller window"
            )
        endless = [name for name in _ENDLESS if name in self.sources and self.guesses]
        if self.budget is None and not self.adaptive and endless:
            raise ConfigError(
                f"{' and '.join(endless)} always name more, so without adaptive a step needs a budget; got budget null"
            )
        if not self.keep_bonus and self.ngram == 2 and self.guesses > 0:
            raise ConfigError("keep_bonus=false leaves nothing of a 2-gram's draft: take ngram 3 or more, or guesses 0")

    def _check_sources(self) -> None:
        sources = self.sources
        if not isinstance(sources, list | tuple) or not all(isinstance(name, str) for name in sources):
            raise ConfigError(f"sources is a list of names; got {sources!r}")
        for name in sources:
            if name not in BUILTIN_SOURCES and not re.fullmatch(r"[\w.]+:\w+", name):
                raise ConfigError(
                    f"unknown draft source {name!r}{_suggest(name, BUILTIN_SOURCES)}; "
                    f"known are {', '.join(BUILTIN_SOURCES)}, and module:attr for your own"
                )
        if len(set(sources)) < len(sources):
            raise ConfigError(f"each draft source is named once; got {', '.join(sources)}")
        object.__setattr__(self, "sources", tuple(sources))

    @property
    def window_nodes(self) -> int:
        """Nodes of a step that the window takes, the last accepted token included; 0 without a window."""
        if not self.window:
            return 0
        # One of few columns is largest before its oldest rows have shrunk.
        return max(rows * (self.window + self.ngram - 1 - rows) for rows in range(1, self.ngram))

    @property
    def is_plain(self) -> bool:
        """Whether a step is one token wide: no window and no drafts."""
        return self.window == 0 and (self.guesses == 0 or not self.sources or self.budget == 1)

    def replace(self, **changes: Any) -> LookaheadConfig:
        """A copy with some fields changed, checked like a new one."""
        return dataclasses.replace(self, **_known_fields(changes))

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-ready; :meth:`from_dict` reads it back."""
        return {**dataclasses.asdict(self), "sources": list(self.sources)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LookaheadConfig:
        """The config with these fields; those not named keep their defaults, or those of ``"preset"``."""
        values = dict(values)
        base = preset(values.pop("preset")) if "preset" in values else cls()
        return base.replace(**values)

    @classmethod
    def from_json(cls, path: str | Path) -> LookaheadConfig:
        """Read a config file: a JSON object with any of the fields, and optionally ``"preset"``."""
        return cls.from_dict(read_config_file(path))


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The fields a config file sets, unchecked.

    Raises:
        ConfigError: the file cannot be read or holds no JSON object.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"the config file {path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"the config file {path} holds {type(values).__name__}, not a JSON object of fields")
    return values


def _known_fields(values: Mapping[str, Any]) -> Mapping[str, Any]:
    known = {field.name for field in dataclasses.fields(LookaheadConfig)}
    for name in values:
        if name not in known:
            raise ConfigError(
                f"unknown lookahead option {name!r}{_suggest(name, known)}; known are {', '.join(sorted(known))}"
            )
    return values


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


_PAPER = LookaheadConfig(window=15, ngram=5, guesses=15, sources=("pool",), budget=None, adaptive=False)

PRESETS: Mapping[str, LookaheadConfig] = {
    "default": LookaheadConfig(),
    "paper": _PAPER,
    "paper-reference": _PAPER.replace(verify_window=False, keep_bonus=False, verify_during_warmup=False),
    "jacobi": LookaheadConfig(window=8, ngram=2, guesses=0, sources=(), budget=None, adaptive=False),
    "plain": LookaheadConfig(window=0, guesses=0, sources=()),
}
"""``default``: sized for small models on CPUs. ``paper``: W=15, N=5, G=15, the paper's 7B setting.
``paper-reference``: the same under the rules of the paper's released code. ``jacobi``: one row, verified in
place. ``plain``: one token per pass."""


def preset(name: str) -> LookaheadConfig:
    """The preset of this name.

    Raises:
        ConfigError: there is none.
    """
    try:
        return PRESETS[name]
    except (KeyError, TypeError):
        raise ConfigError(f"unknown preset {name!r}{_suggest(name, PRESETS)}; known are {', '.join(PRESETS)}") from None


def as_config(
    lookahead: str | Mapping[str, Any] | LookaheadConfig, base: LookaheadConfig | None = None
) -> LookaheadConfig:
    """What every ``lookahead=`` argument takes: a preset's name, a dict of fields, or a config.

    Args:
        lookahead: the argument.
        base: stands in for the preset ``default``, by name and where a dict names no preset: the tuned fields.
    """
    if isinstance(lookahead, LookaheadConfig):
        return lookahead
    if isinstance(lookahead, str):
        return base if base is not None and lookahead == "default" else preset(lookahead)
    if isinstance(lookahead, Mapping):
        if base is not None and lookahead.get("preset", "default") == "default":
            fields = {name: value for name, value in lookahead.items() if name != "preset"}
            if fields.keys() & {"window", "ngram"}:  # a tuned budget is for the tuned window
                fields.setdefault("budget", LookaheadConfig.budget)
            elif isinstance(budget := fields.get("budget"), int) and budget < base.window_nodes:
                fields["window"] = 0  # and a tuned window for a budget that holds it
            return base.replace(**fields)
        return LookaheadConfig.from_dict(lookahead)
    raise ConfigError(f"lookahead is a preset's name, a dict or a LookaheadConfig; got {type(lookahead).__name__}")
