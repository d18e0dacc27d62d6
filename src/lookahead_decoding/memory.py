"""What a model's draft sources learned, kept from one process to the next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lookahead_decoding.errors import FileFormatError
from lookahead_decoding.fileformat import NGRAMS, SUCCESSORS, Vocabulary, reading, write
from lookahead_decoding.pool import DEFAULT_MAX_BYTES, NgramPool
from lookahead_decoding.recycle import SuccessorTable


@dataclass
class DraftMemory:
    """A successor table and, maybe, an n-gram pool of one vocabulary.

    Attributes:
        model: name of the model that they are of.
        vocab_size: V; token ids are below it.
    """

    model: str
    vocab_size: int
    successors: SuccessorTable
    ngrams: NgramPool | None = None

    @classmethod
    def empty(cls, model: str, vocab_size: int, max_bytes: int = DEFAULT_MAX_BYTES) -> DraftMemory:
        """A memory that knows nothing yet and will hold ``max_bytes`` of each kind at most."""
        return cls(model, vocab_size, SuccessorTable(max_bytes))

    def merge(self, other: DraftMemory) -> None:
        """Take over what ``other`` knows, as the newest; a ValueError, and nothing, if they do not go together."""
        if other.vocab_size != self.vocab_size:
            raise ValueError(
                f"a memory of {other.model!r} with {other.vocab_size} tokens does not go with one of {self.model!r} "
                f"with {self.vocab_size}"
            )
        if other.ngrams is not None:
            if self.ngrams is None:
                self.ngrams = NgramPool(other.ngrams.ngram, other.ngrams.guesses, self.successors.max_bytes)
            self.ngrams.merge(other.ngrams)
        self.successors.merge(other.successors)

    def save(self, path: str | Path) -> None:
        """Write a file for :meth:`load`; see :func:`lookahead_decoding.fileformat.write`."""
        parts = [self.successors.to_part()]
        if self.ngrams is not None:
            parts.append(self.ngrams.to_part())
        write(path, parts, Vocabulary(self.model, self.vocab_size))

    @classmethod
    def load(
        cls, path: str | Path, *, vocab_size: int | None = None, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> DraftMemory:
        """The memory in a file.

        Args:
            path: of the file.
            vocab_size: of the model that it is to serve; None takes any.
            max_bytes: bound on the memory of the table and on that of the pool; the most recent is kept.

        Raises:
            FileFormatError: it is for another vocabulary, or see :func:`lookahead_decoding.fileformat.reading`.
        """
        with reading(path, SUCCESSORS, max_bytes) as (vocabulary, parts):
            if vocabulary is None:
                raise FileFormatError(f"the file {str(path)!r} does not say which model it is for; name one that does")
            if vocab_size not in (None, vocabulary.size):
                raise FileFormatError(
                    f"the file {str(path)!r} is for {vocabulary.model!r}, whose vocabulary has {vocabulary.size} "
                    f"tokens, and this model's has {vocab_size}; name a file that was saved for this one"
                )
            ngrams = NgramPool.from_part(parts[NGRAMS], max_bytes) if NGRAMS in parts else None
            successors = SuccessorTable.from_part(parts[SUCCESSORS], max_bytes)
        return cls(*vocabulary, successors, ngrams)
