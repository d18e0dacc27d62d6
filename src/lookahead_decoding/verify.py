"""Verification: draw the model's next token at a node, then step to the child that carries it.

A guess is a fixed token, so drawing once from the model's distribution p and following the draw accepts a
guess x with probability p(x): the same as the reject-and-renormalise rule (Fu et al. 2024, Algorithm 4), and
the tokens are those that plain decoding draws, whatever was guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lookahead_decoding.plan import StepPlan


@dataclass(frozen=True)
class Walk:
    """What one step decided.

    Attributes:
        tokens: the tokens decided, at least one: those of ``path`` and one drawn behind the last of them.
        path: the guessed nodes that were right, from the first below the start on.
        end: why generation ended with the last token, or None.
    """

    tokens: list[int]
    path: list[int]
    end: str | None


def walk(
    plans: Sequence[StepPlan],
    draw: Callable[[Sequence[int]], Sequence[int]],
    stop: Callable[[Sequence[int]], Sequence[str | None] | None],
) -> list[Walk]:
    """Accept tokens from the plans' starts on, until a draw was not guessed or generation ends.

    Rows move together: the t-th token of every row is decided before the next of any, and all of them stay where
    one of them has to.

    Args:
        plans: deciding plans, one per row.
        draw: the model's next token behind a node of each row, processors and noise included. Called once per
            decided token, in the order of plain decoding, and never for a token past the end.
        stop: told the tokens right after they were drawn; why each row ended once all have, else None.
    """
    tokens: list[list[int]] = [[] for _ in plans]
    paths: list[list[int]] = [[] for _ in plans]
    nodes = [plan.start for plan in plans]
    while True:
        drawn = draw(nodes)
        for row, token in zip(tokens, drawn, strict=True):
            row.append(token)
        ends = stop(drawn)
        guessed = [plan.guess(node, token) for plan, node, token in zip(plans, nodes, drawn, strict=True)]
        nodes = [node for node in guessed if node is not None]
        if ends is not None or len(nodes) < len(plans):
            return list(map(Walk, tokens, paths, ends or [None] * len(plans)))
        for path, node in zip(paths, nodes, strict=True):
            path.append(node)
