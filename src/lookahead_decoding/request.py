"""A request as Transformers resolves it: every front door goes through its ``generate()`` once."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerationMode

from lookahead_decoding.errors import ConfigError, UnsupportedOptionError
from lookahead_decoding.sampling import NoiseStream, RowNoise, TokenDrawer


@dataclass(frozen=True)
class Request:
    """What Transformers' ``generate()`` would decode with, defaults and model settings applied.

    Attributes:
        input_ids: ``[batch, n]``, what processors and criteria see first; n may be 0 beside embeddings.
        processors: its logits processors and warpers, in its order.
        criteria: its stopping criteria.
        generation_config: the resolved options.
        model_kwargs: what it would hand to the model.
    """

    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]

    @property
    def samples(self) -> bool:
        return bool(self.generation_config.do_sample)

    @property
    def rows(self) -> int:
        """How many texts are decoded."""
        return int(self.input_ids.shape[0])

    @property
    def embeddings(self) -> Tensor | None:
        """``[batch, m, hidden]`` that stand in for the prompt's tokens."""
        return self.model_kwargs.get("inputs_embeds")

    @property
    def cache_name(self) -> str:
        """What the cache is called in this version of Transformers."""
        return next((name for name in _CACHES if name in self.model_kwargs), _CACHES[0])

    @property
    def cache(self) -> Cache | None:
        """The cache that plain decoding would fill."""
        return self.model_kwargs.get(self.cache_name)

    @property
    def cached_tokens(self) -> int:
        """How many tokens the cache holds already."""
        return 0 if self.cache is None else int(self.cache.get_seq_length())

    @property
    def returns_cache(self) -> bool:
        """Whether anybody sees the cache afterwards: it is returned, or the caller's own."""
        own = self.cached_tokens > 0 or getattr(self.cache, "_is_user_defined", False)
        return bool(self.generation_config.return_dict_in_generate or own)

    @property
    def padding(self) -> int | None:
        """The token that rows which have ended are filled up with."""
        token = getattr(self.generation_config, "_pad_token_tensor", None)
        return None if token is None else int(token)

    @property
    def length(self) -> int:
        """Positions of the prompt, cached and padding ones included."""
        mask = self.model_kwargs.get("attention_mask")
        if mask is not None:
            return int(mask.shape[1])
        if self.embeddings is not None:
            return int(self.embeddings.shape[1])
        # Where the mask hides nothing, Transformers drops it and notes its width.
        noted = getattr(self.generation_config, "_mask_length", None) if self.cached_tokens else None
        return int(self.input_ids.shape[1] if noted is None else noted)

    @property
    def visible(self) -> list[list[int]]:
        """Per row, those of the prompt's positions that hold a token the model sees, ascending."""
        mask = self.model_kwargs.get("attention_mask")
        if mask is None:
            return [list(range(self.length))] * self.rows
        return [row.nonzero().flatten().tolist() for row in mask.bool()]

    def drawer(
        self,
        vocab_size: int,
        generator: torch.Generator | None = None,
        *,
        noise: NoiseStream | RowNoise | None = None,
        rows: int = 1,
    ) -> TokenDrawer:
        """The request's way from logits to tokens.

        Args:
            vocab_size: V.
            generator: the sampling noise's; None is torch's global one.
            noise: to be used in place of a stream of its own.
            rows: how many it decides together.
        """
        config = self.generation_config
        returns_dict = bool(config.return_dict_in_generate)
        if self.samples and noise is None:
            noise = NoiseStream(vocab_size, generator, self.input_ids.device)
        return TokenDrawer(
            self.processors,
            noise if self.samples else None,
            rows=rows,
            keep_scores=returns_dict and bool(config.output_scores),
            keep_logits=returns_dict and bool(config.output_logits),
            temperature=1.0 if config.temperature is None else config.temperature,
            draws_ahead=all(map(_is_of_transformers, [*self.processors, *self.criteria])),
        )

    def sampling(self, seed: int | None = None) -> dict[str, Any]:
        """The resolved sampling options, JSON-ready."""
        config = self.generation_config
        penalty = config.repetition_penalty
        options: dict[str, Any] = {
            "do_sample": self.samples,
            "repetition_penalty": 1.0 if penalty is None else penalty,
        }
        if self.samples:
            options |= {name: getattr(config, name) for name in ("temperature", "top_k", "top_p", "min_p")}
            options["seed"] = seed
        return options


def _is_of_transformers(part: object) -> bool:
    """Whether a processor or criterion is known not to draw random numbers of its own."""
    return type(part).__module__.startswith("transformers.")


def resolve(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **generate_kwargs: Any,
) -> Request:
    """Let Transformers prepare a generation, and take it over before the first forward pass.

    Args:
        model: a Transformers causal LM.
        inputs: token ids ``[batch, n]``, or None when ``generate_kwargs`` have ``input_ids``.
        tokenizer: for ``stop_strings``.
        generate_kwargs: any argument of ``model.generate`` but ``streamer``.

    Raises:
        UnsupportedOptionError: an option that lookahead decoding does not do.
        ConfigError: what Transformers itself refuses.
    """
    if generate_kwargs.get("assistant_model") is not None:
        raise UnsupportedOptionError(
            "assistant_model is another way to decode faster and cannot be combined with lookahead; leave one out",
            param="assistant_model",
        )
    if generate_kwargs.get("synced_gpus"):
        raise UnsupportedOptionError(
            "synced_gpus is for a model that is split over processes, which lookahead does not decode; leave it out",
            param="synced_gpus",
        )
    _refuse_cache_implementation(generate_kwargs.get("cache_implementation"))
    generate_kwargs, stop_strings = _without_stop_strings(model, generate_kwargs)
    if stop_strings and tokenizer is None:
        raise ConfigError("stop_strings need tokenizer=, to know the text that the tokens make")

    def take_over(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Request:
        if stop_strings:
            stopping_criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
        return Request(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)

    try:
        request = GenerationMixin.generate(model, inputs, custom_generate=take_over, **generate_kwargs)
    except (ValueError, TypeError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    assert isinstance(request, Request)
    check(request)
    return request


def _without_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Take the stop strings out: Transformers loses the tokenizer on the way to a custom decoding method."""
    kwargs = dict(kwargs)
    strings = kwargs.pop("stop_strings", None)
    config = kwargs.get("generation_config")
    if config is not None and config.stop_strings is not None:
        strings = config.stop_strings if strings is None else strings
        kwargs["generation_config"] = copy.deepcopy(config)
        kwargs["generation_config"].stop_strings = None
    elif strings is None and model.generation_config is not None and model.generation_config.stop_strings is not None:
        raise UnsupportedOptionError(
            "the model's generation_config has stop_strings; pass them as stop_strings= and set those to None",
            param="stop_strings",
        )
    return kwargs, [strings] if isinstance(strings, str) else list(strings or ())


_DECODED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def check(request: Request) -> None:
    """Refuse what lookahead decoding does not do.

    Raises:
        UnsupportedOptionError: with what to do instead.
    """
    config = request.generation_config
    mode = config.get_generation_mode()
    if mode not in _DECODED_MODES:
        raise UnsupportedOptionError(
            f"{mode.value.replace('_', ' ')} is not what lookahead decodes; it does greedy search and sampling "
            "(num_beams=1, no penalty_alpha, no prompt_lookup_num_tokens)",
            param={"beam_search": "num_beams", "beam_sample": "num_beams"}.get(mode.value, mode.value),
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise UnsupportedOptionError(
                f"{name} is not kept: a step computes many tokens that are dropped; run a forward pass on the "
                "finished text instead",
                param=name,
            )
    if config.guidance_scale is not None and config.guidance_scale != 1:
        raise UnsupportedOptionError(
            "guidance_scale runs the model inside a logits processor, once per token; use model.generate() for it",
            param="guidance_scale",
        )
    if config.use_cache is False:
        raise UnsupportedOptionError("lookahead decodes on a KV cache; leave use_cache on", param="use_cache")
    _refuse_cache_implementation(config.cache_implementation)
    _refuse_inputs(request)


def _refuse_cache_implementation(name: str | None) -> None:
    if name not in (None, "dynamic", "dynamic_full", "hybrid"):
        raise UnsupportedOptionError(
            f"cache_implementation={name!r} is not used: lookahead brings its own KV cache; leave it out",
            param="cache_implementation",
        )


_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}
_CACHES = ("cache", "past_key_values")

# What Transformers hands to a model's forward and lookahead decoding takes, or makes itself.
_TAKEN = {*_CACHES, "attention_mask", "inputs_embeds", "input_ids", "logits_to_keep", "position_ids", "use_cache"}


def _refuse_inputs(request: Request) -> None:
    """Nothing that would change the result is left out without a word."""
    inputs = {name: given for name, given in request.model_kwargs.items() if given is not None}
    for name in inputs.keys() - _TAKEN:
        raise UnsupportedOptionError(
            f"{name} is not an input that lookahead decodes with; give the prompt as token ids", param=name
        )
    visible, length, cached = request.visible, request.length, request.cached_tokens
    new = request.input_ids.shape[1] if request.embeddings is None else request.embeddings.shape[1]
    if new not in (length, length - cached) or (request.embeddings is not None and new != length):
        raise UnsupportedOptionError(
            f"attention_mask is {length} wide, and there are {new} tokens and {cached} cached ones; give one entry per "
            "token, or per cached and new token",
            param="attention_mask",
        )
    if cached >= length:
        raise UnsupportedOptionError(
            f"the cache holds {cached} tokens and the prompt has {length}; give at least one token more",
            param="cache",
        )
    if any(length - 1 not in row for row in visible):
        raise UnsupportedOptionError(
            "attention_mask hides the last token of a row, which the next one follows; pad on the left",
            param="attention_mask",
        )
    if request.returns_cache:
        _refuse_other_caches(request.cache)
    _refuse_positions(inputs.get("position_ids"), visible, length)


def _refuse_other_caches(cache: Cache | None) -> None:
    """A cache that is taken over or filled has to grow as plain decoding makes it grow."""
    kinds = {type(layer).__name__ for layer in getattr(cache, "layers", ())}
    if getattr(cache, "offloading", False) or kinds - _LAYERS:
        raise UnsupportedOptionError(
            f"a {type(cache).__name__} of this kind is neither taken over nor filled; use a DynamicCache", param="cache"
        )


def _refuse_positions(positions: Tensor | None, visible: list[list[int]], length: int) -> None:
    """Positions count the visible tokens; nothing else is decoded with."""
    if positions is None:
        return
    given = positions.reshape(-1, *positions.shape[-2:])  # some models have one set per kind of input
    first = length - given.shape[-1]
    for row, slots in enumerate(visible):
        tail = [(rank, slot - first) for rank, slot in enumerate(slots) if slot >= first]
        index = torch.tensor([slot for _, slot in tail], device=given.device)
        of_row = given[:, row if given.shape[1] > 1 else 0, index]
        if (of_row != torch.tensor([rank for rank, _ in tail], device=given.device)).any():
            raise UnsupportedOptionError(
                "position_ids other than the visible tokens' 0, 1, 2, ... are not taken over", param="position_ids"
            )


_NOT_OF_ENGINES = {
    **dict.fromkeys(
        ("attention_mask", "cache", "input_ids", "inputs", "inputs_embeds", "past_key_values", "position_ids"),
        "here the prompt is text, messages or token ids",
    ),
    "max_length": "here the length is max_new_tokens",
    "num_return_sequences": "here give a list of prompts",
    "output_logits": "completions do not keep logits",
    "output_scores": "completions do not keep scores",
    "return_dict_in_generate": "here a Completion is returned",
    "stop_strings": "here they are called stop",
    "streamer": "here use stream()",
}


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's options as arguments for :func:`resolve`.

    An option that only sampling has turns it on, temperature 0 turns it off.

    Raises:
        UnsupportedOptionError: an option that only the other front door has.
        ConfigError: a probability that is none; Transformers would leave its warper out without a word.
    """
    for name in _NOT_OF_ENGINES.keys() & options.keys():
        raise UnsupportedOptionError(f"{name} is for lookahead_decoding.generate; {_NOT_OF_ENGINES[name]}", param=name)
    given = {name: value for name, value in options.items() if value is not None}
    for name in ("top_p", "min_p"):
        if name in given and not 0 <= given[name] <= 1:
            raise ConfigError(f"{name} is a probability, from 0 to 1; got {given[name]}")
    if given.get("temperature") == 0:
        del given["temperature"]
        given["do_sample"] = False
    elif given.keys() & {"temperature", "top_k", "top_p", "min_p"}:
        given.setdefault("do_sample", True)
    return given
