"""Draft sources that propose whole continuations, and how a user's own is loaded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_decoding.config import BUILTIN_SOURCES, LookaheadConfig
from lookahead_decoding.draft import ChainSource, DraftSource, Observation, load_source
from lookahead_decoding.errors import ConfigError
from lookahead_decoding.memory import DraftMemory
from lookahead_decoding.recycle import Successors
from lookahead_decoding.sources import PromptNgrams, Recycled, Suffix, WindowNgrams
from lookahead_decoding.tree import TokenTree


class Proposing(ChainSource):
    """Proposes what it was made with."""

    def __init__(self, chains: Iterable[Sequence[int]], guesses: int = 7) -> None:
        super().__init__(LookaheadConfig(guesses=guesses))
        self.chains = chains

    def propose(self) -> Iterable[Sequence[int]]:
        return self.chains


def named(source: DraftSource, path: Sequence[int] = ()) -> list[int]:
    """The tokens that a source names behind the text and a path of guesses."""
    place = source.start()
    for token in path:
        place = source.follow(place, token)
    return [token for token, _ in source.guesses(place)]


chains = st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=9)


@settings(deadline=None, max_examples=300)
@given(proposed=chains, guesses=st.integers(0, 7), path=st.lists(st.integers(0, 2), max_size=5))
def test_a_chain_source_names_along_a_path_what_its_first_proposals_have_there_the_best_first(
    proposed: list[list[int]], guesses: int, path: list[int]
) -> None:
    source = Proposing(proposed, guesses)
    beside = [chain for chain in proposed[:guesses] if chain[: len(path)] == path and len(chain) > len(path)]
    assert named(source, path) == list(dict.fromkeys(chain[len(path)] for chain in beside))


@settings(deadline=None, max_examples=200)
@given(proposed=chains, path=st.lists(st.integers(0, 2), max_size=5))
def test_every_kind_of_a_chain_source_has_a_weight_and_an_earlier_proposal_no_lower_one(
    proposed: list[list[int]], path: list[int]
) -> None:
    source = Proposing(proposed, guesses=9)
    place = source.start()
    for token in [*path, 0]:
        weights = [source.weights[kind] for _, kind in source.guesses(place)]
        assert weights == sorted(weights, reverse=True)
        place = source.follow(place, token)


def test_a_proposals_later_tokens_are_likelier_than_its_first() -> None:
    source = Proposing([[1, 2], [3, 4]])
    first = max(source.weights[kind] for _, kind in source.guesses(source.start()))
    for token in (1, 3):
        ((_, kind),) = source.guesses(source.follow(source.start(), token))
        assert source.weights[kind] > first


def test_no_more_proposals_are_asked_for_than_are_used() -> None:
    endless = iter([token] for token in itertools.count(10))
    assert named(Proposing(endless, guesses=3)) == [10, 11, 12]
    assert next(endless) == [13]


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
        proposed = [tuple(draft) for draft in source.propose()]
        assert proposed == (continuations(text, ngram, guesses) if text else [])


def test_prompt_ngrams_learn_nothing_from_the_window() -> None:
    source = PromptNgrams(LookaheadConfig(ngram=3))
    source.extend([5])
    source.learn([(5, (6, 7))])
    assert list(source.propose()) == []


def test_window_ngrams_are_what_the_window_completed_behind_the_last_token() -> None:
    source = WindowNgrams(LookaheadConfig(ngram=3, guesses=2))
    source.learn([(5, (6, 7)), (8, (9, 9)), (5, (1, 2)), (5, (3, 4))])
    assert list(source.propose()) == []
    source.extend([8, 5])
    assert list(source.propose()) == [(3, 4), (1, 2)]
    source.extend([])
    assert list(source.propose()) == [(3, 4), (1, 2)]
    source.extend([8])
    assert list(source.propose()) == [(9, 9)]


@pytest.mark.parametrize(("keep_bonus", "longest"), [(True, 3), (False, 2)])
def test_without_the_bonus_a_pooled_ngram_loses_its_last_token(keep_bonus: bool, longest: int) -> None:
    config = LookaheadConfig(window=2, ngram=4, sources=("pool",), keep_bonus=keep_bonus)
    window, prompt = WindowNgrams(config), PromptNgrams(config)
    window.learn([(5, (6, 7, 8))])
    window.extend([5])
    prompt.extend([5, 6, 7, 8, 1, 5])
    for source in (window, prompt):
        assert [list(draft) for draft in source.propose()] == [[6, 7, 8][:longest]]


def test_window_ngrams_learn_nothing_from_the_text() -> None:
    source = WindowNgrams(LookaheadConfig(ngram=3))
    source.extend([5, 6, 7, 5])
    assert list(source.propose()) == []


def test_a_window_of_another_length_takes_nothing_from_a_memory() -> None:
    memory = DraftMemory.empty("model", 100)
    for ngram in (3, 4, 3):
        source = WindowNgrams(LookaheadConfig(ngram=ngram))
        source.recall(memory)
        source.learn([(6, tuple(range(1, ngram)))])
        source.teach(memory)
        assert memory.ngrams is not None
        assert memory.ngrams.ngram == 3
        assert list(memory.ngrams.get(6)) == [(1, 2)]


def test_a_source_counts_its_memory_and_keeps_to_pool_bytes() -> None:
    source = PromptNgrams(LookaheadConfig(ngram=3, guesses=2, pool_bytes=8192))
    assert source.nbytes == 0
    source.extend(range(10))
    assert 0 < source.nbytes <= 8192
    source.extend(range(1000))
    assert source.nbytes <= 8192


@pytest.mark.parametrize(
    ("name", "kind"),
    [("suffix", Suffix), ("recycled", Recycled), ("pool", WindowNgrams), ("prompt_ngrams", PromptNgrams)],
)
def test_a_built_in_source_is_loaded_by_its_name(name: str, kind: type[DraftSource]) -> None:
    config = LookaheadConfig()
    source = load_source(name, config)
    assert type(source) is kind
    assert source.config is config


def test_the_window_alone_feeds_the_pool() -> None:
    needy = {name for name in BUILTIN_SOURCES if load_source(name, LookaheadConfig()).needs_window}
    assert needy == {"pool"}


USERS_MODULE = """
from lookahead_decoding.draft import ChainSource, DraftSource

class Repeat(ChainSource):
    def extend(self, tokens):
        self.text = tokens

    def propose(self):
        yield [self.text[-1]] * 3

class Same(DraftSource):
    # Guesses anywhere that the token comes again.
    weights = (2.0,)

    def extend(self, tokens):
        self.last = tokens[-1]

    def start(self):
        return self.last

    def follow(self, place, token):
        return token

    def guesses(self, place):
        return [(place, 0)]

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


@pytest.mark.parametrize("attribute", ["Repeat", "Same", "doubled"])
def test_a_users_source_is_loaded_by_module_and_attribute(users_module: str, attribute: str) -> None:
    name = f"{users_module}:{attribute}"
    config = LookaheadConfig(sources=(name,))
    source = load_source(name, config)
    source.extend([4, 2])
    assert named(source) == named(source, [2]) == named(source, [2, 2]) == [2]
    assert source.config is config
    # What a user's source leaves out is optional.
    source.refer([1, 2])
    source.learn([(1, (2, 3, 4))])
    source.observe(Observation(TokenTree.chain([2]), [4], {0: Successors.of([5], [-1.0])}, [0]))
    assert source.nbytes == source.successors == 0
    assert not source.needs_window


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
