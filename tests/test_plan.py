"""How a step is laid out: which guesses become nodes, who is credited, what is read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_decoding.acceptance import SUREST, AcceptanceModel
from lookahead_decoding.config import WINDOW, LookaheadConfig
from lookahead_decoding.draft import DraftSource
from lookahead_decoding.plan import PROMPT_ROWS, StepPlan, TreeGrower, plan_prefill
from lookahead_decoding.tree import TokenTree
from lookahead_decoding.window import JacobiWindow

FAR = 1 << 30
LAST = 90
WINDOW_PROMPT = [70, 71, 72, 73, 74]
KINDS = (0.0, 1.0, 2.0, 3.0, 5.0)

Path = tuple[int, ...]
Guesses = Mapping[Path, Sequence[tuple[int, int]]]
"""``(token, kind)`` of what is guessed behind each path of guesses."""


class Listed(DraftSource):
    """Guesses what it was made with, and notes where it was asked."""

    weights = KINDS

    def __init__(self, listed: Guesses) -> None:
        super().__init__(LookaheadConfig())
        self.listed = listed
        self.asked: list[Path] = []

    def start(self) -> Any:
        return ()

    def follow(self, place: Any, token: int) -> Any:
        return (*place, token)

    def guesses(self, place: Any) -> Sequence[tuple[int, int]]:
        self.asked.append(place)
        return self.listed.get(place, ())


def chain(*tokens: int, kind: int = 4) -> Guesses:
    return {tokens[:i]: [(token, kind)] for i, token in enumerate(tokens)}


def growing(listed: Mapping[str, Guesses], trunk: Sequence[int] = (LAST,), **options: Any) -> TreeGrower:
    sources = {name: Listed(guesses) for name, guesses in listed.items()}
    options = {"max_depth": FAR, **options}
    return TreeGrower(trunk, sources, AcceptanceModel(dict.fromkeys(sources, KINDS)), **options)


def grown(listed: Mapping[str, Guesses], nodes: int = FAR, **options: Any) -> StepPlan:
    """All guesses, or the likeliest of them until there are so many nodes."""
    grower = growing(listed, **options)
    while grower.chance > 0 and grower.num_nodes < nodes:
        grower.grow()
    return grower.finish()


def paths(plan: StepPlan) -> list[Path]:
    """The tokens behind the start to each node behind it, in the order of the nodes."""
    behind = plan.start + 1
    return [tuple(plan.tree.path_tokens(node)[behind:]) for node in range(behind, len(plan.tree))]


def credits_by_path(plan: StepPlan) -> dict[Path, list[str]]:
    """Who named each node that may be accepted."""
    return {tuple(plan.tree.path_tokens(node)[plan.start + 1 :]): list(names) for node, names in plan.sources.items()}


def all_chances(listed: Mapping[str, Guesses], max_depth: int = FAR) -> dict[Path, float]:
    """Of every path of guesses, by the softmax at each of its nodes."""

    def below(path: Path, chance: float) -> Iterator[tuple[Path, float]]:
        odds: dict[int, float] = {}
        for guesses in listed.values():
            for token, kind in guesses.get(path, ()):
                odds[token] = odds.get(token, 0.0) + KINDS[kind]
        total = math.exp(3.0) + sum(map(math.exp, odds.values()))
        for token, value in odds.items() if len(path) < max_depth else ():
            own = SUREST * chance * math.exp(value) / total
            yield (*path, token), own
            yield from below((*path, token), own)

    return dict(below((), 1.0))


@st.composite
def guess_trees(draw: st.DrawFn) -> Guesses:
    listed: dict[Path, Sequence[tuple[int, int]]] = {}
    known: list[Path] = [()]
    for _ in range(draw(st.integers(0, 6))):
        path = draw(st.sampled_from(known))
        tokens = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))
        listed[path] = [(token, draw(st.integers(0, len(KINDS) - 1))) for token in tokens]
        known += [(*path, token) for token in tokens]
    return listed


@settings(deadline=None, max_examples=300)
@given(
    listed=st.dictionaries(st.sampled_from("cab"), guess_trees(), max_size=3),
    trunk=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    max_depth=st.integers(0, 4),
    nodes=st.integers(1, 25),
)
def test_a_tree_has_the_likeliest_guesses_of_all_that_its_sources_name(
    listed: dict[str, Guesses], trunk: list[int], max_depth: int, nodes: int
) -> None:
    plan = grown(listed, nodes, trunk=trunk, max_depth=max_depth)
    chances = all_chances(listed, max_depth)
    size = min(nodes - 1, len(chances))
    found = paths(plan)
    assert len(found) == len(set(found)) == size
    assert plan.tree.tokens[: plan.start + 1] == trunk
    assert [chances[path] for path in found] == pytest.approx(sorted(chances.values(), reverse=True)[:size])
    assert plan.expected_tokens == pytest.approx(1 + sum(chances[path] for path in found))
    # Whoever named a token at its place is credited, in the sources' order; nothing else may be accepted.
    assert credits_by_path(plan) == {
        path: [name for name, guesses in listed.items() if path[-1] in dict(guesses.get(path[:-1], ()))]
        for path in found
    }
    assert plan.decides
    assert plan.num_nodes == 1 + size
    assert plan.reads == tuple(range(plan.start, len(plan.tree)))
    assert plan.newest == ()


@settings(deadline=None, max_examples=200)
@given(
    listed=st.dictionaries(st.sampled_from("ab"), guess_trees(), max_size=2),
    forth=st.integers(0, 12),
    back=st.integers(0, 12),
)
def test_a_guess_taken_back_leaves_the_tree_as_it_was(listed: dict[str, Guesses], forth: int, back: int) -> None:
    grower = growing(listed)
    before = []
    while len(before) < forth and grower.chance > 0:
        before.append((grower.finish(), grower.expected_tokens, paths(grower.finish())))
        grower.grow()
    for _ in range(min(back, len(before))):
        grower.undo()
        plan, expected, known = before.pop()
        again = grower.finish()
        assert (grower.expected_tokens, paths(again)) == (expected, known)
        assert again.sources == plan.sources
        assert again.reads == plan.reads
        assert again.num_nodes == grower.num_nodes == 1 + len(known)


@settings(deadline=None, max_examples=200)
@given(listed=st.dictionaries(st.sampled_from("ab"), guess_trees(), max_size=2))
def test_the_chance_is_that_of_the_next_guess(listed: dict[str, Guesses]) -> None:
    grower = growing(listed)
    chances = all_chances(listed)
    for _ in range(len(chances)):
        chance, expected = grower.chance, grower.expected_tokens
        grower.grow()
        assert grower.expected_tokens == pytest.approx(expected + chance)
        assert chances[paths(grower.finish())[-1]] == pytest.approx(chance)
        assert grower.chance <= chance
    assert grower.chance == 0


def test_equal_chances_are_taken_in_the_order_in_which_they_were_named() -> None:
    plan = grown({"a": {(): [(7, 2), (5, 2), (6, 2)]}})
    assert paths(plan) == [(7,), (5,), (6,)]


def test_what_was_guessed_at_a_node_is_kept_though_it_was_not_computed() -> None:
    grower = growing({"a": {(): [(1, 4), (2, 0)], (1,): [(3, 1)]}, "b": {(): [(2, 1), (5, 0)]}})
    grower.grow()
    plan = grower.finish()
    assert paths(plan) == [(1,)]
    assert plan.candidates[plan.start].evidence == [("a", [(1, 4), (2, 0)]), ("b", [(2, 1), (5, 0)])]
    assert plan.candidates[plan.start].chances.keys() == {1, 2, 5}
    assert plan.candidates[plan.start].depth == 1
    assert plan.candidates[plan.start + 1].chances.keys() == {3}
    assert plan.candidates[plan.start + 1].depth == 2


def test_a_source_is_asked_about_the_nodes_that_are_in_the_tree_alone() -> None:
    source = Listed({(): [(1, 4), (2, 0)], (1,): [(3, 0)]})
    grower = TreeGrower([LAST], {"a": source}, AcceptanceModel({"a": KINDS}), max_depth=FAR)
    assert source.asked == [()]
    grower.grow()
    assert source.asked == [(), (1,)]


@pytest.mark.parametrize("max_depth", [0, 1, 2, 3, 9])
def test_no_guess_lies_deeper_than_it_may(max_depth: int) -> None:
    plan = grown({"a": chain(1, 2, 3)}, trunk=[5, LAST], max_depth=max_depth)
    assert paths(plan) == [(1, 2, 3)[: i + 1] for i in range(min(max_depth, 3))]


def test_without_sources_a_step_is_one_token_wide() -> None:
    for trunk in ([LAST], [6, 7, LAST]):
        plan = grown({}, trunk=trunk)
        assert plan.tree.tokens == trunk
        assert plan.reads == (plan.start,) == (len(trunk) - 1,)
        assert plan.num_nodes == plan.expected_tokens == 1
        assert dict(plan.sources) == dict(plan.candidates) == {}


def test_noise_is_asked_for_by_depth_below_the_last_token() -> None:
    asked = []

    def gumbel(depth: int, tokens: Sequence[int]) -> list[float]:
        asked.append((depth, list(tokens)))
        return [0.0] * len(tokens)

    grown({"a": chain(1, 2)}, trunk=[5, 6, LAST], gumbel=gumbel)
    assert asked == [(1, [1]), (2, [2])]


# Windows


def warm_window(W: int, N: int) -> JacobiWindow:
    """A window past its warm-up whose guesses all differ."""
    window = JacobiWindow(W, N, WINDOW_PROMPT, seed=0)
    fresh = itertools.count(1000)
    for _ in range(2 * N):
        _, newest = window.add_to(TokenTree.chain([LAST]), 0)
        list(window.advance(LAST, [next(fresh) for _ in newest], 1))
    return window


def row_of(window: JacobiWindow, number: int) -> Path:
    """The first row's tokens, so many of them."""
    tree = TokenTree.chain([LAST])
    nodes, _ = window.add_to(tree, 0)
    return tuple(tree.tokens[node] for node in nodes[:number])


def test_a_window_comes_whole_and_guesses_are_added_to_it() -> None:
    window = warm_window(4, 4)
    plan = grown({"a": chain(1, 2, 3)}, trunk=[8, 9, LAST], window=window)
    assert plan.num_nodes == 1 + 3 + window.num_guesses
    assert len(plan.newest) == 4
    assert max(plan.tree.depths) - plan.start == window.depth == 5


def test_a_window_is_credited_last() -> None:
    window = warm_window(3, 3)
    first, second = row = row_of(window, 2)
    plan = grown({"a": chain(first), "b": chain(*row)}, window=window)
    credited = credits_by_path(plan)
    assert credited[first,] == ["a", "b", WINDOW]
    assert credited[first, second] == ["b", WINDOW]
    assert plan.num_nodes == 1 + window.num_guesses
    others = [names for path, names in credited.items() if path[0] != first]
    assert others
    assert all(names == [WINDOW] for names in others)


def test_a_window_is_credited_once_for_a_token_that_two_of_its_rows_guess() -> None:
    window = JacobiWindow(3, 3, [5], seed=0)
    list(window.advance(5, [5] * 4, 1))
    plan = grown({}, window=window)
    assert plan.tree.is_chain
    assert [list(names) for names in plan.sources.values()] == [[WINDOW]] * window.depth


@pytest.mark.parametrize("verify_window", [True, False])
def test_a_guess_on_a_windows_node_is_free(verify_window: bool) -> None:
    window = warm_window(3, 3)
    row = row_of(window, 2)
    listed = {"a": {**chain(*row, 1), row[:1]: [(row[1], 4), (50, 0)]}}
    grower = growing(listed, window=window, verify_window=verify_window)
    chances = all_chances(listed)
    # Both of the window's tokens are counted before anything is grown, and what lies behind them is at hand.
    assert grower.num_nodes == 1 + window.num_guesses
    assert grower.expected_tokens == pytest.approx(1 + chances[row[:1]] + chances[row])
    assert grower.chance == pytest.approx(chances[(*row, 1)])
    grower.grow()
    assert paths(grower.finish())[-1] == (*row, 1)
    grower.undo()
    assert grower.expected_tokens == pytest.approx(1 + chances[row[:1]] + chances[row])
    assert grower.num_nodes == 1 + window.num_guesses


def test_a_windows_node_is_free_when_its_turn_comes() -> None:
    window = warm_window(3, 3)
    (first,) = row_of(window, 1)
    listed = {"a": {(): [(1, 4), (first, 2), (2, 0)]}}
    grower = growing(listed, window=window)
    chances = all_chances(listed)
    assert grower.expected_tokens == 1
    grower.grow()
    assert grower.expected_tokens == pytest.approx(1 + chances[1,] + chances[first,])
    assert grower.num_nodes == 2 + window.num_guesses
    assert grower.chance == pytest.approx(chances[2,])


def test_a_window_that_is_not_verified_is_read_only_where_it_grows() -> None:
    window = warm_window(3, 4)
    plan = grown({"a": chain(1, 2)}, trunk=[8, LAST], window=window, verify_window=False)
    drafted = [len(plan.tree) - 2, len(plan.tree) - 1]
    assert list(plan.sources) == drafted
    assert len(plan.newest) == 3
    assert plan.reads == tuple(sorted({plan.start, *drafted, *plan.newest}))
    assert plan.num_nodes == 1 + 2 + window.num_guesses


def test_a_guess_on_an_unverified_windows_nodes_is_credited_to_its_source_alone() -> None:
    window = warm_window(3, 3)
    row = row_of(window, 2)
    plan = grown({"a": chain(*row)}, window=window, verify_window=False)
    assert credits_by_path(plan) == {row[:1]: ["a"], row: ["a"]}


def test_a_verified_window_is_read_everywhere() -> None:
    plan = grown({"a": chain(1, 2)}, trunk=[7, 8, LAST], window=warm_window(3, 4))
    assert plan.start == 2
    assert plan.reads == tuple(range(2, len(plan.tree)))
    assert sorted(plan.sources) == list(range(3, len(plan.tree)))
    assert set(plan.newest) <= set(plan.sources)


def test_the_newest_row_is_in_the_order_of_its_columns() -> None:
    window = warm_window(3, 3)
    tree = TokenTree.chain([LAST])
    _, newest = window.add_to(tree, 0)
    expected = [tree.path_tokens(node) for node in newest]
    plan = grown({"a": chain(*expected[2][1:])}, window=window)
    assert [plan.tree.path_tokens(node) for node in plan.newest] == expected
    assert list(plan.reads) == sorted(plan.reads)


# What is read


def test_sources_that_want_to_see_it_get_every_node_read_and_the_end_of_the_prompt() -> None:
    plan = grown({"a": chain(1, 2)}, trunk=[7, 8, LAST], window=warm_window(3, 4), read_all=True)
    assert plan.reads == tuple(range(len(plan.tree)))
    long = grown({"a": chain(1, 2)}, trunk=range(PROMPT_ROWS + 50), read_all=True)
    assert long.reads == tuple(range(50, len(long.tree)))
    assert len(long.reads) == PROMPT_ROWS + 2


def test_nothing_is_guessed_behind_a_chunk_that_decides_nothing() -> None:
    grower = growing({"a": chain(1)}, trunk=[4, 4, 5], decides=False, read_all=True)
    assert grower.chance == 0
    plan = grower.finish()
    assert plan.tree.tokens == [4, 4, 5]
    assert (plan.decides, plan.start, plan.reads) == (False, -1, ())


def test_a_prefill_chunk_is_a_chain_that_decides_and_reads_nothing() -> None:
    plan = plan_prefill([4, 4, 5])
    assert plan.tree.tokens == [4, 4, 5]
    assert plan.tree.is_chain
    assert not plan.decides
    assert plan.reads == plan.newest == ()
    assert plan.num_nodes == 0
