"""Verification: draw the model's next token at a node, then step to the child that carries it.

A guess is a fixed token, so drawing once from the model's distribution p and following the draw accepts a
guess x with probability p(x): the same as the reject-and-renormalise rule (Fu et al. 2024, Algorithm 4), and
the tokens are those that plain decoding draws, whatever was guessed.
"""

from __future__ import annotations

from collections.abc import Callable
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


def walk(plan: StepPlan, draw: Callable[[int], int], stop: Callable[[int], str | None]) -> Walk:
    """Accept tokens from the plan's start on, until a draw was not guessed or generation ends.

    Args:
        plan: a deciding plan.
        draw: the model's next token behind a node, processors and noise included. Called once per decided
            token, in the order of plain decoding, and never for a token past the end.
        stop: told each token right after it was drawn; why generation ends with it, or None.
    """
    tokens: list[int] = []
    path: list[int] = []
    node: int | None = plan.start
    while node is not None:
        if tokens:
            path.append(node)
        token = draw(node)
        tokens.append(token)
        if (end := stop(token)) is not None:
            return Walk(tokens, path, end)
        node = plan.tree.child(node, token)
        if node not in plan.sources:
            node = None
    return Walk(tokens, path, None)
