"""Token ids to text, piece by piece, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"
_MOST_PENDING = 32  # tokens; a character has at most four bytes, so more of them are no character


class IncrementalDetokenizer:
    """Text as tokens arrive: the pieces add up to decoding all tokens at once.

    A piece waits while its bytes end inside a character. Only the last few tokens are decoded again, so the
    cost per token does not grow. (Where bytes make no character at all, tokenizers disagree with themselves
    about how many replacement characters they become, and so may the pieces.)
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped = frozenset(tokenizer.all_special_ids if skip_special_tokens else ())
        self._tokens: list[int] = []
        self._num_shown = 0  # of _tokens: those whose text was returned, kept as the next one's context

    def push(self, token: int) -> str:
        """The text that became certain with ``token``; often a word piece, sometimes nothing."""
        if token in self._skipped:
            return ""
        self._tokens.append(token)
        before = self._decode(self._tokens[: self._num_shown])
        now = self._decode(self._tokens)
        num_pending = len(self._tokens) - self._num_shown
        if (now.endswith(_INCOMPLETE) or len(now) <= len(before)) and num_pending < _MOST_PENDING:
            return ""
        self._tokens = self._tokens[self._num_shown :]
        self._num_shown = len(self._tokens)
        return now[len(before) :]

    def flush(self) -> str:
        """What was held back: bytes that never became a character."""
        before = self._decode(self._tokens[: self._num_shown])
        now = self._decode(self._tokens)
        self._num_shown = len(self._tokens)
        return now[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


class TextStream:
    """One session's text, which ends before the first stop string.

    Args:
        detokenizer: a fresh one.
        stop_strings: none of them empty. Text that may be the beginning of one is held back.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, stop_strings: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stop_strings = tuple(stop_strings)
        self._longest = max(map(len, self._stop_strings), default=0)
        self._tail = ""
        self._pieces: list[str] = []
        self._held = ""

    def push(self, token: int) -> bool:
        """Add a token; whether the text now contains a stop string."""
        piece = self._detokenizer.push(token)
        self._pieces.append(piece)
        if not self._stop_strings:
            return False
        self._tail = (self._tail + piece)[-(self._longest + len(piece)) :]
        return any(stop in self._tail for stop in self._stop_strings)

    def take(self, *, last: bool) -> list[str]:
        """The text that became certain since the last call, one piece per token pushed since then.

        Args:
            last: nothing will follow, so nothing is held back but a stop string and what is behind it.
        """
        pieces, self._pieces = self._pieces, []
        if not pieces:
            return []
        pieces[0] = self._held + pieces[0]
        if last:
            pieces[-1] += self._detokenizer.flush()
        text = "".join(pieces)
        end = self._end_of_text(text) if last else len(text) - self._num_uncertain(text)
        self._held = text[end:]
        return _cut(pieces, end)

    def _end_of_text(self, text: str) -> int:
        return min((at for stop in self._stop_strings if (at := text.find(stop)) >= 0), default=len(text))

    def _num_uncertain(self, text: str) -> int:
        """How many characters at the end could be the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop_strings):
                return length
        return 0


def _cut(pieces: Sequence[str], length: int) -> list[str]:
    """The pieces' first ``length`` characters, as many pieces."""
    cut = []
    for piece in pieces:
        cut.append(piece[:length])
        length = max(0, length - len(piece))
    return cut
