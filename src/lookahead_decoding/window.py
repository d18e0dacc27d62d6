"""The 2-D Jacobi window: W columns ahead, the last N-1 iterations deep.

Lookahead decoding (Fu et al. 2024, section 3) solves the next W tokens by Jacobi iteration and reads n-grams
off the iteration history. Row 0 is the oldest iteration and carries W-1 guesses; its slot 0 is the last
accepted token. Rows 1..N-2 carry W. In a step, row 0 is a chain behind the last accepted token and column j
hangs from row 0's slot j, so the newest row's draws continue every column by one token.

                  slot 0    slot 1    slot 2
        row 0     accepted  a1        a2          (W = 3, N = 4)
        row 1     b0        b1        b2
        row 2     c0        c1        c2
        draws     d0        d1        d2          n-grams: accepted b0 c0 d0, a1 b1 c1 d1, a2 b2 c2 d2

Then the oldest row is dropped and the draws become the newest. Row 0 starts with W+N-3 random prompt tokens;
N-2 warm-up steps fill the other rows, each losing one column on the left.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from lookahead_decoding.tree import TokenTree


class JacobiWindow:
    """The window's guesses and how a step's draws move them.

    Args:
        window: W, columns (at least 1).
        ngram: N; the window holds N-1 rows (at least 2; 2 is plain Jacobi decoding).
        prompt: token ids the first row is drawn from (at least one).
        seed: of those draws; they influence speed, never the text.
    """

    def __init__(self, window: int, ngram: int, prompt: Sequence[int], seed: int) -> None:
        self.window = window
        self.ngram = ngram
        self._random = random.Random(seed)
        self._prompt = prompt
        self._rows = [self._random_tokens(window + ngram - 3)]

    @property
    def is_warm(self) -> bool:
        """Whether all N-1 rows are filled, so that a step yields n-grams."""
        return len(self._rows) == self.ngram - 1

    @property
    def depth(self) -> int:
        """Depth of the deepest guess below the last accepted token."""
        return len(self._rows[0]) + len(self._rows) - 1

    @property
    def num_guesses(self) -> int:
        """Guesses in all rows together: the window's nodes before merging with drafts."""
        return sum(len(row) for row in self._rows)

    def add_to(self, tree: TokenTree, start: int) -> tuple[list[int], list[int]]:
        """Hang the window from ``start``, the last accepted token's node.

        Returns:
            The window's nodes, and the newest row's nodes: those whose draws :meth:`advance` wants, in order.
        """
        slots = [start]
        for token in self._rows[0]:
            slots.append(tree.add(slots[-1], token))
        nodes, newest = slots[1:], slots
        for row in self._rows[1:]:
            newest = [tree.add(node, token) for node, token in zip(newest, row, strict=False)]
            nodes += newest
        return nodes, newest

    def advance(
        self, last_token: int, draws: Sequence[int], num_accepted: int
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Move one iteration on.

        Args:
            last_token: the token at slot 0 of the step that made the draws.
            draws: the model's greedy tokens behind the newest row's nodes, as :meth:`add_to` ordered them.
            num_accepted: tokens the step accepted. The paper's window moves by one column whatever it is;
                with one row (N = 2) the guesses keep their positions, as Jacobi decoding has it.

        Returns:
            ``(first token, the N-1 tokens behind it)`` of each column; nothing during warm-up.
        """
        rows = self._rows
        if not self.is_warm:
            self._rows = [row[1:] for row in rows] + [list(draws[1:])]
            return iter(())
        ngrams = zip([last_token, *rows[0]], zip(*rows[1:], draws, strict=True), strict=True)
        if self.ngram == 2:
            kept = list(draws[num_accepted:])
            self._rows = [kept + self._random_tokens(self.window - 1 - len(kept))]
        else:
            self._rows = [rows[1][1:], *rows[2:], list(draws)]
        return ngrams

    def _random_tokens(self, count: int) -> list[int]:
        return [self._random.choice(self._prompt) for _ in range(count)]
