"""The width of steps, replayed without a model: acceptance, costs and budget together against every fixed width.

A text is told beforehand, with how often its tokens are guessed; steps take a time that is told, too. What a step is
expected to decide and to cost is learned on the way, and all that is decided and spent meanwhile counts.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from lookahead_decoding.acceptance import AcceptanceModel
from lookahead_decoding.budget import CostCurve, fill, share, usual_cost
from lookahead_decoding.config import LookaheadConfig
from lookahead_decoding.draft import DraftSource
from lookahead_decoding.plan import TreeGrower
from lookahead_decoding.verify import walk

LOSS = 0.05
"""Of the best fixed width's tokens per second, how much may be lost."""
STEPS = 400
BACK = 80
"""Steps within which the width follows a change of acceptance."""
BUDGET = 64
WIDTHS = (*range(1, 13), 14, 16, 20, 24, 32, 48, BUDGET)
UNGUESSED, FIRST, SECOND = range(3)

Acceptance = Callable[[int], float]
Seconds = Callable[[int], float]

COSTS: dict[str, Seconds] = {
    "flat": lambda nodes: 1.0,
    "linear": lambda nodes: 1 + 0.05 * nodes,
    "gentle": lambda nodes: 1 + 0.02 * nodes,
    "steep": lambda nodes: 1 + 0.3 * nodes,
    "steps": lambda nodes: 1 + 0.3 * ((nodes - 1) // 8),
}


class Foretold(DraftSource):
    """Names two tokens everywhere: the first is right at a rate, the second sometimes where the first is not.

    Args:
        acceptance: the rate by position in the text.
        seed: of the text.
    """

    weights = (2.5, 1.0)

    def __init__(self, acceptance: Acceptance, seed: int = 0) -> None:
        super().__init__(LookaheadConfig())
        self.decided = 0
        self._acceptance = acceptance
        self._random = random.Random(seed)
        self._text: list[int] = []

    def token(self, position: int) -> int:
        """What the model draws there."""
        while len(self._text) <= position:
            rate, chance = self._acceptance(len(self._text)), self._random.random()
            second = rate * (1 - rate) / 2
            self._text.append(FIRST if chance < rate else SECOND if chance < rate + second else UNGUESSED)
        return self._text[position]

    def extend(self, tokens: Sequence[int]) -> None:
        self.decided += len(tokens)

    def start(self) -> Any:
        return None

    def follow(self, place: Any, token: int) -> Any:
        return None

    def guesses(self, place: Any) -> Sequence[tuple[int, int]]:
        return [(FIRST, 0), (SECOND, 1)]


class Step(NamedTuple):
    width: int
    tokens: int


def replay(acceptance: Acceptance, grow: Callable[[TreeGrower], None], done: Callable[[int], None]) -> list[Step]:
    """Decode so many steps.

    Args:
        acceptance: rate by position.
        grow: makes a step's tree as wide as it likes.
        done: told the width of each step.
    """
    source = Foretold(acceptance)
    model = AcceptanceModel({"foretold": source.weights})
    steps = []
    for _ in range(STEPS):
        grower = TreeGrower([UNGUESSED], {"foretold": source}, model, max_depth=BUDGET)
        grow(grower)
        plan = grower.finish()
        depths = plan.tree.depths
        (decided,) = walk(
            [plan], lambda nodes, at=depths: [source.token(source.decided + at[nodes[0]])], lambda _: None
        )  # type: ignore[misc]
        for node, token in zip([plan.start, *decided.path], decided.tokens, strict=True):
            if node in plan.candidates:
                model.learn(plan.candidates[node], token)
        source.extend(decided.tokens)
        steps.append(Step(plan.num_nodes, len(decided.tokens)))
        done(plan.num_nodes)
    return steps


def adapting(acceptance: Acceptance, measured: Seconds) -> list[Step]:
    """Steps as wide as is believed to pay.

    Args:
        acceptance: rate by position.
        measured: called once for each step, in their order.
    """
    curve = CostCurve(usual_cost("cpu", "float32"))
    return replay(
        acceptance,
        lambda grower: share([(grower, BUDGET)], curve.hoped(0)),
        lambda nodes: curve.record(nodes, 0, measured(nodes)),
    )


def rate_of(steps: Sequence[Step], seconds: Seconds) -> float:
    """Tokens per second."""
    return sum(step.tokens for step in steps) / sum(seconds(step.width) for step in steps)


@functools.cache
def fixed(rate: float) -> dict[int, list[Step]]:
    """Steps of every width; they do not depend on what a step costs."""
    return {width: replay(lambda _: rate, lambda grower, w=width: fill(grower, w), lambda _: None) for width in WIDTHS}  # type: ignore[misc]


def fixed_rates(rate: float, seconds: Seconds) -> dict[int, float]:
    return {width: rate_of(steps, seconds) for width, steps in fixed(rate).items()}


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8])
def test_the_replay_decides_what_the_acceptance_says(rate: float) -> None:
    """Of a chain of the first tokens as many are accepted as a coin falls on one side; the second ones add to it."""
    assert {len(steps) for steps in fixed(rate).values()} == {STEPS}
    for width, steps in fixed(rate).items():
        assert {step.width for step in steps} == {width}
        mean = statistics.mean(step.tokens for step in steps)
        chance = rate + rate * (1 - rate) / 2
        chain = (1 - rate ** max(1, width // 2)) / (1 - rate)
        assert 0.9 * chain <= mean <= 1.1 * (1 - chance**width) / (1 - chance)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("cost", COSTS)
def test_no_fixed_width_is_much_faster_than_the_adapting_one(cost: str, rate: float) -> None:
    seconds = COSTS[cost]
    rates = fixed_rates(rate, seconds)
    best = max(rates, key=rates.__getitem__)
    found = adapting(lambda _: rate, seconds)
    loss = 1 - rate_of(found, seconds) / rates[best]
    widths = [step.width for step in found]
    assert loss <= LOSS, f"{loss:.1%} of width {best}'s {rates[best]:.2f} tokens/s are lost by widths {widths[::20]}"


@pytest.mark.parametrize("cost", COSTS)
def test_the_width_follows_a_change_of_acceptance(cost: str) -> None:
    seconds = COSTS[cost]
    rates = fixed_rates(0.8, seconds)
    good = [width for width, rate in rates.items() if rate >= (1 - LOSS) * max(rates.values())]
    half = STEPS // 2
    # While nothing is accepted every step decides one token: the change comes at the half of the steps.
    widths = [step.width for step in adapting(lambda position: 0.8 if position >= half else 0.0, seconds)]
    assert statistics.median(widths[half - 50 : half]) < min(good)
    back = statistics.median(widths[half + BACK : half + BACK + 50])
    assert min(good) <= back <= max(good), f"{widths[half::10]} after the change; good are {good}"


@pytest.mark.parametrize("cost", COSTS)
def test_the_width_falls_when_nothing_is_accepted_any_more(cost: str) -> None:
    seconds = COSTS[cost]
    widths = [step.width for step in adapting(lambda position: 0.8 if position < 600 else 0.0, seconds)]
    tokens = [step.tokens for step in adapting(lambda position: 0.8 if position < 600 else 0.0, seconds)]
    change = next(i for i in range(STEPS) if sum(tokens[: i + 1]) >= 600)
    before, after = (statistics.median(part) for part in (widths[change - 20 : change], widths[-50:]))
    # Where a wider step costs the same, unneeded guesses may stay.
    assert seconds(round(after)) <= (seconds(1) + seconds(round(before))) / 2


def loss_when_disturbed(cost: str, rate: float, factor: Callable[[int], float]) -> float:
    """How much less than the best fixed width decides, were it not for what disturbs: that is nobody's fault.

    Args:
        cost: name of the undisturbed one.
        rate: of acceptance.
        factor: by which a step of some width takes longer; called once for each, in their order.
    """
    seconds = COSTS[cost]
    found = adapting(lambda _: rate, lambda nodes: factor(nodes) * seconds(nodes))
    return 1 - rate_of(found, seconds) / max(fixed_rates(rate, seconds).values())


@pytest.mark.parametrize("cost", COSTS)
def test_a_slow_step_does_not_decide_about_all_that_follow(cost: str) -> None:
    """Whichever of the first steps it is, when little else is known."""
    for slow in (0, 1, 2, 3, 5, 7, 10, 15):
        factors = iter([5.0 if i == slow else 1.0 for i in range(STEPS)])
        assert loss_when_disturbed(cost, 0.8, lambda _, at=factors: next(at)) <= 2 * LOSS, slow  # type: ignore[misc]


@pytest.mark.parametrize("rate", [0.3, 0.8])
@pytest.mark.parametrize("cost", COSTS)
def test_a_first_step_of_a_width_may_be_slow(cost: str, rate: float) -> None:
    """As it is where kernels are chosen or memory is taken at first use."""
    known: set[int] = set()

    def factor(nodes: int) -> float:
        is_first = nodes not in known
        known.add(nodes)
        return 5.0 if is_first else 1.0

    assert loss_when_disturbed(cost, rate, factor) <= 3 * LOSS


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("cost", COSTS)
def test_other_work_on_the_machine_does_not_change_the_width_much(cost: str, rate: float) -> None:
    for seed in (0, 3):
        rng = random.Random(seed)
        disturbed = loss_when_disturbed(
            cost,
            rate,
            lambda _, rng=rng: (1 + abs(rng.gauss(0, 0.1))) * (5.0 if rng.random() < 0.05 else 1.0),  # type: ignore[misc]
        )
        assert disturbed <= 2 * LOSS, seed


@pytest.mark.parametrize("cost", COSTS)
def test_a_replay_repeats_itself(cost: str) -> None:
    assert adapting(lambda _: 0.8, COSTS[cost]) == adapting(lambda _: 0.8, COSTS[cost])
