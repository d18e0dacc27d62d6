"""Draft sources: what the built-in ones remember, and how a user's own is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_decoding.config import BUILTIN_SOURCES, LookaheadConfig
from lookahead_decoding.draft import DraftSource, PromptNgrams, WindowNgrams, load_source
from lookahead_decoding.errors import ConfigError


def continuations(text: Sequence[int], ngram: int, guesses: int) -> list[tuple[int, ...]]:
    """What followed the text's last token before, the most recent first; whole n-grams once, ``guesses`` of them."""
    starts = range(max(0, len(text) - ngram + 1), len(text) - 1)
    cut_short = [tuple(text[i + 1 :]) for i in reversed(starts) if text[i] == text[-1]]
    found: list[tuple[int, ...]] = []
    for i in reversed(range(len(text) - ngram + 1)):
        rest = tuple(text[i + 1 : i + ngram])
        if text[i] == text[-1] and rest not in found:
            found.append(rest)
    return cut_short + found[:guesses]


@settings(deadline=None, max_examples=200)
@given(
    chunks=st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12),
    ngram=st.integers(2, 5),
    guesses=st.integers(1, 4),
)
def test_prompt_ngrams_are_those_of_the_whole_text_however_it_arrives(
    chunks: list[list[int]], ngram: int, guesses: int
) -> None:
    source = PromptNgrams(LookaheadConfig(ngram=ngram, guesses=guesses))
    text: list[int] = []
    for chunk in chunks:
        source.extend(chunk)
        text += chunk
        proposed = [tuple(draft) for draft in source.propose(ngram - 1)]
        assert proposed == (continuations(text, ngram, guesses) if text else [])


def test_prompt_ngrams_learn_nothing_from_the_window() -> None:
    source = PromptNgrams(LookaheadConfig(ngram=3))
    source.extend([5])
    source.learn([(5, (6, 7))])
    assert list(source.propose(2)) == []


def test_window_ngrams_are_what_the_window_completed_behind_the_last_token() -> None:
    source = WindowNgrams(LookaheadConfig(ngram=3, guesses=2))
    source.learn([(5, (6, 7)), (8, (9, 9)), (5, (1, 2)), (5, (3, 4))])
    assert list(source.propose(2)) == []
    source.extend([8, 5])
    assert list(source.propose(2)) == [(3, 4), (1, 2)]
    source.extend([])
    assert list(source.propose(2)) == [(3, 4), (1, 2)]
    source.extend([8])
    assert list(source.propose(2)) == [(9, 9)]


def test_window_ngrams_learn_nothing_from_the_text() -> None:
    source = WindowNgrams(LookaheadConfig(ngram=3))
    source.extend([5, 6, 7, 5])
    assert list(source.propose(2)) == []


def test_a_source_counts_its_memory_and_keeps_to_pool_bytes() -> None:
    source = PromptNgrams(LookaheadConfig(ngram=3, guesses=2, pool_bytes=8192))
    assert source.nbytes == 0
    source.extend(range(10))
    assert 0 < source.nbytes <= 8192
    source.extend(range(1000))
    assert source.nbytes <= 8192


@pytest.mark.parametrize(("name", "kind"), [("pool", WindowNgrams), ("prompt_ngrams", PromptNgrams)])
def test_a_built_in_source_is_loaded_by_its_name(name: str, kind: type[DraftSource]) -> None:
    config = LookaheadConfig()
    source = load_source(name, config)
    assert type(source) is kind
    assert source.config is config


def test_every_built_in_source_loads() -> None:
    for name in BUILTIN_SOURCES:
        assert list(load_source(name, LookaheadConfig()).propose(3)) == []


USERS_MODULE = """
from lookahead_decoding import DraftSource

class Repeat(DraftSource):
    def extend(self, tokens):
        self.text = tokens

    def propose(self, max_tokens):
        yield [self.text[-1]] * max_tokens

def doubled(config):
    source = Repeat(config)
    source.factor = 2
    return source

class Unfinished(DraftSource):
    pass

def nothing(config):
    return None

def without_arguments():
    return None

number = 3
"""


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an importable module with draft sources of a user's, right and wrong ones."""
    name = f"users_sources_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(USERS_MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize("attribute", ["Repeat", "doubled"])
def test_a_users_source_is_loaded_by_module_and_attribute(users_module: str, attribute: str) -> None:
    name = f"{users_module}:{attribute}"
    config = LookaheadConfig(sources=(name,))
    source = load_source(name, config)
    source.extend([4, 2])
    assert [list(draft) for draft in source.propose(3)] == [[2, 2, 2]]
    assert source.config is config
    # What a user's source leaves out is optional.
    source.learn([(1, (2, 3, 4))])
    assert source.nbytes == 0


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [
        ("Missing", "cannot be loaded: module '{module}' has no attribute 'Missing'"),
        ("Unfinished", "cannot be loaded: Can't instantiate abstract class Unfinished"),
        ("number", "cannot be loaded: 'int' object is not callable"),
        ("without_arguments", "cannot be loaded: without_arguments() takes 0 positional arguments"),
        ("nothing", "made NoneType, which is no DraftSource"),
    ],
)
def test_a_users_source_that_cannot_be_made_is_named_with_the_reason(
    users_module: str, attribute: str, reason: str
) -> None:
    name = f"{users_module}:{attribute}"
    with pytest.raises(ConfigError) as caught:
        load_source(name, LookaheadConfig(sources=(name,)))
    assert str(caught.value).startswith(f"the draft source {name!r} {reason.format(module=users_module)}")


@pytest.mark.parametrize("module", ["no_such_module_of_mine", "no_such_package_of_mine.module", ".", "..relative"])
def test_a_source_in_a_module_that_cannot_be_imported_is_refused(module: str) -> None:
    name = f"{module}:Source"
    with pytest.raises(ConfigError, match="cannot be loaded: ") as caught:
        load_source(name, LookaheadConfig(sources=(name,)))
    assert repr(name) in str(caught.value)
