"""The token tree against a dictionary of paths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_decoding.tree import ROOT, TokenTree

VOCAB = 3
tokens = st.integers(0, VOCAB - 1)


@settings(deadline=None, max_examples=200)
@given(
    trunk=st.lists(tokens, min_size=1, max_size=3),
    branches=st.lists(st.lists(tokens, max_size=5), max_size=8),
)
def test_a_tree_holds_every_added_path_once_in_the_order_of_first_use(
    trunk: list[int], branches: list[list[int]]
) -> None:
    tree = TokenTree.chain(trunk)
    start = len(tree) - 1
    node_of = {tuple(trunk[: i + 1]): i for i in range(len(trunk))}
    for branch in branches:
        node = start
        for i, token in enumerate(branch):
            node = tree.add(node, token)
            path = (*trunk, *branch[: i + 1])
            assert node == node_of.setdefault(path, len(node_of))

    assert len(tree) == len(node_of)
    for path, node in node_of.items():
        assert tree.tokens[node] == path[-1]
        assert tree.depths[node] == len(path) - 1
        assert tree.parents[node] == node_of.get(path[:-1], ROOT)
        assert tree.parents[node] < node
        assert tree.path_tokens(node) == list(path)
        assert tree.path(node) == [node_of[path[: i + 1]] for i in range(len(path))]
        for token in range(VOCAB):
            assert tree.child(node, token) == node_of.get((*path, token))


@settings(deadline=None, max_examples=200)
@given(branches=st.lists(st.lists(tokens, max_size=5), max_size=8), num_back=st.integers(0, 40))
def test_nodes_taken_back_were_never_there(branches: list[list[int]], num_back: int) -> None:
    def added(most: int) -> TokenTree:
        tree = TokenTree.chain([0])
        for branch in branches:
            node = 0
            for token in branch:
                if tree.child(node, token) is None and len(tree) == most:
                    break
                node = tree.add(node, token)
        return tree

    whole = added(1000)
    num_left = max(1, len(whole) - num_back)
    while len(whole) > num_left:
        whole.pop()
    never = added(num_left)
    for tree in (whole, never):
        assert len(tree) == num_left
    assert (whole.tokens, whole.parents, whole.depths) == (never.tokens, never.parents, never.depths)
    for node in range(num_left):
        assert list(whole.children(node)) == list(never.children(node))
        for token, child in whole.children(node):
            assert (whole.tokens[child], whole.parents[child]) == (token, node)
            assert whole.child(node, token) == child


def test_the_root_can_be_taken_back_too() -> None:
    tree = TokenTree.chain([5])
    tree.pop()
    assert len(tree) == 0
    assert tree.add(ROOT, 6) == 0


@settings(deadline=None, max_examples=100)
@given(branches=st.lists(st.lists(tokens, max_size=4), max_size=4))
def test_a_tree_is_a_chain_exactly_when_no_node_has_two_children(branches: list[list[int]]) -> None:
    tree = TokenTree.chain([0])
    for branch in branches:
        node = 0
        for token in branch:
            node = tree.add(node, token)
    has_one_path = all(len({*tree.parents[: i + 1]}) == i + 1 for i in range(len(tree)))
    assert tree.is_chain == has_one_path


def test_equal_tokens_under_different_parents_are_different_nodes() -> None:
    tree = TokenTree.chain([7])
    left, right = tree.add(0, 1), tree.add(0, 2)
    assert tree.add(left, 3) != tree.add(right, 3)
    assert not tree.is_chain


@pytest.mark.parametrize("token", [5, 6])
def test_a_second_root_is_refused_whatever_its_token(token: int) -> None:
    tree = TokenTree.chain([5])
    with pytest.raises(ValueError, match="one root"):
        tree.add(ROOT, token)
    assert tree.tokens == [5]


def test_an_empty_tree_is_a_chain_of_length_0() -> None:
    tree = TokenTree.chain([])
    assert len(tree) == 0
    assert tree.is_chain
