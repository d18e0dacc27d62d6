"""Where generation ends: one decision per token, in one place."""

from __future__ import annotations

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
    """Asked once per token with growing ids, as plain decoding asks.

    Args:
        criteria: Transformers' own, resolved. All are called for every token, in their order.
        max_length: length that ids may reach, beside what the criteria say; None is no bound.
        text: the session's text, for its stop strings.
    """

    def __init__(
        self, criteria: StoppingCriteriaList, *, max_length: int | None = None, text: TextStream | None = None
    ) -> None:
        self.criteria = criteria
        bounds = [bound for bound in (criteria.max_length, max_length) if bound is not None]
        self.max_length: int | None = min(bounds, default=None)
        self._text = text

    def check(self, ids: Tensor, token: int) -> str | None:
        """Why generation ends with ``token``, the last of ``ids`` ``[1, n]``; None when it goes on."""
        ends = {_kind(criterion) for criterion in self.criteria if bool(criterion(ids, None).all())}
        if self._text is not None and self._text.push(token):
            ends.add(STOP)
        if self.max_length is not None and ids.shape[1] >= self.max_length:
            ends.add(LENGTH)
        return next((kind for kind in _ORDER if kind in ends), None)


def _kind(criterion: object) -> str:
    if isinstance(criterion, EosTokenCriteria):
        return EOS
    if isinstance(criterion, StopStringCriteria):
        return STOP
    return LENGTH if isinstance(criterion, MaxLengthCriteria) else CRITERION
