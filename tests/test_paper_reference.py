"""Preset ``paper-reference`` accepts, step by step, what the paper's algorithm in its released form accepts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from lookahead_decoding import Engine
from lookahead_decoding.config import preset
from lookahead_decoding.request import resolve
from test_exactness import looping
from zoo import tiny

NextToken = Callable[[list[int]], int]


def lookahead_by_the_book(
    next_token: NextToken, prompt: list[int], W: int, N: int, G: int, seed: int, max_new_tokens: int
) -> list[list[int]]:
    """The tokens each step accepts: Algorithm 2 of the paper with the released code's choices.

    No tree, no cache and no mask: every token is one call of ``next_token`` on the text it may see.
    """
    rng = random.Random(seed)
    text = list(prompt)
    rows: list[list[int]] = [[rng.choice(prompt) for _ in range(W + N - 3)]]
    pool: dict[int, list[tuple[int, ...]]] = {}
    steps = []
    while len(text) < len(prompt) + max_new_tokens:
        last = text[-1]
        warm = len(rows) == N - 1
        # The lookahead branch: what follows each column, given row 0 up to it and the column's later rows.
        width = len(rows[0]) if len(rows) == 1 else len(rows[-1])
        columns = range(1, width + 1) if len(rows) == 1 else range(width)
        draws = [next_token(text + rows[0][:i] + [row[i] for row in rows[1:]]) for i in columns]
        # The verification branch: the longest match of any n-gram behind the last token.
        accepted = [next_token(text)]
        for guess in pool.get(last, []) if warm else []:
            correct = [accepted[0]]
            for hits in range(len(guess)):
                if guess[hits] != correct[hits]:
                    break
                correct.append(next_token(text + list(guess[: hits + 1])))
            else:
                correct.pop()  # the released code has no use for the token behind a full match
            if len(correct) > len(accepted):
                accepted = correct
        # The window moves.
        if not warm:
            new_row = draws if len(rows) == 1 else draws[1:]
            rows = [row[1:] for row in rows] + [new_row]
        else:
            firsts = [last, *rows[0]]
            for i, first in enumerate(firsts):
                ngram = (*(row[i] for row in rows[1:]), draws[i])
                known = pool.setdefault(first, [])
                if ngram in known:
                    known.remove(ngram)
                known.append(ngram)
                del known[:-G]
            rows = [rows[1][1:], *rows[2:], draws]
        accepted = accepted[: len(prompt) + max_new_tokens - len(text)]
        text += accepted
        steps.append(accepted)
    return steps


@pytest.mark.parametrize(("W", "N", "G"), [(5, 4, 5), (3, 3, 2), (7, 5, 7), (1, 4, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_each_step_accepts_what_the_released_algorithm_accepts(W: int, N: int, G: int, seed: int) -> None:
    model = tiny("llama", initializer_range=0.1)

    @torch.no_grad()
    def next_token(ids: list[int]) -> int:
        return int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())

    prompt = looping(12, seed)
    expected = lookahead_by_the_book(next_token, prompt, W, N, G, seed, 40)
    engine = Engine(model, lookahead=preset("paper-reference").replace(window=W, ngram=N, guesses=G, window_seed=seed))
    request = resolve(model, torch.tensor([prompt]), do_sample=False, max_new_tokens=40, eos_token_id=None)
    found = [list(advance.tokens) for _, advance in engine.run([engine.open(prompt, request)])]
    assert found == expected
    assert max(map(len, found)) >= min(3, N - 1)
