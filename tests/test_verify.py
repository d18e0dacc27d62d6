"""The walk against a plain loop that draws one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import event, given, settings
from hypothesis import strategies as st

from lookahead_decoding.plan import StepPlan
from lookahead_decoding.tree import TokenTree
from lookahead_decoding.verify import Walk, walk

VOCAB = 3
Model = Callable[[Sequence[int]], int]
Stop = Callable[[Sequence[int]], str | None]


def plain_decoding(text: Sequence[int], model: Model, stop: Stop, most: int) -> tuple[list[int], str | None]:
    """At most so many tokens behind ``text``, and why they end."""
    tokens: list[int] = []
    while len(tokens) < most:
        tokens.append(model([*text, *tokens]))
        if (end := stop([*text, *tokens])) is not None:
            return tokens, end
    return tokens, None


def model_of(seed: int) -> Model:
    """A next token that depends on every token before it and on their order."""

    def model(text: Sequence[int]) -> int:
        state = seed
        for token in text:
            state = (state * 31 + token + 1) % 10_007
        return state // 7 % VOCAB

    return model


def stop_of(last: int | None, length: int, text_end: tuple[int, ...]) -> Stop:
    """Ends at a token, at a length, or behind a sequence."""

    def stop(text: Sequence[int]) -> str | None:
        if text[-1] == last:
            return "eos"
        if text_end and tuple(text[-len(text_end) :]) == text_end:
            return "stop"
        return "length" if len(text) >= length else None

    return stop


stops = st.builds(
    stop_of,
    last=st.sampled_from([None, None, None, *range(VOCAB)]),
    length=st.integers(1, 14).map(lambda short_by: 15 - short_by),
    text_end=st.sampled_from([(), (0, 1), (2, 2), (1, 0, 1), (2, 0, 0)]),
)


@st.composite
def plans(draw: st.DrawFn, model: Model) -> StepPlan:
    """A random tree; some of its branches follow the model, and some of its nodes may not be stepped on."""
    trunk = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3))
    tree = TokenTree.chain(trunk)
    start = len(tree) - 1
    right, _ = plain_decoding(trunk, model, lambda _: None, 6)
    for num_right, rest in draw(
        st.lists(
            st.tuples(st.sampled_from(range(6, -1, -1)), st.lists(st.integers(0, VOCAB - 1), max_size=3)),
            max_size=4,
        )
    ):
        node = start
        for token in right[:num_right] + rest:
            node = tree.add(node, token)
    guessed = range(start + 1, len(tree))
    closed = draw(st.sets(st.sampled_from(guessed), max_size=2)) if guessed else set()
    return StepPlan(tree, start, tuple(range(start, len(tree))), (), {i: ["a"] for i in guessed if i not in closed})


def walk_alone(plan: StepPlan, draw: Callable[[int], int], stop: Callable[[int], str | None]) -> Walk:
    """One row's walk."""

    def told(tokens: Sequence[int]) -> list[str | None] | None:
        end = stop(tokens[0])
        return None if end is None else [end]

    (found,) = walk([plan], lambda nodes: [draw(node) for node in nodes], told)
    return found


@settings(deadline=None, max_examples=500)
@given(data=st.data(), seed=st.integers(0, 999), stop=stops)
def test_a_walk_is_plain_decoding_as_far_as_the_guesses_were_right(data: st.DataObject, seed: int, stop: Stop) -> None:
    model = model_of(seed)
    plan = data.draw(plans(model))
    text = plan.tree.path_tokens(plan.start)
    drawn_behind: list[list[int]] = []
    told: list[int] = []

    def draw(node: int) -> int:
        drawn_behind.append(plan.tree.path_tokens(node))
        return model(drawn_behind[-1])

    def told_to_stop(token: int) -> str | None:
        told.append(token)
        return stop([*text, *told])

    found = walk_alone(plan, draw, told_to_stop)

    # The tokens, and where they end.
    tokens, end = plain_decoding(text, model, stop, most=len(found.tokens))
    assert len(found.tokens) >= 1
    assert found.tokens == tokens
    assert found.end == end

    # The model and the stop rules saw plain decoding's calls and no other.
    assert drawn_behind == [[*text, *tokens[:i]] for i in range(len(tokens))]
    assert told == tokens

    # The path carries all tokens but the last drawn one, on nodes that may be stepped on.
    assert [plan.tree.tokens[node] for node in found.path] == tokens[:-1]
    assert [plan.tree.parents[node] for node in found.path] == [plan.start, *found.path][:-1]
    assert set(found.path) <= set(plan.sources)

    # It goes as far as it can.
    if found.end is None:
        last_node = [plan.start, *found.path][-1]
        assert plan.tree.child(last_node, tokens[-1]) not in plan.sources
    event(f"{len(found.path)} guesses accepted")
    event(f"ends: {found.end}")


def chain_plan(text: Sequence[int], guesses: Sequence[int]) -> StepPlan:
    start = len(text) - 1
    tree = TokenTree.chain([*text, *guesses])
    return StepPlan(tree, start, (), (), {node: ["a"] for node in range(start + 1, len(tree))})


def test_right_guesses_are_all_accepted_and_one_token_more() -> None:
    right = [4, 5, 6]
    found = walk_alone(chain_plan([9], right), draw=[4, 5, 6, 7].__getitem__, stop=lambda _: None)
    assert (found.tokens, found.path, found.end) == ([4, 5, 6, 7], [1, 2, 3], None)


def test_generation_ends_inside_a_block_of_right_guesses() -> None:
    drawn = []

    def draw(node: int) -> int:
        drawn.append(node)
        return [4, 5, 6, 7][node]

    found = walk_alone(chain_plan([9], [4, 5, 6]), draw, stop=lambda token: "eos" if token == 5 else None)
    assert (found.tokens, found.path, found.end) == ([4, 5], [1], "eos")
    assert drawn == [0, 1]


def test_a_right_guess_that_nobody_proposed_is_not_stepped_on() -> None:
    plan = chain_plan([9], [4, 5, 6])
    closed = StepPlan(plan.tree, plan.start, (), (), {1: ["a"], 3: ["a"]})
    found = walk_alone(closed, draw=[4, 5, 6, 7].__getitem__, stop=lambda _: None)
    assert (found.tokens, found.path, found.end) == ([4, 5], [1], None)


def test_the_walk_takes_the_branch_that_was_drawn() -> None:
    tree = TokenTree.chain([9])
    wrong, right = tree.add(0, 1), tree.add(0, 2)
    tree.add(wrong, 3)
    below = tree.add(right, 3)
    plan = StepPlan(tree, 0, (), (), dict.fromkeys(range(1, len(tree)), ("a",)))
    found = walk_alone(plan, draw={0: 2, right: 3, below: 1}.__getitem__, stop=lambda _: None)
    assert (found.tokens, found.path) == ([2, 3, 1], [right, below])


@settings(deadline=None, max_examples=300)
@given(data=st.data(), seeds=st.lists(st.integers(0, 999), min_size=2, max_size=3), ends=st.integers(1, 4))
def test_rows_walk_together_and_stay_where_one_has_to(data: st.DataObject, seeds: list[int], ends: int) -> None:
    models = [model_of(seed) for seed in seeds]
    together = [data.draw(plans(model)) for model in models]
    alone = [
        walk_alone(plan, lambda node, m=model, p=plan: m(p.tree.path_tokens(node)), lambda _: None)  # type: ignore[misc]
        for model, plan in zip(models, together, strict=True)
    ]
    told: list[list[int]] = []

    def draw(nodes: Sequence[int]) -> list[int]:
        return [m(p.tree.path_tokens(node)) for m, p, node in zip(models, together, nodes, strict=True)]

    def stop(tokens: Sequence[int]) -> list[str] | None:
        told.append(list(tokens))
        return ["length"] * len(tokens) if len(told) == ends else None

    found = walk(together, draw, stop)
    steps = min(ends, *(len(row.tokens) for row in alone))
    assert len(told) == steps
    for row, expected, column in zip(found, alone, zip(*told, strict=True), strict=True):
        assert row.tokens == expected.tokens[:steps] == list(column)
        assert row.path == expected.path[: steps - 1]
        assert row.end == ("length" if steps == ends else None)
