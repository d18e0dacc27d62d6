"""How wide a step is, against all widths; and what a step costs, against the costs themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lookahead_decoding.acceptance import AcceptanceModel
from lookahead_decoding.budget import CostCurve, allot, fill, share, usual_cost
from lookahead_decoding.config import LookaheadConfig
from lookahead_decoding.draft import DraftSource
from lookahead_decoding.plan import TreeGrower

FAR = 1 << 30
LAST = 90
KINDS = [-1.0, 0.0, 1.0, 2.0, 3.0, 4.5, 7.0]

Tree = dict[tuple[int, ...], Sequence[tuple[int, int]]]
"""``(token, kind)`` of what is guessed behind each path of guesses."""
Seconds = Callable[[int], float]


class Listed(DraftSource):
    """Guesses what it was made with."""

    weights = KINDS

    def __init__(self, tree: Tree) -> None:
        super().__init__(LookaheadConfig())
        self.tree = tree

    def start(self) -> Any:
        return ()

    def follow(self, place: Any, token: int) -> Any:
        return (*place, token)

    def guesses(self, place: Any) -> Sequence[tuple[int, int]]:
        return self.tree.get(place, ())


def grower(tree: Tree, trunk: Sequence[int] = (LAST,), **options: Any) -> TreeGrower:
    sources = {"listed": Listed(tree)}
    return TreeGrower(trunk, sources, AcceptanceModel({"listed": KINDS}), max_depth=FAR, **options)


def chain(length: int, kind: int) -> Tree:
    return {(1,) * i: [(1, kind)] for i in range(length)}


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Guesses behind guesses, up to about 20 of them."""
    tree: Tree = {}
    paths: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(0, 8))):
        path = draw(st.sampled_from(paths))
        tokens = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
        tree[path] = [(token, draw(st.integers(0, len(KINDS) - 1))) for token in tokens]
        paths += [(*path, token) for token in tokens]
    return tree


def steps_of(sizes: Sequence[int], heights: Sequence[float]) -> Seconds:
    """A cost that is level for some nodes and then jumps, again and again."""

    def seconds(nodes: int) -> float:
        total, i = 1.0, 0
        while nodes > sizes[i % len(sizes)]:
            nodes -= sizes[i % len(sizes)]
            total += heights[i % len(heights)]
            i += 1
        return total

    return seconds


def flat(nodes: int) -> float:
    return 1.0


def linear(per_node: float) -> Seconds:
    return lambda nodes: 1 + per_node * nodes


costs: st.SearchStrategy[Seconds] = st.one_of(
    st.just(flat),
    st.builds(linear, st.floats(0, 2)),
    st.builds(
        steps_of,
        st.lists(st.integers(1, 9), min_size=1, max_size=4),
        st.lists(st.floats(0, 3), min_size=1, max_size=4),
    ),
)


def prefix_rates(made: Sequence[tuple[TreeGrower, int | None]], seconds: Seconds) -> list[float]:
    """Expected tokens per second of every size on the way, the likeliest guess of all always being the next."""
    rates = []
    while True:
        tokens = sum(each.expected_tokens for each, _ in made)
        rates.append(tokens / seconds(sum(len(each.tree) for each, _ in made)))
        able = [each for each, budget in made if each.chance > 0 and (budget is None or each.num_nodes < budget)]
        if not able:
            return rates
        max(able, key=lambda each: each.chance).grow()


@settings(deadline=None, max_examples=500)
@given(
    guessed=st.lists(st.tuples(trees(), st.one_of(st.none(), st.integers(1, 9))), min_size=1, max_size=3),
    seconds=costs,
)
@example(guessed=[(chain(8, 6), None)], seconds=steps_of([4], [1.0]))
@example(guessed=[(chain(9, 6), 5)], seconds=flat)
# Three more guesses pay, though one, two, or four would not.
@example(guessed=[(chain(8, 6), None)], seconds=steps_of([1, 3, 9], [2.5, 100.0]))
def test_a_shared_step_has_the_best_rate_of_all_sizes_on_the_way(
    guessed: list[tuple[Tree, int | None]], seconds: Seconds
) -> None:
    expected = max(prefix_rates([(grower(tree), budget) for tree, budget in guessed], seconds))
    made = [(grower(tree), budget) for tree, budget in guessed]
    share(made, seconds)
    found = sum(each.expected_tokens for each, _ in made) / seconds(sum(len(each.tree) for each, _ in made))
    assert math.isclose(found, expected)
    for each, budget in made:
        assert budget is None or each.num_nodes <= budget
        # What was tried and taken back left no trace.
        assert each.expected_tokens == pytest.approx(expected_tokens(each))


def expected_tokens(made: TreeGrower) -> float:
    """One, and for each node the chance that it is accepted."""
    plan = made.finish()
    chance = {plan.start: 1.0}
    for node in range(plan.start + 1, len(plan.tree)):
        parent = plan.tree.parents[node]
        chance[node] = chance[parent] * plan.candidates[parent].chances[plan.tree.tokens[node]]
    return sum(chance.values())


def test_a_free_step_takes_all_guesses_and_a_dear_one_none() -> None:
    tree: Tree = {(): [(1, 3), (2, 0)], (1,): [(3, 4)], (2,): [(4, 0), (5, 1)]}
    free, dear = grower(tree), grower(tree)
    share([(free, None)], flat)
    share([(dear, None)], linear(50.0))
    assert free.num_nodes == 6
    assert dear.num_nodes == 1


def test_the_first_guesses_may_not_pay_alone_and_pay_together() -> None:
    """A second node doubles the time; eight cost no more than two."""
    for length, width in ((2, 1), (7, 8)):
        made = grower(chain(length, 6))
        share([(made, None)], lambda nodes: 1.0 if nodes == 1 else 3.5)
        assert made.num_nodes == width


def test_a_step_stops_short_of_a_jump_in_time() -> None:
    made = grower(chain(40, 6))
    share([(made, None)], steps_of([8], [20.0]))
    assert made.num_nodes == 8


def test_a_wide_level_is_used_to_its_end() -> None:
    made = grower({(): [(token, 3) for token in range(250)]})
    share([(made, None)], flat)
    assert made.num_nodes == 251


def test_without_a_budget_even_free_steps_have_an_end() -> None:
    made = grower({(): [(token, 3) for token in range(400)]})
    share([(made, None)], flat)
    assert made.num_nodes == 256


def test_sessions_with_likely_guesses_get_the_room() -> None:
    likely, unlikely = grower(chain(9, 6)), grower(chain(9, 0))
    share([(unlikely, None), (likely, None)], linear(0.05))
    assert likely.num_nodes > 5
    assert unlikely.num_nodes == 1


def test_equal_sessions_get_equal_room() -> None:
    made = [grower(chain(9, 6)) for _ in range(4)]
    share([(each, None) for each in made], steps_of([8], [100.0]))
    assert [each.num_nodes for each in made] == [2] * 4


@pytest.mark.parametrize("budget", [1, 2, 5])
def test_a_session_at_its_budget_leaves_the_room_to_the_others(budget: int) -> None:
    small, large = grower(chain(9, 6)), grower(chain(9, 4))
    share([(small, budget), (large, None)], flat)
    assert small.num_nodes == budget
    assert large.num_nodes == 10


def test_more_tokens_that_are_not_cached_yet_count_as_time_and_not_as_width() -> None:
    made = grower(chain(9, 6), trunk=[5, 6, 7, LAST])
    share([(made, 4)], lambda nodes: 1.0 if nodes <= 6 else 50.0)
    assert (made.num_nodes, len(made.tree)) == (3, 6)


def test_nothing_to_share_is_no_error() -> None:
    share([], flat)
    made = grower({}, trunk=[1, 2], decides=False)
    share([(made, 8)], flat)
    assert len(made.tree) == 2


@settings(deadline=None, max_examples=200)
@given(tree=trees(), budget=st.one_of(st.none(), st.integers(1, 25)))
def test_filling_takes_the_likeliest_guesses_to_the_budget_or_to_their_end(tree: Tree, budget: int | None) -> None:
    made, whole = grower(tree), grower(tree)
    while whole.chance > 0:
        whole.grow()
    fill(made, budget)
    assert made.num_nodes == (whole.num_nodes if budget is None else min(budget, whole.num_nodes))
    assert made.tree.tokens == whole.tree.tokens[: len(made.tree)]
    assert made.tree.parents == whole.tree.parents[: len(made.tree)]


def test_steps_of_fixed_width_are_filled_and_the_others_share_what_that_leaves() -> None:
    fixed, adaptive = grower(chain(9, 0)), grower(chain(9, 6))
    configs = [LookaheadConfig(adaptive=False, budget=5), LookaheadConfig(budget=6)]
    allot([*zip((fixed, adaptive), configs, strict=True)], lambda nodes: 1.0 if nodes <= 9 else 50.0)
    assert (fixed.num_nodes, adaptive.num_nodes) == (5, 4)


# Costs


def prior(nodes: int, context: int) -> float:
    return 1 + 0.05 * nodes * (1 + context / 2048)


contexts = st.sampled_from([0, 100, 700, 3000])


@settings(deadline=None, max_examples=100)
@given(nodes=st.integers(1, 100), context=contexts, factor=st.floats(1e-4, 1e3))
def test_one_measurement_scales_everything(nodes: int, context: int, factor: float) -> None:
    curve, usual = CostCurve(prior), CostCurve(prior)
    curve.record(nodes, context, factor * prior(nodes, context))
    for other in (0, 500, 4000):
        for width in (1, 2, 7, 64, 200):
            assert math.isclose(curve.at(other)(width), factor * usual.at(other)(width), rel_tol=1e-5)


def test_without_a_measurement_costs_are_the_priors() -> None:
    curve = CostCurve(prior)
    for context in (0, 256, 768):  # those that a class of contexts stands for
        assert [curve.at(context)(nodes) for nodes in (1, 2, 30)] == [prior(nodes, context) for nodes in (1, 2, 30)]


@settings(deadline=None, max_examples=100)
@given(
    measured=st.lists(
        st.tuples(st.integers(1, 90), contexts, st.floats(0.01, 100)),
        max_size=40,
    ),
    context=contexts,
)
def test_a_wider_step_never_costs_less(measured: list[tuple[int, int, float]], context: int) -> None:
    curve = CostCurve(prior)
    for each in measured:
        curve.record(*each)
    found = [curve.at(context)(nodes) for nodes in range(1, 130)]
    assert all(cost > 0 for cost in found)
    assert found == sorted(found)
    assert [curve.at(context)(nodes) for nodes in (129, 5, 64)] == [found[128], found[4], found[63]]


def test_measurements_near_a_width_win_there() -> None:
    curve = CostCurve(prior)
    for _ in range(10):
        curve.record(2, 0, prior(2, 0))
        curve.record(64, 0, 5 * prior(64, 0))
    assert curve.at(0)(2) == pytest.approx(prior(2, 0), rel=0.1)
    assert curve.at(0)(64) == pytest.approx(5 * prior(64, 0), rel=0.1)
    # Between them the curve goes from one to the other.
    assert prior(12, 0) < curve.at(0)(12) < 5 * prior(12, 0)


def test_measurements_over_a_context_win_there() -> None:
    curve = CostCurve(prior)
    for _ in range(10):
        curve.record(8, 0, prior(8, 0))
        curve.record(8, 7936, 3 * prior(8, 7936))
    assert curve.at(0)(8) == pytest.approx(prior(8, 0), rel=0.1)
    assert curve.at(7936)(8) == pytest.approx(3 * prior(8, 7936), rel=0.1)


def test_few_slow_steps_do_not_change_the_cost() -> None:
    curve, calm = CostCurve(prior), CostCurve(prior)
    for i in range(30):
        curve.record(8, 0, 1000.0 if i % 3 == 0 else 2 * prior(8, 0))
        calm.record(8, 0, 2 * prior(8, 0))
    for nodes in (1, 8, 30):
        assert curve.at(0)(nodes) == pytest.approx(calm.at(0)(nodes))


def test_a_machine_that_became_slower_is_noticed() -> None:
    curve = CostCurve(prior)
    for _ in range(100):
        curve.record(8, 0, prior(8, 0))
    for _ in range(15):
        curve.record(8, 0, 4 * prior(8, 0))
    assert curve.at(0)(8) == pytest.approx(4 * prior(8, 0))


def convex(nodes: int) -> float:
    return 0.01 + 0.00002 * nodes**2


def concave(nodes: int) -> float:
    return 0.01 * math.sqrt(nodes)


@pytest.mark.parametrize("true", [flat, linear(0.5), convex, concave], ids=["flat", "linear", "convex", "concave"])
def test_a_curve_of_another_shape_than_the_priors_is_learned_where_it_was_measured(true: Seconds) -> None:
    curve = CostCurve(usual_cost("cpu", "float32"))
    for _ in range(10):
        for nodes in range(1, 65):
            curve.record(nodes, 0, true(nodes))
    for nodes in range(1, 65):
        assert curve.at(0)(nodes) == pytest.approx(true(nodes), rel=0.25)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cpu", "bfloat16"), ("cuda", "float16")])
def test_time_usually_grows_with_nodes_and_with_what_they_attend_to(device: str, dtype: str) -> None:
    usual = usual_cost(device, dtype)
    for nodes in (1, 10, 100):
        assert usual(nodes, 0) < usual(nodes + 1, 0) < 2 * usual(nodes, 0)
        assert usual(nodes, 0) < usual(nodes, 4096)
    assert usual(2, 0) - usual(1, 0) <= 0.05
