"""How a step is laid out: whose drafts become nodes, who is credited, what is read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_decoding.config import WINDOW, LookaheadConfig
from lookahead_decoding.draft import DraftSource
from lookahead_decoding.plan import StepPlan, plan_prefill, plan_step
from lookahead_decoding.tree import TokenTree
from lookahead_decoding.window import JacobiWindow

FAR = 1 << 30
LAST = 90
WINDOW_PROMPT = [70, 71, 72, 73, 74]


class Listed(DraftSource):
    """Proposes what it was made with."""

    def __init__(self, drafts: Iterable[Sequence[int]]) -> None:
        super().__init__(LookaheadConfig())
        self.drafts = drafts
        self.asked: list[int] = []

    def propose(self, max_tokens: int) -> Iterable[Sequence[int]]:
        self.asked.append(max_tokens)
        return self.drafts


def step(
    drafts: Mapping[str, Iterable[Sequence[int]]],
    *,
    trunk: Sequence[int] = (LAST,),
    window: JacobiWindow | None = None,
    max_draft_tokens: int = FAR,
    max_depth: int = FAR,
    **fields: Any,
) -> StepPlan:
    return plan_step(
        trunk,
        {name: Listed(proposals) for name, proposals in drafts.items()},
        window,
        LookaheadConfig(**fields),
        max_draft_tokens=max_draft_tokens,
        max_depth=max_depth,
    )


def credits_by_path(plan: StepPlan) -> dict[tuple[int, ...], list[str]]:
    """The tokens from behind the start to each node that may be accepted, and who proposed it."""
    behind = plan.start + 1
    return {tuple(plan.tree.path_tokens(node)[behind:]): list(names) for node, names in plan.sources.items()}


def naive_credits(
    proposals: Mapping[str, Sequence[Sequence[int]]], guesses: int, longest: int
) -> dict[tuple[int, ...], list[str]]:
    """In turns, one draft each, until ``guesses`` of them were new; credited in the sources' order."""
    proposers: dict[tuple[int, ...], set[str]] = {}
    num_new = 0
    for turn in range(max(map(len, proposals.values()), default=0)):
        for name, drafts in proposals.items():
            if turn < len(drafts) and num_new < guesses:
                draft = drafts[turn][:longest]
                prefixes = [tuple(draft[: i + 1]) for i in range(len(draft))]
                num_new += any(prefix not in proposers for prefix in prefixes)
                for prefix in prefixes:
                    proposers.setdefault(prefix, set()).add(name)
    return {path: [name for name in proposals if name in names] for path, names in proposers.items()}


drafts = st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=5)


@settings(deadline=None, max_examples=300)
@given(
    proposals=st.dictionaries(st.sampled_from("cab"), drafts, max_size=3),
    trunk=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    guesses=st.integers(0, 5),
    ngram=st.integers(3, 5),
    keep_bonus=st.booleans(),
    max_draft_tokens=st.integers(0, 5),
    max_depth=st.integers(0, 5),
)
def test_a_plan_is_the_trie_of_the_drafts_taken_in_turn(
    proposals: dict[str, list[list[int]]],
    trunk: list[int],
    guesses: int,
    ngram: int,
    keep_bonus: bool,
    max_draft_tokens: int,
    max_depth: int,
) -> None:
    plan = step(
        proposals,
        trunk=trunk,
        guesses=guesses,
        ngram=ngram,
        keep_bonus=keep_bonus,
        max_draft_tokens=max_draft_tokens,
        max_depth=max_depth,
    )
    longest = min(max_draft_tokens, max_depth, ngram - 1 if keep_bonus else ngram - 2)
    assert credits_by_path(plan) == naive_credits(proposals, guesses, longest)
    assert plan.tree.tokens[: plan.start + 1] == trunk
    assert plan.decides
    assert plan.num_nodes == 1 + len(plan.sources)
    assert plan.reads == tuple(range(plan.start, len(plan.tree)))
    assert plan.newest == ()


def test_drafts_are_taken_from_the_sources_in_turn_until_enough_of_them_added_nodes() -> None:
    plan = step({"a": [[1], [2], [3]], "b": [[4], [5], [6]]}, guesses=3)
    assert plan.tree.tokens == [LAST, 1, 4, 2]


def test_a_source_that_ran_dry_leaves_its_turns_to_the_others() -> None:
    plan = step({"a": [[1]], "b": [[4], [5], [6]]}, guesses=4)
    assert plan.tree.tokens == [LAST, 1, 4, 5, 6]


def test_a_draft_that_adds_no_node_is_credited_and_does_not_count() -> None:
    plan = step({"a": [[1, 2], [3]], "b": [[1, 2], [1], [4]]}, guesses=3)
    assert credits_by_path(plan) == {(1,): ["a", "b"], (1, 2): ["a", "b"], (3,): ["a"], (4,): ["b"]}


def test_a_token_proposed_twice_is_credited_in_the_sources_order_not_the_turns() -> None:
    # b proposes token 2 in the first turn, a only in the second.
    assert credits_by_path(step({"a": [[1], [2]], "b": [[2]]}))[2,] == ["a", "b"]
    assert credits_by_path(step({"b": [[2]], "a": [[1], [2]]}))[2,] == ["b", "a"]


def test_sources_are_told_the_longest_useful_draft_and_asked_for_no_more_drafts_than_needed() -> None:
    endless = Listed([token] for token in itertools.count(10))
    config = LookaheadConfig(ngram=5, guesses=3)
    plan = plan_step([LAST], {"endless": endless}, None, config, max_draft_tokens=2, max_depth=FAR)
    assert plan.tree.tokens == [LAST, 10, 11, 12]
    assert endless.asked == [2]
    assert next(iter(endless.drafts)) == [13]


@pytest.mark.parametrize("max_draft_tokens", [0, 1, 2, 3, 9])
def test_a_draft_is_cut_to_what_may_still_be_accepted(max_draft_tokens: int) -> None:
    plan = step({"a": [[1, 2, 3]]}, max_draft_tokens=max_draft_tokens)
    assert plan.tree.tokens == [LAST, 1, 2, 3][: max_draft_tokens + 1]


@pytest.mark.parametrize(("keep_bonus", "longest"), [(True, 4), (False, 3)])
def test_without_the_bonus_a_draft_loses_its_last_token(keep_bonus: bool, longest: int) -> None:
    plan = step({"a": [[1, 2, 3, 4, 5]]}, ngram=5, keep_bonus=keep_bonus)
    assert plan.tree.tokens == [LAST, 1, 2, 3, 4][: longest + 1]


def warm_window(W: int, N: int) -> JacobiWindow:
    """A window past its warm-up whose guesses all differ."""
    window = JacobiWindow(W, N, WINDOW_PROMPT, seed=0)
    fresh = itertools.count(1000)
    for _ in range(2 * N):
        _, newest = window.add_to(TokenTree.chain([LAST]), 0)
        list(window.advance(LAST, [next(fresh) for _ in newest], 1))
    return window


@pytest.mark.parametrize("max_depth", range(8))
def test_no_node_lies_too_deep_and_the_window_comes_whole_or_not_at_all(max_depth: int) -> None:
    window = warm_window(4, 4)
    assert window.depth == 5
    plan = step({"a": [[1, 2, 3]]}, trunk=[8, 9, LAST], window=window, max_depth=max_depth)
    depths = [plan.tree.depths[node] - plan.start for node in range(plan.start, len(plan.tree))]
    if max_depth >= window.depth:
        assert max(depths) == window.depth
        assert len(plan.newest) == 4
        assert plan.num_nodes == 1 + 3 + window.num_guesses
    else:
        assert max(depths) == min(max_depth, 3)
        assert plan.newest == ()
        assert plan.num_nodes == 1 + min(max_depth, 3)


def test_the_window_is_credited_last() -> None:
    window = warm_window(3, 3)
    tree = TokenTree.chain([LAST])
    nodes, _ = window.add_to(tree, 0)
    row0 = [tree.tokens[node] for node in nodes[:2]]
    plan = step({"a": [[row0[0]]], "b": [row0]}, window=window)
    credited = credits_by_path(plan)
    assert credited[row0[0],] == ["a", "b", WINDOW]
    assert credited[tuple(row0)] == ["b", WINDOW]
    assert plan.num_nodes == 1 + window.num_guesses
    others = [names for path, names in credited.items() if path[0] != row0[0]]
    assert others
    assert all(names == [WINDOW] for names in others)


def test_the_window_is_credited_once_for_a_token_that_two_of_its_rows_guess() -> None:
    window = JacobiWindow(3, 3, [5], seed=0)
    list(window.advance(5, [5] * 4, 1))
    plan = step({}, window=window)
    assert plan.tree.is_chain
    assert [list(names) for names in plan.sources.values()] == [[WINDOW]] * window.depth


def test_a_window_that_is_not_verified_is_read_only_where_it_grows() -> None:
    window = warm_window(3, 4)
    plan = step({"a": [[1, 2]]}, trunk=[8, LAST], window=window, verify_window=False)
    drafted = [plan.start + 1, plan.start + 2]
    assert list(plan.sources) == drafted
    assert len(plan.newest) == 3
    assert plan.reads == (plan.start, *drafted, *sorted(plan.newest))
    assert plan.num_nodes == 1 + 2 + window.num_guesses


def test_a_draft_on_an_unverified_windows_nodes_is_credited_to_its_source_alone() -> None:
    window = warm_window(3, 3)
    tree = TokenTree.chain([LAST])
    nodes, _ = window.add_to(tree, 0)
    row0 = [tree.tokens[node] for node in nodes[:2]]
    plan = step({"a": [row0]}, window=window, verify_window=False)
    assert credits_by_path(plan) == {(row0[0],): ["a"], tuple(row0): ["a"]}


def test_a_verified_window_is_read_everywhere() -> None:
    plan = step({"a": [[1, 2]]}, trunk=[7, 8, LAST], window=warm_window(3, 4))
    assert plan.start == 2
    assert plan.reads == tuple(range(2, len(plan.tree)))
    assert sorted(plan.sources) == list(range(3, len(plan.tree)))
    assert set(plan.newest) <= set(plan.sources)


def test_the_newest_row_is_in_the_order_of_its_columns_whoever_added_its_nodes_first() -> None:
    window = warm_window(3, 3)
    tree = TokenTree.chain([LAST])
    _, newest = window.add_to(tree, 0)
    expected = [tree.path_tokens(node) for node in newest]
    plan = step({"a": [expected[2][1:], expected[0][1:]]}, window=window)
    assert [plan.tree.path_tokens(node) for node in plan.newest] == expected
    assert list(plan.newest) != sorted(plan.newest)
    assert list(plan.reads) == sorted(plan.reads)


@pytest.mark.parametrize("verify_during_warmup", [True, False])
def test_drafts_wait_for_a_warm_window_when_asked_to(verify_during_warmup: bool) -> None:
    window = JacobiWindow(3, 4, WINDOW_PROMPT, seed=0)
    for step_number in range(4):
        plan = step({"a": [[1, 2]]}, window=window, verify_during_warmup=verify_during_warmup)
        drafted = (1, 2) in credits_by_path(plan)
        assert drafted == (verify_during_warmup or step_number >= 2)
        assert plan.newest
        list(window.advance(LAST, [1000 + i for i in range(len(plan.newest))], 1))


def test_without_a_window_there_is_no_warmup_to_wait_for() -> None:
    assert step({"a": [[1, 2]]}, verify_during_warmup=False).num_nodes == 3


def test_without_guesses_the_window_is_all_there_is() -> None:
    window = warm_window(3, 3)
    plan = step({"a": [[1, 2]]}, window=window, guesses=0)
    assert plan.num_nodes == 1 + window.num_guesses
    assert all(names == [WINDOW] for names in plan.sources.values())


@pytest.mark.parametrize("trunk", [[LAST], [6, 7, LAST]])
def test_without_window_and_guesses_a_step_is_one_token_wide(trunk: list[int]) -> None:
    plan = step({"a": [[1, 2]]}, trunk=trunk, guesses=0)
    assert plan.tree.tokens == trunk
    assert plan.reads == (plan.start,) == (len(trunk) - 1,)
    assert plan.num_nodes == 1
    assert dict(plan.sources) == {}


def test_a_prefill_chunk_is_a_chain_that_decides_and_reads_nothing() -> None:
    plan = plan_prefill([4, 4, 5])
    assert plan.tree.tokens == [4, 4, 5]
    assert plan.tree.is_chain
    assert not plan.decides
    assert plan.reads == plan.newest == ()
    assert plan.num_nodes == 0
