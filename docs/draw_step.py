"""Draws docs/assets/step.svg: one step's token tree and its attention mask, from a real plan.

python docs/draw_step.py
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from lookahead_decoding.acceptance import AcceptanceModel
from lookahead_decoding.budget import fill
from lookahead_decoding.config import WINDOW, LookaheadConfig
from lookahead_decoding.draft import DraftSource
from lookahead_decoding.plan import StepPlan, TreeGrower
from lookahead_decoding.window import JacobiWindow

OUTPUT = Path(__file__).parent / "assets" / "step.svg"
COLOURS = {"accepted": "#4b5563", WINDOW: "#2563eb", "suffix": "#d97706", "recycled": "#059669", "prefix": "#9ca3af"}
LABELS = {
    "prefix": "cached text",
    "accepted": "last accepted token",
    WINDOW: "Jacobi window",
    "suffix": "suffix",
    "recycled": "recycled",
}
CELL, LEFT, TOP, CACHED = 17, 300, 64, 4


class _Drafts(DraftSource):
    """Stands in for a source: what it names behind each path of guesses, the kinds being ranks."""

    weights = (5.0, 3.8, 3.0)
    named: ClassVar[Mapping[tuple[int, ...], Sequence[int]]]

    def start(self) -> tuple[int, ...]:
        return ()

    def follow(self, place: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*place, token)

    def guesses(self, place: tuple[int, ...]) -> Sequence[tuple[int, int]]:
        return [(token, kind) for kind, token in enumerate(self.named.get(place, ()))]


class _Suffix(_Drafts):
    """One continuation: what came before behind the same tokens."""

    named: ClassVar[Mapping[tuple[int, ...], Sequence[int]]] = {(41, 42, 43)[:n]: (41 + n,) for n in range(4)}


class _Recycled(_Drafts):
    """Several tokens at some places."""

    named: ClassVar[Mapping[tuple[int, ...], Sequence[int]]] = {
        (): (41, 51, 52),
        (41,): (53, 54),
        (41, 42): (55,),
        (51,): (56, 57),
    }


def example() -> StepPlan:
    """W = 3 and N = 4 with a warm window, and nine drafted tokens."""
    config = LookaheadConfig(window=3, ngram=4, budget=18)
    window = JacobiWindow(3, 4, range(10, 40), seed=1)
    rng = random.Random(2)
    while not window.is_warm:
        newest = _grower({}, window).finish().newest
        list(window.advance(1, [rng.randrange(10, 40) for _ in newest], 1))
    grower = _grower({"suffix": _Suffix(config), "recycled": _Recycled(config)}, window)
    fill(grower, config.budget)
    return grower.finish()


def _grower(sources: Mapping[str, DraftSource], window: JacobiWindow) -> TreeGrower:
    acceptance = AcceptanceModel({name: source.weights for name, source in sources.items()})
    return TreeGrower([1], sources, acceptance, max_depth=99, window=window)


def draw(plan: StepPlan) -> str:
    """The plan as SVG."""
    tree = plan.tree
    order = _depth_first(plan)
    kind = {node: plan.sources[node][0] if node in plan.sources else "accepted" for node in order}
    size = len(order)
    width, height = LEFT + (CACHED + size) * CELL + 24, TOP + size * CELL + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="One step: a token tree on the left, its attention mask on the right">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="16" y="28" font-size="14" font-weight="bold" fill="#111827">one step is one token tree ...</text>',
        f'<text x="{LEFT}" y="28" font-size="14" font-weight="bold" fill="#111827">... a node attends to its '
        "ancestors</text>",
        f'<text x="{LEFT}" y="{TOP - 8}" fill="#6b7280">keys: cached text, then the nodes in the order of the '
        "tree</text>",
    ]
    x = {node: 30 + 38 * tree.depths[node] for node in order}
    y = {node: TOP + row * CELL + CELL // 2 for row, node in enumerate(order)}
    for node in order:
        if (parent := tree.parents[node]) >= 0:
            parts.append(
                f'<path d="M{x[parent]} {y[parent]} V{y[node]} H{x[node]}" fill="none" stroke="#d1d5db" '
                'stroke-width="1.5"/>'
            )
    for node in order:
        parts.append(f'<circle cx="{x[node]}" cy="{y[node]}" r="6.5" fill="{COLOURS[kind[node]]}"/>')
    for row, node in enumerate(order):
        ancestors = set(tree.path(node))
        for column in range(CACHED + size):
            seen = column < CACHED or order[column - CACHED] in ancestors
            key = "prefix" if column < CACHED else kind[order[column - CACHED]]
            parts.append(
                f'<rect x="{LEFT + column * CELL}" y="{TOP + row * CELL}" width="{CELL - 2}" height="{CELL - 2}" '
                f'rx="2" fill="{COLOURS[key] if seen else "#f3f4f6"}"/>'
            )
    at = 16
    for name, label in LABELS.items():
        parts.append(f'<rect x="{at}" y="{height - 32}" width="12" height="12" rx="2" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{at + 18}" y="{height - 22}" fill="#374151">{label}</text>')
        at += 40 + 7 * len(label)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _depth_first(plan: StepPlan) -> list[int]:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(plan.tree.parents):
        children.setdefault(parent, []).append(node)
    order: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += reversed(children.get(node, []))
    return order


if __name__ == "__main__":
    OUTPUT.write_text(draw(example()), encoding="utf-8")
