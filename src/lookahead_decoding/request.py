"""A request as Transformers resolves it: every front door goes through its ``generate()`` once."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
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
from lookahead_decoding.sampling import NoiseStream, TokenDrawer


@dataclass(frozen=True)
class Request:
    """What Transformers' ``generate()`` would decode with, defaults and model settings applied.

    Attributes:
        input_ids: ``[batch, n]``.
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

    def drawer(self, vocab_size: int, generator: torch.Generator | None = None) -> TokenDrawer:
        """The request's way from logits to tokens; ``generator`` None is torch's global one."""
        config = self.generation_config
        returns_dict = bool(config.return_dict_in_generate)
        return TokenDrawer(
            self.processors,
            NoiseStream(vocab_size, generator, self.input_ids.device) if self.samples else None,
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
    streamer: Any = None,
    **generate_kwargs: Any,
) -> Request:
    """Let Transformers prepare a generation, and take it over before the first forward pass.

    Args:
        model: a Transformers causal LM.
        inputs: token ids ``[batch, n]``, or None when ``generate_kwargs`` have ``input_ids``.
        tokenizer: for ``stop_strings``.
        streamer: gets the prompt, as Transformers would give it.
        generate_kwargs: any argument of ``model.generate``.

    Raises:
        UnsupportedOptionError: an option that lookahead decoding does not do.
        ConfigError: what Transformers itself refuses.
    """
    if generate_kwargs.get("assistant_model") is not None:
        raise UnsupportedOptionError(
            "assistant_model is another way to decode faster and cannot be combined with lookahead; leave one out",
            param="assistant_model",
        )
    _refuse_cache_implementation(generate_kwargs.get("cache_implementation"))
    generate_kwargs, stop_strings = _without_stop_strings(model, generate_kwargs)
    if stop_strings and tokenizer is None:
        raise ConfigError("stop_strings need tokenizer=, to know the text that the tokens make")
    if streamer is not None:
        generate_kwargs["streamer"] = streamer

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
    _refuse_unsupported(request)
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


def _refuse_unsupported(request: Request) -> None:
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
    if (config.num_return_sequences or 1) > 1:
        raise UnsupportedOptionError(
            f"num_return_sequences={config.num_return_sequences} is not decoded; call once per sequence",
            param="num_return_sequences",
        )
    _refuse_cache_implementation(config.cache_implementation)
    _refuse_inputs(request)


def _refuse_cache_implementation(name: str | None) -> None:
    if name not in (None, "dynamic", "dynamic_full", "hybrid"):
        raise UnsupportedOptionError(
            f"cache_implementation={name!r} is not used: lookahead brings its own KV cache; leave it out",
            param="cache_implementation",
        )


# What Transformers hands to a model's forward and lookahead decoding makes itself.
_OURS = {"cache", "input_ids", "logits_to_keep", "past_key_values", "position_ids", "use_cache"}


def _refuse_inputs(request: Request) -> None:
    """Nothing that would change the result is left out without a word."""
    rows, length = request.input_ids.shape
    inputs = {name: given for name, given in request.model_kwargs.items() if given is not None}
    if rows != 1:
        raise UnsupportedOptionError(
            f"a request is one row; got a batch of {rows}: use Engine.generate with a list of prompts", param="inputs"
        )
    mask = inputs.pop("attention_mask", None)
    if mask is not None and not bool(mask.all()):
        raise UnsupportedOptionError(
            "attention_mask hides some of the tokens; leave the hidden ones out of the input", param="attention_mask"
        )
    for name in ("cache", "past_key_values"):
        if name in inputs and inputs[name].get_seq_length() > 0:
            raise UnsupportedOptionError(f"{name} is not taken over; give the whole prompt as token ids", param=name)
    positions = inputs.get("position_ids")
    if positions is not None and positions.flatten().tolist() != list(range(length)):
        raise UnsupportedOptionError("position_ids other than 0, 1, 2, ... are not taken over", param="position_ids")
    for name in inputs.keys() - _OURS:
        raise UnsupportedOptionError(
            f"{name} is not an input that lookahead decodes with; give the prompt as token ids", param=name
        )


_NOT_OF_ENGINES = {
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
