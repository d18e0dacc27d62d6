"""Where generation ends: one decision per token, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList, StopStringCriteria

from lookahead_decoding.text import TextStream

EOS, STOP, CRITERION, LENGTH = "eos", "stop", "criterion", "length"
"""Why generation ended, the first that applies: an end-of-sequence token, a stop string, another stopping
criterion (time included), the length."""

ERROR = "error"
"""How a session ends when a processor, a criterion or a draft source of its own raises."""

_ORDER = (EOS, STOP, CRITERION, LENGTH)


class StopRules:
    """Asked once per token with growing ids, as plain decoding asks, for one row or for rows that decide together.

    Args:
        criteria: Transformers' own, resolved. All are called for every token, in their order.
        max_length: length that ids may reach, beside what the criteria say; None is no bound.
        text: the session's text, for its stop strings; for one row only.
        rows: R.
        padding: what plain decoding appends to a row that has ended while others go on.
    """

    def __init__(
        self,
        criteria: StoppingCriteriaList,
        *,
        max_length: int | None = None,
        text: TextStream | None = None,
        rows: int = 1,
        padding: int | None = None,
    ) -> None:
        self.criteria = criteria
        bounds = [bound for bound in (criteria.max_length, max_length) if bound is not None]
        self.max_length: int | None = min(bounds, default=None)
        self.ends: list[str | None] = [None] * rows
        # Without an end-of-sequence token plain decoding lets such a row go on.
        self._padding = padding if ends_at_eos(criteria) else None
        self._text = text

    def pad(self, tokens: Sequence[int]) -> list[int]:
        """The drawn tokens, with padding for the rows that have ended."""
        if self._padding is None:
            return list(tokens)
        return [token if end is None else self._padding for token, end in zip(tokens, self.ends, strict=True)]

    def check(
        self, ids: Tensor, tokens: Sequence[int], scores: Sequence[Tensor] | None = None
    ) -> Sequence[str | None] | None:
        """Why each row ended, once all have; None while generation goes on.

        Args:
            ids: ``[R, n]``, with the new tokens.
            tokens: those, the last of ``ids``.
            scores: what was kept of the scores so far, for criteria that look at them.
        """
        kinds: list[set[str]] = [set() for _ in self.ends]
        given = None if scores is None else tuple(scores)
        for criterion in self.criteria:
            for row, is_done in enumerate(_by_row(criterion(ids, given), len(self.ends))):
                if is_done:
                    kinds[row].add(_kind(criterion))
        if self._text is not None and self._text.push(tokens[0]):
            kinds[0].add(STOP)
        if self.max_length is not None and ids.shape[1] >= self.max_length:
            for row_kinds in kinds:
                row_kinds.add(LENGTH)
        self.ends = [
            end or next((kind for kind in _ORDER if kind in found), None)
            for end, found in zip(self.ends, kinds, strict=True)
        ]
        return None if None in self.ends else self.ends


def ends_at_eos(criteria: StoppingCriteriaList) -> bool:
    """Whether an end-of-sequence token ends a row: by Transformers' own rule."""
    return any(hasattr(criterion, "eos_token_id") for criterion in criteria)


def _by_row(answer: Any, rows: int) -> list[bool]:
    """A criterion's answer for each row; one for all, where it gives but one."""
    answers = torch.as_tensor(answer, dtype=torch.bool).flatten().tolist()
    return answers * rows if len(answers) == 1 else answers


def _kind(criterion: object) -> str:
    if isinstance(criterion, EosTokenCriteria):
        return EOS
    if isinstance(criterion, StopStringCriteria):
        return STOP
    return LENGTH if isinstance(criterion, MaxLengthCriteria) else CRITERION
