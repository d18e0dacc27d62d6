"""Prompts as users give them, to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lookahead_decoding.errors import ConfigError

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text as it is, token ids, or a chat's messages, which get the tokenizer's chat template."""


def as_batch(prompts: Prompt | Sequence[Prompt] | Tensor) -> tuple[Sequence[Prompt], bool]:
    """The prompts as a list, and whether it was a single one."""
    if isinstance(prompts, Mapping):
        raise ConfigError(
            f"a prompt is text, messages or token ids; got a {type(prompts).__name__}: give its input_ids"
        )
    if isinstance(prompts, Tensor):
        prompts = prompts.tolist()
    if len(prompts) == 0 or isinstance(prompts, str) or isinstance(prompts[0], int | Mapping):
        return [prompts], True  # type: ignore[list-item]
    return prompts, False  # type: ignore[return-value]


def encode(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> list[int]:
    """A prompt's token ids, at least one.

    Raises:
        ConfigError: it is empty, cannot be encoded, or holds ids that the model does not have.
    """
    if isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping)):
        if tokenizer is None:
            raise ConfigError("this engine has no tokenizer, so a prompt is a list of token ids")
        if isinstance(prompt, str):
            ids = list(tokenizer(prompt)["input_ids"])
        elif tokenizer.chat_template is None:
            raise ConfigError("the tokenizer has no chat template; give the prompt as text (--raw)")
        else:
            ids = _apply_chat_template(tokenizer, prompt)
    else:
        ids = list(prompt)
    if not ids:
        raise ConfigError("the prompt is empty; give at least one token")
    return _checked(ids, vocab_size)


def _checked(ids: list[int], vocab_size: int) -> list[int]:
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ConfigError(f"a token id is a whole number below {vocab_size}; got {token!r}")
    return ids


def encode_reference(
    reference: str | Sequence[int], tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> list[int]:
    """Token ids of text that is expected inside an answer: no template, no special tokens.

    Raises:
        ConfigError: it is text and there is no tokenizer, or it has token ids that the model does not.
    """
    if not isinstance(reference, str):
        try:
            ids = list(reference)
        except TypeError:
            raise ConfigError(f"a reference is text or a list of token ids; got {reference!r}") from None
        return _checked(ids, vocab_size)
    if tokenizer is None:
        raise ConfigError("without a tokenizer a reference is a list of token ids")
    return list(tokenizer(reference, add_special_tokens=False)["input_ids"])


def _apply_chat_template(tokenizer: PreTrainedTokenizerBase, messages: Any) -> list[int]:
    try:
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"the chat template does not take these messages: {error}") from error
    return list(encoded["input_ids"])
