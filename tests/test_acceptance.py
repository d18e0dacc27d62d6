"""What guesses are worth: chances that add up, and that move to what is seen."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_decoding.acceptance import NONE_OF_THEM, SUREST, AcceptanceModel, Candidates

PRIORS = {"a": (2.0, 1.0, -1.0), "b": (3.0, 0.5)}
NAMED, OTHER = 5, 99
PULL = 0.1
"""How far from a rate of hits the chance may stay, since the prior always pulls."""

Evidence = list[tuple[str, list[tuple[int, int]]]]

evidences = st.lists(
    st.sampled_from(["a", "b"]).flatmap(
        lambda name: st.tuples(
            st.just(name),
            st.lists(st.tuples(st.integers(0, 5), st.integers(0, len(PRIORS[name]) - 1)), min_size=1, max_size=6),
        )
    ),
    max_size=2,
    unique_by=lambda pair: pair[0],
)


def chance_of(model: AcceptanceModel, kind: int = 0, depth: int = 1) -> float:
    """Of a token that source ``a`` names alone."""
    return model.judge([("a", [(NAMED, kind)])], depth).chances[NAMED]


@settings(deadline=None, max_examples=200)
@given(evidence=evidences, depth=st.integers(1, 20))
def test_chances_are_the_softmax_of_the_summed_weights_and_of_none_of_them(evidence: Evidence, depth: int) -> None:
    candidates = AcceptanceModel(PRIORS).judge(evidence, depth)
    odds = {
        token: math.exp(
            sum(PRIORS[name][kind] for name, guesses in evidence for guess, kind in guesses if guess == token)
        )
        for _, guesses in evidence
        for token, _ in guesses
    }
    total = sum(odds.values()) + math.exp(NONE_OF_THEM)
    assert candidates.chances.keys() == odds.keys()
    for token, value in odds.items():
        assert math.isclose(candidates.chances[token], SUREST * value / total)
    assert 0 <= sum(candidates.chances.values()) < 1
    assert candidates.depth == depth


@settings(deadline=None, max_examples=200)
@given(evidence=evidences, draws=st.lists(st.integers(0, 7), max_size=60), depth=st.integers(1, 12))
def test_chances_stay_chances_whatever_was_learned(evidence: Evidence, draws: list[int], depth: int) -> None:
    model = AcceptanceModel(PRIORS)
    for drawn in draws:
        model.learn(model.judge(evidence, depth), drawn)
    chances = model.judge(evidence, depth).chances
    assert all(0 < chance < 1 for chance in chances.values())
    assert sum(chances.values()) < 1


@settings(deadline=None, max_examples=200)
@given(evidence=evidences, drawn=st.integers(0, 7), depth=st.integers(1, 12))
def test_a_token_that_was_drawn_becomes_likelier_at_its_node(evidence: Evidence, drawn: int, depth: int) -> None:
    model = AcceptanceModel(PRIORS)
    before = model.judge(evidence, depth)
    model.learn(before, drawn)
    after = model.judge(evidence, depth)
    none = [1 - sum(found.chances.values()) for found in (before, after)]
    if drawn in before.chances:
        assert after.chances[drawn] >= before.chances[drawn]
    elif before.chances:
        assert none[1] > none[0]


def test_more_evidence_for_a_token_makes_it_likelier_and_the_others_less_likely() -> None:
    model = AcceptanceModel(PRIORS)
    alone = model.judge([("a", [(1, 0), (2, 0)])], 1).chances
    both = model.judge([("a", [(1, 0), (2, 0)]), ("b", [(1, 1)])], 1).chances
    assert alone[1] == alone[2]
    assert both[1] > alone[1] > both[2]


def test_each_sources_tokens_are_told_in_the_sources_order() -> None:
    candidates = Candidates([("b", [(1, 0), (2, 1)]), ("a", [(2, 0)])])
    assert [candidates.sources(token) for token in (1, 2, 3)] == [["b"], ["b", "a"], []]


def judged_and_learned(
    model: AcceptanceModel, draw: Callable[[], int], steps: int, kind: int = 0, depth: int = 1
) -> float:
    """The mean chance of :data:`NAMED` over so many steps, each learned from."""
    total = 0.0
    for _ in range(steps):
        candidates = model.judge([("a", [(NAMED, kind)])], depth)
        total += candidates.chances[NAMED]
        model.learn(candidates, draw())
    return total / steps


def hits(rate: float, seed: int = 0) -> Callable[[], int]:
    """Draws that are :data:`NAMED` at a rate."""
    rng = random.Random(seed)
    return lambda: NAMED if rng.random() < rate else OTHER


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.3, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("prior", [0.0, 1.5, 3.0, 6.0])
def test_the_chance_moves_to_the_rate_of_hits_and_stays_there(rate: float, prior: float) -> None:
    model = AcceptanceModel({"a": (prior,)})
    draw = hits(rate)
    judged_and_learned(model, draw, 600)
    for _ in range(4):
        assert abs(judged_and_learned(model, draw, 500) - rate) < PULL


def test_kinds_are_learned_apart() -> None:
    model = AcceptanceModel(PRIORS)
    for _ in range(30):
        judged_and_learned(model, hits(0.9), 20, kind=2)
        judged_and_learned(model, hits(0.1), 20, kind=0)
    assert chance_of(model, kind=2) > 0.6 > 0.3 > chance_of(model, kind=0)


def test_what_is_learned_at_one_depth_about_a_kind_holds_at_the_others() -> None:
    model = AcceptanceModel(PRIORS)
    before = [chance_of(model, depth=depth) for depth in (1, 2, 20)]
    judged_and_learned(model, hits(1.0), 100)
    after = [chance_of(model, depth=depth) for depth in (1, 2, 20)]
    assert all(late > early for early, late in zip(before, after, strict=True))
    # That none of them is right is a matter of the depth.
    assert after[0] > after[1] == after[2]


def test_depths_far_below_are_one() -> None:
    model = AcceptanceModel(PRIORS)
    judged_and_learned(model, hits(0.0), 100, depth=30)
    assert chance_of(model, depth=50) == chance_of(model, depth=9) < chance_of(model, depth=1)


def test_weights_return_to_their_priors_when_nothing_speaks_against_it() -> None:
    """Where the chance is right on average, whatever moves a weight moves it back, and the prior pulls."""
    model, prior = AcceptanceModel(PRIORS), AcceptanceModel(PRIORS)
    judged_and_learned(model, hits(1.0), 400)
    far = chance_of(model)
    assert far > 0.85
    rng = random.Random(0)
    for _ in range(12_000):
        # The draws agree with whatever is believed, so that the rates themselves say nothing.
        candidates = model.judge([("a", [(NAMED, 0)])], 1)
        model.learn(candidates, NAMED if rng.random() < candidates.chances[NAMED] else OTHER)
    assert abs(chance_of(model) - chance_of(prior)) < (far - chance_of(prior)) / 2


def test_guesses_that_were_not_computed_are_learned_from_too() -> None:
    """A kind that was found useless is found useful again though none of its guesses is ever in a tree."""
    model = AcceptanceModel(PRIORS)
    evidence: Sequence[tuple[str, Sequence[tuple[int, int]]]] = [("a", [(1, 0)]), ("b", [(2, 1)])]
    for _ in range(300):
        model.learn(model.judge(evidence, 1), 1)
    useless = model.judge(evidence, 1).chances[2]
    assert useless < 0.1
    for _ in range(300):
        model.learn(model.judge(evidence, 1), 2)  # the walk ends here: 2 was no node
    assert model.judge(evidence, 1).chances[2] > 0.6
    assert model.judge(evidence, 1).chances[1] < 0.3


def test_learning_is_from_the_chances_that_were_judged() -> None:
    """Several nodes of a step are judged before any is learned from."""
    one, other = AcceptanceModel(PRIORS), AcceptanceModel(PRIORS)
    candidates = [one.judge([("a", [(NAMED, 0)])], depth) for depth in (1, 2)]
    for each in candidates:
        one.learn(each, NAMED)
    for depth in (2, 1):
        other.learn(AcceptanceModel(PRIORS).judge([("a", [(NAMED, 0)])], depth), NAMED)
    assert math.isclose(chance_of(one), chance_of(other))


def test_the_priors_themselves_are_not_changed() -> None:
    priors = {"a": [2.0, 1.0]}
    model = AcceptanceModel(priors)
    judged_and_learned(model, hits(1.0), 50)
    assert priors == {"a": [2.0, 1.0]}
    assert chance_of(AcceptanceModel(priors)) < chance_of(model)


# Sampling


def test_noise_that_is_known_speaks_for_the_tokens_it_will_favour() -> None:
    model = AcceptanceModel(PRIORS, temperature=1.0)
    asked: list[tuple[int, list[int]]] = []

    def gumbel(depth: int, tokens: Sequence[int]) -> list[float]:
        asked.append((depth, list(tokens)))
        return [4.0 if token == 1 else -1.0 for token in tokens]

    evidence: Sequence[tuple[str, Sequence[tuple[int, int]]]] = [("a", [(1, 0), (2, 0)])]
    blind, seeing = model.judge(evidence, 3), model.judge(evidence, 3, gumbel)
    assert asked == [(3, [1, 2])]
    assert seeing.chances[1] > blind.chances[1] == blind.chances[2] > seeing.chances[2]


def test_the_noise_counts_the_more_the_higher_the_temperature() -> None:
    chances = []
    for temperature in (0.0, 0.3, 0.6, 1.2):
        model = AcceptanceModel(PRIORS, temperature)
        found = model.judge([("a", [(1, 0), (2, 0)])], 1, lambda _, tokens: [3.0, 0.0][: len(tokens)]).chances
        chances.append(found[1] / found[2])
    assert chances == sorted(chances)
    assert chances[0] == 1.0 < chances[1]


def test_the_higher_the_temperature_the_more_likely_is_none_of_the_guesses() -> None:
    chances = [chance_of(AcceptanceModel(PRIORS, temperature)) for temperature in (0.0, 0.5, 1.0)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > chances[2]


@pytest.mark.parametrize("temperature", [100.0, 1e6, math.inf])
def test_no_temperature_is_too_high(temperature: float) -> None:
    model = AcceptanceModel({"source": (3.0, 1.0)}, temperature)
    for noise in (-5.0, 0.0, 30.0):
        found = model.judge([("source", [(5, 0), (6, 1)])], 1, lambda _, tokens, noise=noise: [noise] * len(tokens))  # type: ignore[misc]
        assert 0 <= sum(found.chances.values()) <= SUREST
        model.learn(found, 5)
