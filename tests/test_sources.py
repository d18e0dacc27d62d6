"""The built-in sources that name guesses at any node: what they name where the text ends, and along a path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_decoding.config import BUILTIN_SOURCES, LookaheadConfig
from lookahead_decoding.draft import DraftSource, Observation, load_source
from lookahead_decoding.recycle import NUM_BUCKETS, Successors
from lookahead_decoding.sources import Recycled, Suffix
from lookahead_decoding.tree import TokenTree
from test_suffix import followers, longest_suffix

CONFIG = LookaheadConfig()
TOP = 4
"""Tokens that the suffix source names at most."""

texts = st.lists(st.integers(0, 2), max_size=12)


def tokens_at(source: DraftSource, path: Sequence[int] = ()) -> list[int]:
    """What a source names behind its text and a path of guesses."""
    place = source.start()
    for token in path:
        place = source.follow(place, token)
    return [token for token, _ in source.guesses(place)]


def worth(source: DraftSource, token: int, path: Sequence[int] = ()) -> float:
    """The log-odds that a source's weights give a token before anything was learned."""
    place = source.start()
    for each in path:
        place = source.follow(place, each)
    return sum(source.weights[kind] for guess, kind in source.guesses(place) if guess == token)


@pytest.mark.parametrize("name", BUILTIN_SOURCES)
def test_a_source_that_was_told_nothing_names_nothing_anywhere(name: str) -> None:
    source = load_source(name, CONFIG)
    assert tokens_at(source) == tokens_at(source, [5]) == tokens_at(source, [5, 6]) == []


# Suffix


def suffix_of(text: Iterable[int], references: Iterable[Sequence[int]] = ()) -> Suffix:
    source = Suffix(CONFIG)
    for reference in references:
        source.refer(reference)
    source.extend([*text])
    return source


@settings(deadline=None, max_examples=300)
@given(
    chunks=st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=2), path=st.lists(st.integers(0, 3), max_size=3)
)
def test_suffix_names_what_followed_the_longest_context_at_the_end_and_along_a_path(
    chunks: list[list[int]], path: list[int]
) -> None:
    source = Suffix(CONFIG)
    for chunk in chunks:
        source.extend(chunk)
    text = [token for chunk in chunks for token in chunk]
    context = longest_suffix(text, text[1:], times=2) if text else []
    for i in range(len(path) + 1):
        expected = followers(text, context)[:TOP]
        named = tokens_at(source, path[:i])
        assert named[:1] == [token for token, _ in expected[:1]]
        assert set(named) == {token for token, _ in expected}
        assert len(named) == len(set(named))
        context = longest_suffix(text, [*context, *path[i : i + 1]])


def test_suffix_follows_a_passage_it_has_seen_to_its_end() -> None:
    source = suffix_of([1, 2, 3, 4, 5, 6, 90, 1, 2])
    assert tokens_at(source) == [3]
    assert tokens_at(source, [3, 4, 5, 6]) == [90]
    assert tokens_at(source, [77]) == []
    assert tokens_at(source, [77, 4]) == [5]


def test_suffix_takes_a_longer_match_for_better() -> None:
    passage = [*range(100, 130)]
    worths = [worth(suffix_of([*passage, 90, *passage[20 - length : 20]]), 120) for length in range(1, 21)]
    assert worths == sorted(worths)
    # 4 and 5 tokens are alike, 6 to 8, 9 to 15, and all that are longer.
    assert [worths.index(value) + 1 for value in sorted(set(worths))] == [1, 2, 3, 4, 6, 9, 16]


def test_suffix_takes_the_most_recent_of_a_long_contexts_followers_for_the_best() -> None:
    source = suffix_of([1, 2, 3, 4, 5, 70, 1, 2, 3, 4, 5, 71, 1, 2, 3, 4, 5, 72, 1, 2, 3, 4, 5])
    assert tokens_at(source) == [72, 71, 70]
    assert worth(source, 72) > worth(source, 71) > worth(source, 70)


def test_suffix_names_four_tokens_at_most() -> None:
    assert tokens_at(suffix_of([1, 10, 1, 11, 1, 12, 1, 13, 1, 14, 1])) == [14, 13, 12, 11]


def test_a_reference_is_known_but_no_part_of_the_text() -> None:
    source = suffix_of([9], references=[[1, 2, 3, 4], [1, 2, 5]])
    assert tokens_at(source) == []
    source.extend([1, 2])
    assert set(tokens_at(source)) == {3, 5}
    assert tokens_at(source, [3]) == [4]


def test_nothing_is_guessed_from_the_end_of_one_text_into_the_next() -> None:
    references = [[1, 2, 3], [4, 5, 3], []]
    source = suffix_of([6, 7, 3], references)
    assert tokens_at(source) == []
    assert tokens_at(suffix_of([6, 7, 5], references), [3]) == []


@settings(deadline=None, max_examples=300)
@given(
    references=st.lists(texts, max_size=3),
    text=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    path=st.lists(st.integers(0, 2), max_size=3),
)
def test_what_is_guessed_followed_the_last_token_within_one_text(
    references: list[list[int]], text: list[int], path: list[int]
) -> None:
    source = suffix_of(text, references)
    last = [*text, *path][-1]
    followed = {known[i + 1] for known in [*references, text] for i in range(len(known) - 1) if known[i] == last}
    # Whatever followed it may be crowded out by a break, but nothing else is guessed.
    assert set(tokens_at(source, path)) <= followed
    assert len(tokens_at(source, path)) >= min(len(followed), TOP - 1)


def test_suffix_counts_its_memory() -> None:
    source = Suffix(CONFIG)
    empty = source.nbytes
    source.refer([1, 2])
    referred = source.nbytes
    source.extend([3])
    assert empty < referred < source.nbytes


# Recycled


def row(*tokens: int, bucket: int = 0) -> Successors:
    """Successors, each half a nat less likely than the one before."""
    return Successors.of(tokens, [-(bucket + i) / 2 for i in range(len(tokens))])


def told(rows: Mapping[int, Successors], tree: TokenTree, path: Sequence[int], text: Sequence[int] = ()) -> Recycled:
    """A source that was shown one step over ``tree``, with the text it stood in."""
    source = Recycled(CONFIG)
    source.extend(text)
    show(source, rows, tree, path, text)
    return source


def show(
    source: Recycled, rows: Mapping[int, Successors], tree: TokenTree, path: Sequence[int], text: Sequence[int] = ()
) -> None:
    source.observe(Observation(tree, text, rows, path))
    source.extend(tree.tokens[node] for node in path)  # type: ignore[arg-type]


def test_a_row_is_named_wherever_its_last_tokens_come_again() -> None:
    source = told({2: row(7, 8)}, TokenTree.chain([1, 2, 3]), path=[0, 1, 2])
    source.extend([90])
    assert tokens_at(source, [3]) == [7, 8]
    assert tokens_at(source, [2, 3]) == [7, 8]
    assert tokens_at(source, [1, 2, 3]) == [7, 8]
    assert tokens_at(source, [1, 2]) == []
    # The more of the context is the same, the more it is worth; and the likelier the model thought it.
    assert worth(source, 7, [1, 2, 3]) > worth(source, 7, [2, 3]) > worth(source, 7, [3])
    assert worth(source, 7, [1, 2, 3]) > worth(source, 8, [1, 2, 3])


def test_contexts_reach_from_the_tree_into_the_text_before_it() -> None:
    source = told({0: row(7)}, TokenTree.chain([3]), path=[0], text=[1, 2])
    source.extend([90, 91])
    assert worth(source, 7, [1, 2, 3]) > worth(source, 7, [5, 2, 3]) > worth(source, 7, [5, 6, 3]) > 0


def branching() -> tuple[TokenTree, int, int, int]:
    """The last token 9 with two guesses behind it, 1 and 2, and 4 behind 1."""
    tree = TokenTree.chain([9])
    one, two = tree.add(0, 1), tree.add(0, 2)
    return tree, one, two, tree.add(one, 4)


def test_rows_of_guesses_that_were_wrong_are_remembered_as_well() -> None:
    tree, one, two, four = branching()
    source = told({0: row(1), one: row(4), two: row(50), four: row(60)}, tree, path=[0, one, four])
    source.extend([90])
    assert tokens_at(source, [9, 2]) == [50]
    assert tokens_at(source, [4]) == [60]


def test_a_context_of_two_nodes_is_told_by_the_one_nearer_to_the_text() -> None:
    tree = TokenTree.chain([9])
    near = tree.add(0, 5)
    far = tree.add(tree.add(near, 6), 5)
    for rows in ({near: row(70), far: row(80)}, {far: row(80), near: row(70)}):
        source = told(rows, tree, path=[0])
        source.extend([90, 91, 92])
        assert tokens_at(source, [5]) == [70]
        assert tokens_at(source, [6, 5]) == [80, 70]


def test_a_later_step_is_believed_rather_than_an_earlier_one() -> None:
    source = told({0: row(70)}, TokenTree.chain([9]), path=[0])
    show(source, {0: row(80)}, TokenTree.chain([9]), path=[0])
    source.extend([90])
    assert tokens_at(source, [5, 9]) == [80]


def unseen_token() -> Recycled:
    """1 was guessed and 2, either with successors; the model drew 3, which no row knows anything about."""
    tree, one, two, four = branching()
    rows = {0: row(1, 2, 3), one: row(10, 11), two: row(20, 11), four: row(60)}
    source = told(rows, tree, path=[0])
    source.extend([3])
    return source


def test_behind_an_unseen_token_come_the_successors_of_what_was_guessed_in_its_place() -> None:
    # By what the model thought of guess and successor together: 1-10 with 0, 1-11 and 2-20 with half a nat.
    instead = tokens_at(unseen_token())[:3]
    assert instead == [10, 11, 20]
    worths = [worth(unseen_token(), token) for token in instead]
    assert worths == sorted(worths, reverse=True)


def test_then_what_else_was_expected_in_its_place_and_then_what_is_common() -> None:
    source = unseen_token()
    assert tokens_at(source)[3:5] == [1, 2]
    # Common is what the model expected along the text: the root's row alone, 3 included.
    assert tokens_at(source)[5:] == [1, 2, 3]
    kinds = [kind for _, kind in source.guesses(source.start())]
    assert kinds == sorted(kinds)
    assert min(kinds) >= 3 * NUM_BUCKETS


def test_neighbours_are_named_right_behind_the_text_alone() -> None:
    source = unseen_token()
    assert tokens_at(source, [1]) == [10, 11]  # behind 1 there is a row
    assert tokens_at(source, [10]) == tokens_at(source, [77]) == []


def test_neighbours_are_those_of_the_last_step() -> None:
    source = unseen_token()
    show(source, {0: row(30, 31)}, TokenTree.chain([3]), path=[0])
    source.extend([33])
    assert tokens_at(source)[:2] == [30, 31]
    assert not {10, 11, 20} & set(tokens_at(source))


def test_a_token_that_some_row_knows_is_told_by_it_first() -> None:
    tree, one, two, _ = branching()
    source = told({0: row(1, 2), one: row(10), two: row(20)}, tree, path=[0, one])
    source.extend([2])
    assert tokens_at(source)[0] == 20
    assert worth(source, 20) > max(worth(source, token) for token in tokens_at(source) if token != 20)


def test_common_tokens_are_those_the_model_thought_likely_along_the_text() -> None:
    source = Recycled(CONFIG)
    for token in range(40):
        show(source, {0: row(200 + token, 300, 301)}, TokenTree.chain([token]), path=[0])
    source.extend([199])
    common = [token for token, kind in source.guesses(source.start()) if kind >= len(source.weights) - 8]
    assert common[:2] == [300, 301]  # 40 times, at half a nat and at one
    assert len(common) == 16
    assert set(common[2:]) <= {200 + token for token in range(40)}


def test_common_tokens_are_left_out_where_there_are_enough_others() -> None:
    tree, one, two, _ = branching()
    many = [row(*range(start, start + 8)) for start in (100, 200, 300)]
    source = told({0: many[0], one: many[1], two: many[2]}, tree, path=[0])
    source.extend([9])
    assert all(kind < len(source.weights) - 8 for _, kind in source.guesses(source.start()))


kinds_of_rows = st.lists(st.tuples(st.integers(0, 9), st.floats(-9, 0)), max_size=8, unique_by=lambda pair: pair[0])


@settings(deadline=None, max_examples=100)
@given(data=st.data(), parents=st.lists(st.integers(0, 9), max_size=10), path=st.lists(st.integers(0, 9), max_size=3))
def test_every_kind_has_a_weight_wherever_recycled_is_asked(
    data: st.DataObject, parents: list[int], path: list[int]
) -> None:
    tree = TokenTree.chain([0, 1])
    for token, parent in enumerate(parents):
        tree.add(min(parent, len(tree) - 1), token % 5)
    successors = data.draw(st.lists(kinds_of_rows, min_size=len(tree), max_size=len(tree)))
    rows = {node: Successors.of(*zip(*pairs, strict=True)) for node, pairs in enumerate(successors) if pairs}
    source = told(rows, tree, tree.path(data.draw(st.integers(1, len(tree) - 1))))
    source.extend([data.draw(st.integers(0, 9))])
    place = source.start()
    for token in [*path, -2]:
        named = source.guesses(place)
        assert all(0 <= kind < len(source.weights) for _, kind in named)
        assert {token for token, _ in named} <= set(range(10))
        place = source.follow(place, token)


def test_recycled_keeps_to_pool_bytes() -> None:
    source = Recycled(LookaheadConfig(pool_bytes=4096))
    assert source.nbytes == 0
    for token in range(100):
        show(source, {0: row(1, 2)}, TokenTree.chain([token]), path=[0])
        assert 0 < source.nbytes <= 4096
    source.extend([500])
    assert tokens_at(source, [99]) == [1, 2]
    assert tokens_at(source, [0]) == []
