"""The Jacobi window against the paper's, written down a second time from its released code."""

from __future__ import annotations

import random

import pytest

from lookahead_decoding.tree import TokenTree
from lookahead_decoding.window import JacobiWindow

GRID = [(W, N) for W in (1, 2, 3, 5, 15) for N in (2, 3, 4, 5, 7)]
PROMPT = [101, 102, 103, 104, 105, 106]


class PaperWindow:
    """``past_tokens`` of the paper's released code; slot 0 of its first level is the last accepted token."""

    def __init__(self, W: int, N: int, first_level: list[int]) -> None:
        self.W, self.N = W, N
        self.past_tokens = [first_level]

    def attended(self, last: int) -> list[list[int]]:
        """What each of the newest level's tokens sees, itself included: its column, and level 0 before it."""
        level0 = [last, *self.past_tokens[0]]
        newest = self.past_tokens[-1] if len(self.past_tokens) > 1 else level0
        return [level0[: i + 1] + [level[i] for level in self.past_tokens[1:]] for i in range(len(newest))]

    def step(self, last: int, draws: list[int], num_accepted: int) -> list[tuple[int, ...]]:
        past, ngrams = self.past_tokens, []
        if len(past) < self.N - 1:
            self.past_tokens = [level[1:] for level in past] + [draws[1:]]
            return []
        for i in range(self.W):
            column = [last if i == 0 else past[0][i - 1]]
            for level in range(1, self.N - 1):
                column.append(past[level][i])
            ngrams.append((*column, draws[i]))
        if self.N == 2:
            self.past_tokens = [draws[num_accepted:]]  # and as many fresh ones as are missing
        else:
            self.past_tokens = [past[1][1:]] + [past[level + 1] for level in range(1, self.N - 2)] + [draws]
        return ngrams


def laid_out(window: JacobiWindow, last: int) -> tuple[TokenTree, list[int], list[int]]:
    tree = TokenTree.chain([last])
    return (tree, *window.add_to(tree, 0))


def guesses(window: JacobiWindow) -> list[int]:
    """All rows, one after the other."""
    tree, nodes, _ = laid_out(window, -1)
    return [tree.tokens[node] for node in nodes]


@pytest.mark.parametrize("vocab", [3, 1000])
@pytest.mark.parametrize(("W", "N"), GRID)
def test_rows_columns_and_ngrams_are_the_papers(W: int, N: int, vocab: int) -> None:
    rng = random.Random(f"{W} {N} {vocab}")
    window = JacobiWindow(W, N, PROMPT, seed=3)
    assert len(guesses(window)) == W + N - 3
    paper = PaperWindow(W, N, guesses(window))
    for step in range(N - 2 + 2 * N + 3):
        last, num_accepted = rng.randrange(vocab), rng.randint(1, W + 1)
        tree, nodes, newest = laid_out(window, last)
        assert window.is_warm == (step >= N - 2)
        assert [tree.tokens[node] for node in nodes] == [token for row in paper.past_tokens for token in row]
        assert [tree.path_tokens(node) for node in newest] == paper.attended(last)

        draws = [rng.randrange(vocab) for _ in newest]
        ngrams = [(first, *rest) for first, rest in window.advance(last, draws, num_accepted)]
        assert ngrams == paper.step(last, draws, num_accepted)
        assert len(ngrams) == (W if step >= N - 2 else 0)
        if N == 2:
            kept = paper.past_tokens[0]
            assert len(kept) <= len(guesses(window)) == W - 1
            fresh = guesses(window)[len(kept) :]
            assert set(fresh) <= set(PROMPT)
            kept += fresh


@pytest.mark.parametrize(("W", "N"), GRID)
def test_depth_and_num_guesses_are_what_a_step_adds(W: int, N: int) -> None:
    fresh = iter(range(1000, 10**6))
    window = JacobiWindow(W, N, [*range(2000, 3000)], seed=1)
    for step in range(2 * N):
        tree, nodes, newest = laid_out(window, 0)
        assert window.num_guesses == len(nodes) == len(tree) - 1
        assert window.depth == max(tree.depths)
        if step >= N - 2:
            assert window.num_guesses == (W - 1) + (N - 2) * W
            assert window.depth == W - 1 + N - 2
            assert len(newest) == W
        list(window.advance(0, [next(fresh) for _ in newest], 1))


@pytest.mark.parametrize(("W", "N"), GRID)
def test_equal_guesses_share_nodes_and_still_get_a_draw_for_every_column(W: int, N: int) -> None:
    window = JacobiWindow(W, N, [5], seed=0)
    for step in range(2 * N):
        tree, _, newest = laid_out(window, 5)
        assert tree.is_chain
        assert len(tree) == window.depth + 1
        assert len(set(newest)) == len(newest)
        ngrams = list(window.advance(5, [5] * len(newest), 1))
        assert ngrams == ([(5, (5,) * (N - 1))] * W if step >= N - 2 else [])


def test_with_one_row_a_guess_keeps_its_position_in_the_text() -> None:
    window = JacobiWindow(5, 2, PROMPT, seed=0)
    list(window.advance(0, [10, 20, 30, 40, 50], num_accepted=2))
    assert guesses(window)[:3] == [30, 40, 50]
    list(window.advance(0, [11, 21, 31, 41, 51], num_accepted=1))
    assert guesses(window) == [21, 31, 41, 51]
    list(window.advance(0, [12, 22, 32, 42, 52], num_accepted=9))
    assert set(guesses(window)) <= set(PROMPT)


@pytest.mark.parametrize("num_accepted", [1, 2, 4])
def test_with_more_rows_the_window_moves_by_one_column_whatever_was_accepted(num_accepted: int) -> None:
    window = JacobiWindow(3, 3, PROMPT, seed=0)
    _, _, newest = laid_out(window, 0)
    list(window.advance(0, [10, 20, 30, 40], num_accepted))
    assert len(newest) == 4
    list(window.advance(0, [50, 60, 70], num_accepted))
    assert guesses(window) == [30, 40, 50, 60, 70]


def test_the_first_row_depends_on_the_seed_alone() -> None:
    rows = [guesses(JacobiWindow(15, 5, PROMPT, seed)) for seed in (7, 7, 8)]
    assert rows[0] == rows[1] != rows[2]
    assert set(rows[0]) <= set(PROMPT)


def test_the_window_hangs_from_the_given_node_and_lists_no_other() -> None:
    window = JacobiWindow(3, 4, PROMPT, seed=0)
    tree = TokenTree.chain([1, 2, 3])
    nodes, newest = window.add_to(tree, 2)
    assert nodes == list(range(3, len(tree)))
    assert newest == [2, *nodes]
    assert tree.parents[3] == 2
