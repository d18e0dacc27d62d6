"""Lookahead decoding as the ``generate`` of one model object, for pipelines and harnesses that call it themselves."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from lookahead_decoding.config import LookaheadConfig, as_config
from lookahead_decoding.engine import Engine
from lookahead_decoding.generation import decode, engine_for, evaluating
from lookahead_decoding.statistics import DecodingStatistics
from lookahead_decoding.view import Snapshot, unwrapped


class Enabled:
    """Lookahead decoding as the ``generate`` of one model object, from :func:`enable`.

    As a context manager it ends with the block.

    Attributes:
        model: the model.
        statistics: of all calls so far, all rows together.
        calls: how many calls lookahead decoded.
    """

    def __init__(self, model: PreTrainedModel, options: Mapping[str, Any], pack_weights: bool | None) -> None:
        self.model = model
        self.statistics = DecodingStatistics()
        self.calls = 0
        self._options = dict(options)
        self._pack_weights = pack_weights
        self._before = vars(model).get("generate")
        self._engine: tuple[Snapshot, Engine] | None = None

    def __call__(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> Tensor | GenerateDecoderOnlyOutput:
        """``model.generate``: what :func:`generate` returns; ``model`` is another one for a copy of the model."""
        steps = self.statistics.steps
        options = {"statistics": self.statistics, **self._options, **kwargs}
        output = decode(functools.partial(self.engine, model), model, *args, **options)
        self.calls += self.statistics.steps > steps
        return output

    def engine(self, model: PreTrainedModel) -> Engine:
        """The engine of the call before, unless the model has changed since."""
        if self._engine is None or not self._engine[0].is_current(model):
            # The old one's packed weights make room first.
            self._engine = None
            self._engine = Snapshot(model), engine_for(model, pack_weights=self._pack_weights)
        return self._engine[1]

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()

    def disable(self) -> None:
        """Put back what ``model.generate`` was, whatever was enabled since, and give up the engine's memory."""
        self._engine = None
        outer: Enabled | None = None
        current = vars(self.model).get("generate")
        while (enabled := _enabled(current)) is not None:
            if enabled is not self:
                outer, current = enabled, enabled._before
            elif outer is not None:
                outer._before = self._before
                return
            elif self._before is None:
                del self.model.generate
                return
            else:
                self.model.generate = self._before
                return


def _enabled(generate: Any) -> Enabled | None:
    """Whose it is, if ours."""
    owner = getattr(generate, "__func__", None)
    return owner if isinstance(owner, Enabled) else None


def enable(
    model: PreTrainedModel,
    lookahead: str | Mapping[str, Any] | LookaheadConfig = "default",
    *,
    references: Sequence[Sequence[int]] = (),
    on_unsupported: str = "raise",
    pack_weights: bool | None = None,
) -> Enabled:
    """Make ``model.generate`` decode with lookahead, for this model object only; its class is not touched.

    As a statement it holds until :func:`disable`; as ``with enable(model): ...`` until the block ends. Nested, the
    innermost counts.

    Args:
        model: a Transformers causal LM.
        lookahead, references, on_unsupported: as in :func:`generate`; a call may give its own.
        pack_weights: as in :class:`Engine`.

    Raises:
        UnsupportedModelError: the model cannot be decoded with lookahead (unless ``on_unsupported="plain"``).
    """
    as_config(lookahead)
    model = unwrapped(model)
    options = {"lookahead": lookahead, "references": references, "on_unsupported": on_unsupported}
    enabled = Enabled(model, options, pack_weights)
    if on_unsupported != "plain":
        with evaluating(model):
            enabled.engine(model)
    model.generate = types.MethodType(enabled, model)
    return enabled


def disable(model: PreTrainedModel) -> None:
    """Undo every :func:`enable` of a model; without one, nothing happens."""
    while (enabled := _enabled(vars(unwrapped(model)).get("generate"))) is not None:
        enabled.disable()
