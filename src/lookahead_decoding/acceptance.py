"""What a guess is worth: the chance that the model's next token is this one, learned from every step.

At a node of the tree each source names tokens with a *kind* of evidence: "followed the last five tokens before",
"second successor at half a nat". A token's log-odds are the sum of the weights of its kinds, and a softmax over the
node's tokens and "none of them" makes chances of them: a multinomial logistic regression whose weights start from
the sources' own and move with every token the model draws. A guess is judged whether it was computed or not, so
what was learned to be useless is found out to be useful again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

NONE_OF_THEM = 3.0
"""Log-odds of a token that nobody named, on the scale of the sources' weights."""

# Sampling draws the token with the largest log p - log q, and q is known. The less certain log p is, the less q
# says; fitted on sampled text at temperature 1.
_NOISE_WEIGHT = 0.65
_NONE_PER_TEMPERATURE = 1.3

SUREST = 0.96
"""No guess is surer than this: a text may always turn, and small errors multiply along a path."""

_HIGHEST_TEMPERATURE = 10.0
"""Beyond it the noise alone decides, whatever the weights."""

_MAX_DEPTH = 8
_LEARNING_RATE = 0.3
_LEAST_LEARNING_RATE = 0.03
_RETURN_RATE = 0.002


class _Weight:
    """A number that is learned: fast at first, and slower with the errors it has seen (Duchi et al. 2011, AdaGrad)."""

    __slots__ = ("_prior", "_squares", "value")

    def __init__(self, prior: float) -> None:
        self.value = self._prior = prior
        self._squares = 1.0

    def learn(self, error: float) -> None:
        self._squares += error * error
        rate = max(_LEARNING_RATE / math.sqrt(self._squares), _LEAST_LEARNING_RATE)
        self.value += rate * error - _RETURN_RATE * abs(error) * (self.value - self._prior)


@dataclass(frozen=True)
class Candidates:
    """The guesses at one node.

    Attributes:
        evidence: ``(source, [(token, kind), ...])`` of each source that has any.
        chances: of each named token, given that the node is accepted.
        depth: of the guesses below the last accepted token, from 1.
    """

    evidence: Sequence[tuple[str, Sequence[tuple[int, int]]]]
    chances: Mapping[int, float] = field(default_factory=dict)
    depth: int = 1

    def sources(self, token: int) -> list[str]:
        """Who named a token."""
        return [name for name, guesses in self.evidence if any(guess == token for guess, _ in guesses)]


class AcceptanceModel:
    """Chances of guesses, from weights per source and kind.

    Args:
        priors: weights by source, indexed by kind: where each starts and slowly returns to.
        temperature: of sampling; 0 is greedy decoding.
    """

    def __init__(self, priors: Mapping[str, Sequence[float]], temperature: float = 0.0) -> None:
        temperature = min(temperature, _HIGHEST_TEMPERATURE)
        self._noise_weight = _NOISE_WEIGHT * temperature
        self._weights = {name: [_Weight(each) for each in prior] for name, prior in priors.items()}
        none = NONE_OF_THEM + _NONE_PER_TEMPERATURE * temperature
        self._none = [_Weight(none) for _ in range(_MAX_DEPTH + 1)]

    def judge(
        self,
        evidence: Sequence[tuple[str, Sequence[tuple[int, int]]]],
        depth: int,
        gumbel: Callable[[int, Sequence[int]], Sequence[float]] | None = None,
    ) -> Candidates:
        """The chances of all tokens named at a node.

        Args:
            evidence: ``(source, [(token, kind), ...])`` of each source that has any.
            depth: of these tokens below the last accepted one, from 1.
            gumbel: when sampling, the noise at a depth for some tokens, if it is known.
        """
        odds: dict[int, float] = {}
        for name, guesses in evidence:
            weights = self._weights[name]
            for token, kind in guesses:
                odds[token] = odds.get(token, 0.0) + weights[kind].value
        if gumbel is not None:
            for token, value in zip(odds, gumbel(depth, list(odds)), strict=True):
                odds[token] += self._noise_weight * value
        exp, none = math.exp, self._none[min(depth, _MAX_DEPTH)].value
        largest = max(none, *odds.values()) if odds else none
        total = exp(none - largest)
        for token, value in odds.items():
            odds[token] = value = exp(value - largest)
            total += value
        scale = SUREST / total
        return Candidates(evidence, {token: scale * value for token, value in odds.items()}, depth)

    def learn(self, candidates: Candidates, drawn: int) -> None:
        """The model's token at the candidates' node was ``drawn``: one gradient step on its log-likelihood."""
        chances = candidates.chances
        for name, guesses in candidates.evidence:
            weights = self._weights[name]
            for token, kind in guesses:
                weights[kind].learn((token == drawn) - chances[token])
        depth = min(candidates.depth, _MAX_DEPTH)
        self._none[depth].learn((drawn not in chances) - (1.0 - sum(chances.values())))
