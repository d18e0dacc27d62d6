"""What is counted, and that it adds up."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_decoding.plan import StepPlan
from lookahead_decoding.statistics import DecodingStatistics
from lookahead_decoding.tree import TokenTree
from lookahead_decoding.verify import Walk, walk

NAMES = ["prompt_ngrams", "pool", "window"]


def recorded(plan: StepPlan, decided: Walk) -> DecodingStatistics:
    statistics = DecodingStatistics()
    statistics.record(plan, decided)
    return statistics


def example() -> tuple[StepPlan, Walk]:
    """Two cached-to-be tokens; behind them 1-2-3 and 1-4, of which 1 and 2 are right."""
    tree = TokenTree.chain([8, 9])
    one = tree.add(1, 1)
    two = tree.add(one, 2)
    three = tree.add(two, 3)
    four = tree.add(one, 4)
    sources = {one: ["pool", "window"], two: ["window"], three: ["window"], four: ["pool"]}
    plan = StepPlan(tree, 1, (), (), sources, expected_tokens=2.5)
    return plan, Walk([1, 2, 7], [one, two], None)


def test_a_step_is_counted_by_source_and_depth() -> None:
    statistics = recorded(*example())
    assert (statistics.steps, statistics.new_tokens, statistics.nodes) == (1, 3, 5)
    assert statistics.accepted_by_source == {"pool": 1, "window": 1}
    assert statistics.proposed == {("pool", 1): 1, ("pool", 2): 1, **{("window", d): 1 for d in (1, 2, 3)}}
    assert statistics.accepted == {("pool", 1): 1, ("window", 1): 1, ("window", 2): 1}


names = st.lists(st.sampled_from(NAMES), min_size=1, unique=True)
branches = st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=4), names), max_size=5)


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepPlan, Walk]:
    """A plan and where a random model walked."""
    tree = TokenTree.chain(draw(st.lists(st.integers(0, 1), min_size=1, max_size=3)))
    start = len(tree) - 1
    sources: dict[int, list[str]] = {}
    for branch, proposers in draw(branches):
        node = start
        for token in branch:
            node = tree.add(node, token)
            sources.setdefault(node, proposers)
    tokens = draw(st.lists(st.integers(0, 1), min_size=len(tree), max_size=len(tree)))
    plan = StepPlan(tree, start, (), (), sources)
    (walked,) = walk([plan], lambda nodes: [tokens[node] for node in nodes], lambda _: None)
    return plan, walked


@settings(deadline=None, max_examples=100)
@given(taken=st.lists(steps(), max_size=6))
def test_what_the_sources_contributed_sums_to_the_tokens_beyond_one_per_step(
    taken: list[tuple[StepPlan, Walk]],
) -> None:
    statistics = DecodingStatistics()
    for plan, decided in taken:
        statistics.record(plan, decided)
    assert statistics.steps == len(taken)
    assert statistics.new_tokens == sum(len(decided.tokens) for _, decided in taken)
    assert statistics.accepted_by_source.total() == statistics.new_tokens - statistics.steps
    assert statistics.nodes == sum(plan.num_nodes for plan, _ in taken) == sum(statistics.widths)
    assert statistics.widths == [plan.num_nodes for plan, _ in taken]
    assert statistics.expected_tokens == sum(plan.expected_tokens for plan, _ in taken)
    assert statistics.proposed.total() == sum(len(names) for plan, _ in taken for names in plan.sources.values())
    for source_and_depth, count in statistics.accepted.items():
        assert count <= statistics.proposed[source_and_depth]
    for name, count in statistics.accepted_by_source.items():
        assert count <= sum(n for (source, _), n in statistics.accepted.items() if source == name)


@settings(deadline=None, max_examples=50)
@given(first=st.lists(steps(), max_size=3), second=st.lists(steps(), max_size=3))
def test_adding_is_recording_one_after_the_other(
    first: list[tuple[StepPlan, Walk]], second: list[tuple[StepPlan, Walk]]
) -> None:
    parts = []
    for taken in (first, second, first + second):
        parts.append(DecodingStatistics())
        for plan, decided in taken:
            parts[-1].record(plan, decided)
    assert parts[0] + parts[1] == parts[2]


def test_adding_leaves_both_as_they_were() -> None:
    one, other = recorded(*example()), recorded(*example())
    total = one + other
    total.record(*example())
    assert one == other == recorded(*example())
    assert total.steps == 3


def test_times_are_kept_apart_and_added_up() -> None:
    statistics = recorded(*example())
    statistics.add_time(0.5, prefill=True)
    statistics.add_time(0.25, prefill=False)
    statistics.add_time(0.25, prefill=False)
    assert (statistics.prefill_seconds, statistics.decode_seconds, statistics.seconds) == (0.5, 0.5, 1.0)
    assert statistics.tokens_per_second == 3.0
    assert (statistics + statistics).seconds == 2.0


def test_the_estimated_speedup_counts_what_was_decided_after_the_first_step_at_its_price() -> None:
    statistics = DecodingStatistics()
    statistics.add_time(9.0, prefill=True, cost=70.0, plain_cost=50.0)  # a chunk of the prompt
    for _ in range(3):
        statistics.record(*example())
        statistics.add_time(1.0, prefill=statistics.steps == 1, cost=2.0, plain_cost=1.5)
    # Two steps of 3 tokens each, and the step that came last decided none.
    statistics.add_time(1.0, prefill=False, cost=2.0, plain_cost=1.5)
    assert (statistics.cost, statistics.plain_cost) == (6.0, 9.0)
    assert statistics.estimated_speedup == 1.5
    assert (statistics + statistics).estimated_speedup == 1.5
    assert (statistics + DecodingStatistics()).to_dict() == statistics.to_dict()


def test_means_are_totals_over_totals() -> None:
    tree = TokenTree.chain([9])
    plain = recorded(StepPlan(tree, 0, (0,)), Walk([4], [], None))
    total = recorded(*example()) + plain
    assert total.tokens_per_step == 4 / 2
    assert total.nodes_per_step == 6 / 2
    assert plain.tokens_per_step == plain.nodes_per_step == 1


def test_nothing_counted_gives_zeros_and_no_division_by_zero() -> None:
    empty = DecodingStatistics()
    assert empty.tokens_per_step == empty.nodes_per_step == empty.tokens_per_second == empty.estimated_speedup == 0
    assert empty.to_dict()["expected_tokens_per_step"] == 0
    assert json.loads(json.dumps(empty.to_dict()))["proposed"] == {}


@pytest.mark.parametrize("repeats", [1, 3])
def test_the_dict_survives_json_and_lists_the_counts_by_depth(repeats: int) -> None:
    statistics = DecodingStatistics(prefill_seconds=1.0, decode_seconds=2.0)
    for _ in range(repeats):
        statistics.record(*example())
    shown = statistics.to_dict()
    assert json.loads(json.dumps(shown)) == shown
    assert shown == {
        "steps": repeats,
        "new_tokens": 3 * repeats,
        "tokens_per_step": 3.0,
        "nodes_per_step": 5.0,
        "widths": [5] * repeats,
        "expected_tokens_per_step": 2.5,
        "estimated_speedup": 0.0,
        "accepted_by_source": {"pool": repeats, "window": repeats},
        "proposed": {"pool": [repeats, repeats, 0], "window": [repeats] * 3},
        "accepted": {"pool": [repeats, 0], "window": [repeats, repeats]},
        "seconds": {"prefill": 1.0, "decode": 2.0},
        "tokens_per_second": float(repeats),
    }
