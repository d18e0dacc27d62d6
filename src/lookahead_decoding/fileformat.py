"""The one file format for what draft sources learned.

All numbers are little-endian. A file is::

    offset   bytes
    0        8      the magic bytes "LADRAFT\\n"
    8        4      uint32, version of the format: 1
    12       4      uint32, H, length of the header, 65536 at most
    16       H      header: JSON, UTF-8
    16 + H   B      arrays, one directly behind the other
    16+H+B   4      uint32, CRC-32 (zlib's) of all bytes before it, where the file ends

The header is ``{"vocabulary": {"model": string, "size": V}, "parts": [part, ...]}``; the vocabulary may be
null. A part is ``{"kind": string, "parameters": {name: integer}, "counts": {array: elements}}``. Each kind occurs
once at most; its arrays are these, in this order, after those of the parts before it:

``ngrams``, with the parameters ``ngram`` (N, at least 2) and ``guesses`` (n-grams kept per first token):
    * ``ngrams``, int32: N token ids per n-gram. Those of one first token are together, the oldest first, and
      the first tokens come in the order in which they were fed last, the oldest first.

``successors``, with the parameters ``longest`` (3) and ``buckets`` (13):
    * ``orders``, uint8: length of each context, 1 to ``longest``; the oldest context first, each once.
    * ``contexts``, int32: their token ids, one context behind the other.
    * ``rows``, int32: for each context, the index of its row. Contexts share rows.
    * ``sizes``, uint8: number of successors in each row, 64 at most.
    * ``tokens``, int32: their token ids, best first, one row behind the other.
    * ``buckets``, uint8: of their log-probabilities p, ``min(12, floor(-2 p))``; one for each of ``tokens``.

Token ids go from 0 to V - 1, or to 2^31 - 1 without a vocabulary. Whatever else there may be to say one day gets
another version; a reader refuses versions that it does not know.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from lookahead_decoding.errors import FileFormatError

NGRAMS = "ngrams"
SUCCESSORS = "successors"

_MAGIC = b"LADRAFT\n"
_VERSION = 1
_HEADER_AT = 16
_MAX_HEADER_BYTES = 2**16
_CRC_BYTES = 4
_ARRAYS = {
    NGRAMS: {"ngrams": "i"},
    SUCCESSORS: {"orders": "B", "contexts": "i", "rows": "i", "sizes": "B", "tokens": "i", "buckets": "B"},
}
_TOKEN_ARRAYS = {"ngrams", "contexts", "tokens"}


class Vocabulary(NamedTuple):
    """Whose token ids they are: a model's name, and how many there are."""

    model: str
    size: int


class Part(NamedTuple):
    """What a file holds of one kind; the module's docstring has the parameters and arrays of each."""

    kind: str
    parameters: Mapping[str, int]
    arrays: Mapping[str, array[int]]


class Contents(NamedTuple):
    """What a file holds: its parts by kind."""

    vocabulary: Vocabulary | None
    parts: Mapping[str, Part]


def write(path: str | Path, parts: Sequence[Part], vocabulary: Vocabulary | None = None) -> None:
    """Put a file in the place of ``path`` at once, readable by its owner only: it tells what was decoded.

    Raises:
        ValueError: what is to be written is nothing that could be read again.
        OSError: it cannot be written; a file that was there still is.
    """
    _check(vocabulary, parts)
    described = [
        {"kind": kind, "parameters": parameters, "counts": {name: len(arrays[name]) for name in _ARRAYS[kind]}}
        for kind, parameters, arrays in parts
    ]
    header = json.dumps({"vocabulary": vocabulary and vocabulary._asdict(), "parts": described}).encode()
    if len(header) > _MAX_HEADER_BYTES:
        raise ValueError(f"the header takes {len(header)} bytes; use a shorter name for the model")
    body = [_little_endian(arrays[name]).tobytes() for kind, _, arrays in parts for name in _ARRAYS[kind]]
    data = b"".join([_MAGIC, _uint32(_VERSION), _uint32(len(header)), header, *body])
    write_whole(path, data + _uint32(zlib.crc32(data)))


def write_whole(path: str | Path, data: bytes) -> None:
    """Put a file in place of an earlier one: all of it or nothing, readable by its owner alone."""
    target = os.path.realpath(path)
    descriptor, temporary = tempfile.mkstemp(prefix=".lookahead-", dir=os.path.dirname(target))  # its mode is 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


@contextmanager
def reading(path: str | Path, kind: str, max_bytes: int) -> Iterator[Contents]:
    """What a file holds, for a ``with`` block that takes it over; a ValueError in the block is the file's fault.

    Args:
        path: of the file.
        kind: which it must hold.
        max_bytes: bound on the memory of each kind, and so on the file: all its arrays together take less than the
            larger kind claims in memory.

    Raises:
        FileFormatError: another file, another version, a damaged one, or one that is too large.
        OSError: it cannot be read.
    """
    name = repr(os.fspath(path))
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes + _HEADER_AT + _MAX_HEADER_BYTES + _CRC_BYTES:
            raise FileFormatError(
                f"the file {name} has {size} bytes, too many for max_bytes={max_bytes}; allow more, or delete it"
            )
        data = memoryview(file.read(size))
    if data[: len(_MAGIC)] != _MAGIC:
        raise FileFormatError(f"the file {name} was not saved by lookahead-decoding; name one that was")
    version = int.from_bytes(data[len(_MAGIC) : 12], "little")
    if version > _VERSION:
        raise FileFormatError(
            f"the file {name} is of version {version} and this lookahead-decoding reads {_VERSION}; upgrade it, or "
            "delete the file"
        )
    try:
        contents = _parsed(data)
        if kind in contents.parts:
            yield contents
            return
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:  # a header may be any JSON
        raise FileFormatError(
            f"the file {name} is damaged ({error}); delete it, and what it held is learned again"
        ) from error
    raise FileFormatError(f"the file {name} holds no {kind}; name one that does")


def _parsed(data: memoryview) -> Contents:
    if data[len(_MAGIC) : 12] != _uint32(_VERSION) or data[-_CRC_BYTES:] != _uint32(zlib.crc32(data[:-_CRC_BYTES])):
        raise ValueError("its checksum differs")
    start = _HEADER_AT + int.from_bytes(data[12:_HEADER_AT], "little")
    header = json.loads(bytes(data[_HEADER_AT:start]))
    vocabulary = None if header["vocabulary"] is None else Vocabulary(**header["vocabulary"])
    parts: dict[str, Part] = {}
    for described in header["parts"]:
        kind, parameters, counts = described["kind"], described["parameters"], described["counts"]
        numbers = [*parameters.values(), *counts.values()]
        if kind in parts or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"its {kind} are described wrongly")
        arrays = {name: array(typecode) for name, typecode in _ARRAYS[kind].items()}
        for name, values in arrays.items():
            end = start + counts[name] * values.itemsize
            values.frombytes(data[start:end])
            arrays[name] = _little_endian(values)
            start = end
        parts[kind] = Part(kind, parameters, arrays)
    if start != len(data) - _CRC_BYTES:
        raise ValueError("its counts do not fit its length")
    _check(vocabulary, parts.values())
    return Contents(vocabulary, parts)


def _check(vocabulary: Vocabulary | None, parts: Iterable[Part]) -> None:
    """What holds for a file that is read and for one that is to be written."""
    size = 2**31
    if vocabulary is not None:
        model, size = vocabulary
        if type(model) is not str or type(size) is not int or size < 1:
            raise ValueError(f"a vocabulary is a name and a number of tokens, not {model!r} and {size!r}")
    for part in parts:
        for name, values in part.arrays.items():
            if name in _TOKEN_ARRAYS and values and not 0 <= min(values) <= max(values) < size:
                raise ValueError(f"the vocabulary has the token ids 0 to {size - 1}, its {part.kind} have others")


def _uint32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def _little_endian(values: array[int]) -> array[int]:
    """This machine's numbers as the file has them; and the other way round."""
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values
