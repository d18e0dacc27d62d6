"""What draft sources learned: its files against a reader and a writer made from the format's description, its merges
and bases against lists."""

from __future__ import annotations

import gc
import json
import os
import random
import struct
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lookahead_decoding.errors import FileFormatError
from lookahead_decoding.fileformat import write
from lookahead_decoding.memory import DraftMemory
from lookahead_decoding.pool import NgramPool
from lookahead_decoding.recycle import Successors, SuccessorTable

AMPLE = 2**20
NGRAM_PUTS = st.lists(st.tuples(st.integers(0, 4), st.tuples(st.integers(0, 2), st.integers(0, 2))), max_size=40)
ROW_PUTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=4), st.lists(st.integers(0, 9), max_size=3)), max_size=30
)
CONTEXTS = [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]
FILES = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])

NgramPuts = Sequence[tuple[int, tuple[int, int]]]
RowPuts = Sequence[tuple[list[int], list[int]]]


def pool_of(puts: NgramPuts, guesses: int = 3, max_bytes: int = AMPLE, base: NgramPool | None = None) -> NgramPool:
    pool = NgramPool(3, guesses, max_bytes, base=base)
    for key, continuation in puts:
        pool.put(key, continuation)
    return pool


def row(*tokens: int) -> Successors:
    return Successors.of(tokens, [-token / 2 for token in tokens])


def table_of(puts: RowPuts, max_bytes: int = AMPLE, base: SuccessorTable | None = None) -> SuccessorTable:
    table = SuccessorTable(max_bytes, base=base)
    for context, tokens in puts:
        table.put(context, row(*tokens))
    return table


def ngrams_in(pool: NgramPool) -> list[list[tuple[int, ...]]]:
    return [list(pool.get(key)) for key in range(10)]


def rows_in(table: SuccessorTable) -> list[list[tuple[int, Successors]]]:
    return [list(table.get(context)) for context in CONTEXTS]


def small_memory() -> DraftMemory:
    return DraftMemory("a model", 10, table_of([([1, 2, 0], [3, 9]), ([2], [4])]), pool_of([(1, (2, 3)), (4, (5, 6))]))


# The format, told from its description.


def assembled(header: bytes, body: bytes, version: int = 1, magic: bytes = b"LADRAFT\n") -> bytes:
    data = magic + struct.pack("<II", version, len(header)) + header + body
    return data + struct.pack("<I", zlib.crc32(data))


SUCCESSOR_ARRAYS = {"orders": "B", "contexts": "i", "rows": "i", "sizes": "B", "tokens": "i", "buckets": "B"}


def packed(part: dict[str, Any], arrays: dict[str, list[int]]) -> tuple[dict[str, Any], bytes]:
    """A part's description, and its arrays."""
    codes = {"ngrams": "i"} if part["kind"] == "ngrams" else SUCCESSOR_ARRAYS
    body = b"".join(struct.pack(f"<{len(arrays[name])}{code}", *arrays[name]) for name, code in codes.items())
    return {**part, "counts": {name: len(values) for name, values in arrays.items()}}, body


def successors_file(vocabulary: Any = None, parameters: Any = None, **arrays: list[int]) -> bytes:
    """The file of a table that was told of (7, 8) behind (1, 2), but for what is given."""
    part = {"kind": "successors", "parameters": parameters or {"longest": 3, "buckets": 13}}
    told = {"orders": [2, 1], "contexts": [1, 2, 2], "rows": [0, 0], "sizes": [2], "tokens": [7, 8], "buckets": [0, 12]}
    described, body = packed(part, {**told, **arrays})
    return assembled(json.dumps({"vocabulary": vocabulary, "parts": [described]}).encode(), body)


def ngrams_file(ngrams: list[int], vocabulary: Any = None, **parameters: Any) -> bytes:
    part = {"kind": "ngrams", "parameters": {"ngram": 3, "guesses": 2, **parameters}}
    described, body = packed(part, {"ngrams": ngrams})
    return assembled(json.dumps({"vocabulary": vocabulary, "parts": [described]}).encode(), body)


def test_a_file_is_what_the_description_says(tmp_path: Path) -> None:
    table = SuccessorTable(AMPLE)
    table.put([9, 1, 2], Successors.of([7, 8], [-0.1, -0.8]))
    table.put([2], Successors.of([5], [-99.0]))
    pool = pool_of([(1, (2, 3)), (4, (5, 6)), (1, (7, 8)), (1, (2, 3))], guesses=5)
    DraftMemory("org/naïve", 10, table, pool).save(tmp_path / "memory")
    ngrams, ngrams_body = packed(
        {"kind": "ngrams", "parameters": {"ngram": 3, "guesses": 5}}, {"ngrams": [4, 5, 6, 1, 7, 8, 1, 2, 3]}
    )
    successors, successors_body = packed(
        {"kind": "successors", "parameters": {"longest": 3, "buckets": 13}},
        {
            "orders": [3, 2, 1],
            "contexts": [9, 1, 2, 1, 2, 2],
            "rows": [0, 0, 1],
            "sizes": [2, 1],
            "tokens": [7, 8, 5],
            "buckets": [0, 1, 12],
        },
    )
    data = (tmp_path / "memory").read_bytes()
    magic, version, length = struct.unpack_from("<8sII", data)
    header = json.loads(data[16 : 16 + length])
    assert (magic, version) == (b"LADRAFT\n", 1)
    assert header == {"vocabulary": {"model": "org/naïve", "size": 10}, "parts": [successors, ngrams]}
    assert data[16 + length : -4] == successors_body + ngrams_body
    assert struct.unpack("<I", data[-4:]) == (zlib.crc32(data[:-4]),)


def test_what_another_program_wrote_is_read(tmp_path: Path) -> None:
    (tmp_path / "table").write_bytes(successors_file())
    table = SuccessorTable.load(tmp_path / "table", AMPLE)
    assert list(table.get([1, 2])) == [(2, Successors.of([7, 8], [0.0, -9.0]))]
    assert list(table.get([2])) == [(1, Successors.of([7, 8], [0.0, -9.0]))]
    (tmp_path / "pool").write_bytes(ngrams_file([1, 2, 3, 1, 4, 5, 6, 7, 8]))
    pool = NgramPool.load(tmp_path / "pool")
    assert (pool.ngram, pool.guesses, len(pool)) == (3, 2, 3)
    assert list(pool.get(1)) == [(4, 5), (2, 3)]


@pytest.mark.parametrize("others_order", ["big", "little"])
def test_a_machine_of_the_other_byte_order_turns_every_number(
    others_order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, path = pool_of([(1, (2, 3))]), tmp_path / "pool"
    pool.save(path)
    here = path.read_bytes()
    monkeypatch.setattr(sys, "byteorder", others_order)
    pool.save(path)
    assert (path.read_bytes() == here) == (others_order == "little")
    assert struct.pack(f"{'>' if others_order == 'big' else '<'}3i", 1, 2, 3) in path.read_bytes()
    assert ngrams_in(NgramPool.load(path)) == ngrams_in(pool)
    part = pool.to_part()
    write(path, [part])
    assert part == pool.to_part()


# Round trips.


@FILES
@given(
    before=NGRAM_PUTS, after=NGRAM_PUTS, guesses=st.integers(0, 4), max_bytes=st.sampled_from([0, 4096, 9000, AMPLE])
)
def test_a_loaded_pool_proposes_and_forgets_as_the_saved_one(
    before: NgramPuts, after: NgramPuts, guesses: int, max_bytes: int, tmp_path: Path
) -> None:
    saved = pool_of(before, guesses, max_bytes)
    saved.save(tmp_path / "pool")
    loaded = NgramPool.load(tmp_path / "pool", max_bytes)
    assert (loaded.ngram, loaded.guesses, loaded.max_bytes) == (3, guesses, max_bytes)
    for key, continuation in [*after, (9, (9, 9))]:
        assert ngrams_in(loaded) == ngrams_in(saved)
        assert (loaded.nbytes, len(loaded)) == (saved.nbytes, len(saved))
        saved.put(key, continuation)
        loaded.put(key, continuation)
    assert ngrams_in(loaded) == ngrams_in(saved)


@FILES
@given(before=ROW_PUTS, after=ROW_PUTS, max_bytes=st.sampled_from([0, 1500, 3000, AMPLE]))
def test_a_loaded_table_names_and_forgets_as_the_saved_one(
    before: RowPuts, after: RowPuts, max_bytes: int, tmp_path: Path
) -> None:
    saved = table_of(before, max_bytes)
    saved.save(tmp_path / "table")
    loaded = SuccessorTable.load(tmp_path / "table", max_bytes)
    assert loaded.max_bytes == max_bytes
    for context, tokens in [*after, ([0, 0, 0], [1])]:
        assert rows_in(loaded) == rows_in(saved)
        assert (loaded.nbytes, len(loaded)) == (saved.nbytes, len(saved))
        saved.put(context, row(*tokens))
        loaded.put(context, row(*tokens))
    assert rows_in(loaded) == rows_in(saved)


@FILES
@given(ngram_puts=st.none() | NGRAM_PUTS, row_puts=ROW_PUTS, model=st.text())
def test_a_loaded_memory_is_the_saved_one(
    ngram_puts: NgramPuts | None, row_puts: RowPuts, model: str, tmp_path: Path
) -> None:
    saved = DraftMemory(model, 10, table_of(row_puts), None if ngram_puts is None else pool_of(ngram_puts))
    saved.save(tmp_path / "memory")
    loaded = DraftMemory.load(tmp_path / "memory", vocab_size=10, max_bytes=AMPLE)
    assert (loaded.model, loaded.vocab_size) == (model, 10)
    assert rows_in(loaded.successors) == rows_in(saved.successors)
    assert (loaded.ngrams is None) == (saved.ngrams is None)
    if loaded.ngrams is not None and saved.ngrams is not None:
        assert ngrams_in(loaded.ngrams) == ngrams_in(saved.ngrams)
        assert NgramPool.load(tmp_path / "memory").nbytes == saved.ngrams.nbytes
    assert SuccessorTable.load(tmp_path / "memory", AMPLE).nbytes == saved.successors.nbytes


# Bounds.


def test_of_more_than_the_bound_the_most_recent_is_loaded(tmp_path: Path) -> None:
    pool = pool_of([(key, (0, 0)) for key in range(10)])
    pool.save(tmp_path / "pool")
    loaded = NgramPool.load(tmp_path / "pool", 3 * pool.nbytes // 10)
    assert [key for key in range(10) if list(loaded.get(key))] == [7, 8, 9]
    assert loaded.nbytes == loaded.max_bytes
    table = table_of([([token], [token]) for token in range(10)])
    table.save(tmp_path / "table")
    few = SuccessorTable.load(tmp_path / "table", 3 * table.nbytes // 10)
    assert [token for token in range(10) if list(few.get([token]))] == [7, 8, 9]
    assert list(few.get([8])) == [(1, row(8))]
    assert few.nbytes == few.max_bytes


def test_a_memory_bounds_its_table_and_its_pool(tmp_path: Path) -> None:
    small_memory().save(tmp_path / "memory")
    loaded = DraftMemory.load(tmp_path / "memory", max_bytes=1200)
    assert loaded.ngrams is not None
    assert (len(loaded.successors), len(loaded.ngrams)) == (2, 1)
    assert loaded.successors.max_bytes == loaded.ngrams.max_bytes == 1200


def test_a_file_beyond_the_bound_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    pool_of([(1, (2, 3))]).save(path)
    os.truncate(path, 2**28)
    tracemalloc.start()
    try:
        with pytest.raises(FileFormatError, match=rf"'{path}' has 268435456 bytes, too many for max_bytes=1000; allow"):
            NgramPool.load(path, 1000)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("max_bytes", [2**20, 2**23])
def test_what_is_loaded_takes_no_more_memory_than_it_claims(max_bytes: int, tmp_path: Path) -> None:
    rng = random.Random(0)
    table, pool = SuccessorTable(2**23), NgramPool(5, 3, 2**23)
    for _ in range(6000):
        tokens = [rng.randrange(1000, 50_000) for _ in range(8)]
        table.put(tokens[:3], row(*tokens))
        pool.put(tokens[0], tokens[1:5])
    DraftMemory("m", 50_000, table, pool).save(tmp_path / "memory")
    tracemalloc.start()
    try:
        loaded = DraftMemory.load(tmp_path / "memory", max_bytes=max_bytes)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert loaded.ngrams is not None
    claimed = loaded.successors.nbytes + loaded.ngrams.nbytes
    assert claimed / 3 < taken < claimed <= 2 * max_bytes


# Files that are not what they should be.


def loads(path: Path) -> list[Callable[[], object]]:
    return [lambda: DraftMemory.load(path), lambda: NgramPool.load(path), lambda: SuccessorTable.load(path, AMPLE)]


def refused(data: bytes, path: Path) -> str:
    """The one sentence that all loaders refuse a memory's bytes with."""
    path.write_bytes(data)
    sentences = set()
    for load in loads(path):
        with pytest.raises(FileFormatError) as error:
            load()
        sentences.add(str(error.value))
    (sentence,) = sentences
    assert repr(str(path)) in sentence
    assert "\n" not in sentence
    return sentence


def test_no_changed_cut_or_longer_file_is_ever_loaded(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    small_memory().save(path)
    whole = path.read_bytes()
    for load in loads(path):
        load()
    for i in range(len(whole)):
        for change in (1, 32, 255):
            refused(whole[:i] + bytes([whole[i] ^ change]) + whole[i + 1 :], path)
        refused(whole[:i], path)
        refused(whole[:i] + whole[i + 1 :], path)
        refused(whole[:i] + b"\0" + whole[i:], path)
    for more in (b"\0", b"\n", b"\0\0\0\0", whole[-4:], whole):
        refused(whole + more, path)


def test_the_sentence_says_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    small_memory().save(path)
    whole = path.read_bytes()
    for foreign in (b"", b"PK\3\4", b"LADRAFT\r\n", b"GGUF" + whole):
        assert refused(foreign, path).endswith("was not saved by lookahead-decoding; name one that was")
    newer = whole[:8] + struct.pack("<I", 2) + b"whatever comes next"
    assert refused(newer, path).endswith(
        "is of version 2 and this lookahead-decoding reads 1; upgrade it, or delete the file"
    )
    for damaged in (whole[:-1], whole[:9], assembled(b"{}", b"", version=0)):
        sentence = refused(damaged, path)
        assert sentence.endswith("is damaged (its checksum differs); delete it, and what it held is learned again")


VOCABULARY = {"model": "m", "size": 9}
IMPOSSIBLE = {
    "a negative id in a context": successors_file(contexts=[1, -2, 2]),
    "a negative successor": successors_file(tokens=[7, -1]),
    "a context outside the vocabulary": successors_file(vocabulary=VOCABULARY, contexts=[1, 9, 2]),
    "a successor outside the vocabulary": successors_file(vocabulary=VOCABULARY, tokens=[7, 9]),
    "a bucket too many": successors_file(buckets=[0, 13]),
    "order 0": successors_file(orders=[3, 0]),
    "order 4": successors_file(orders=[4, 1], contexts=[1, 2, 3, 4, 5]),
    "too few context tokens": successors_file(contexts=[1, 2]),
    "too many context tokens": successors_file(contexts=[1, 2, 2, 2]),
    "a row that is not there": successors_file(rows=[0, 1]),
    "a row before the first": successors_file(rows=[-3, 0], sizes=[1, 1, 1], tokens=[7, 8, 9], buckets=[0, 0, 0]),
    "a context without a row": successors_file(rows=[0]),
    "too few successors": successors_file(sizes=[3]),
    "too many successors": successors_file(sizes=[1]),
    "a successor without a bucket": successors_file(buckets=[0]),
    "a row of 65": successors_file(sizes=[65], tokens=[1] * 65, buckets=[0] * 65),
    "other orders": successors_file(parameters={"longest": 4, "buckets": 13}),
    "other buckets": successors_file(parameters={"longest": 3, "buckets": 12}),
    "half an n-gram": ngrams_file([1, 2, 3, 4]),
    "a negative id in an n-gram": ngrams_file([1, -2, 3]),
    "an n-gram outside the vocabulary": ngrams_file([1, 2, 9], vocabulary=VOCABULARY),
    "n-grams of one token": ngrams_file([1, 2], ngram=1),
    "negative guesses": ngrams_file([1, 2, 3], guesses=-1),
    "a fraction": ngrams_file([1, 2, 3], guesses=2.0),
    "a truth value": ngrams_file([1, 2, 3], guesses=True),
    "a vocabulary of text": ngrams_file([], vocabulary={"model": "m", "size": "9"}),
    "a vocabulary of a fraction": ngrams_file([], vocabulary={"model": "m", "size": 9.0}),
    "a vocabulary of nothing": ngrams_file([], vocabulary={"model": "m", "size": 0}),
    "a vocabulary without a name": ngrams_file([], vocabulary={"size": 9}),
    "a vocabulary of a number": ngrams_file([], vocabulary={"model": 1, "size": 9}),
    "bytes behind the arrays": ngrams_file([1, 2, 3])[:-4] + bytes(12),
    "no JSON": assembled(b"{", b""),
    "no UTF-8": assembled(b'"\xff"', b""),
    "no object": assembled(b"[]", b""),
    "deep JSON": assembled(b"[" * 60_000, b""),
    "no parts": assembled(b'{"vocabulary": null}', b""),
    "parts of another kind": assembled(
        b'{"vocabulary": null, "parts": [{"kind": "weights", "parameters": {}, "counts": {}}]}', b""
    ),
    "the same kind twice": assembled(
        b'{"vocabulary": null, "parts": ['
        + b", ".join(2 * [b'{"kind": "ngrams", "parameters": {"ngram": 2, "guesses": 1}, "counts": {"ngrams": 0}}'])
        + b"]}",
        b"",
    ),
    "a list of counts": assembled(
        b'{"vocabulary": null, "parts": [{"kind": "ngrams", "parameters": {"ngram": 2, "guesses": 1}, "counts": []}]}',
        b"",
    ),
    "a huge count": assembled(
        b'{"vocabulary": null, "parts": [{"kind": "ngrams", "parameters": {"ngram": 2, "guesses": 1}, '
        b'"counts": {"ngrams": 1' + b"0" * 400 + b"}}]}",
        b"",
    ),
}


@pytest.mark.parametrize("max_bytes", [0, AMPLE])
@pytest.mark.parametrize("fault", IMPOSSIBLE)
def test_what_cannot_be_is_refused_though_its_checksum_is_right(fault: str, max_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = IMPOSSIBLE[fault]
    path.write_bytes(data[:-4] + struct.pack("<I", zlib.crc32(data[:-4])))
    load = SuccessorTable.load if b'"successors"' in data else NgramPool.load
    with pytest.raises(FileFormatError, match=rf"'{path}' is damaged \(.*\); delete it"):
        load(path, max_bytes)


def test_the_other_kind_of_file_is_refused(tmp_path: Path) -> None:
    pool_of([]).save(tmp_path / "pool")
    table_of([]).save(tmp_path / "table")
    with pytest.raises(FileFormatError, match="table' holds no ngrams; name one that does"):
        NgramPool.load(tmp_path / "table")
    with pytest.raises(FileFormatError, match="pool' holds no successors; name one that does"):
        SuccessorTable.load(tmp_path / "pool", AMPLE)
    with pytest.raises(FileFormatError, match="table' does not say which model it is for; name one that does"):
        DraftMemory.load(tmp_path / "table")


def test_a_memory_for_another_vocabulary_is_refused(tmp_path: Path) -> None:
    small_memory().save(tmp_path / "memory")
    assert DraftMemory.load(tmp_path / "memory", vocab_size=10).vocab_size == 10
    sentence = (
        "'a model', whose vocabulary has 10 tokens, and this model's has 11; name a file that was saved for this one"
    )
    with pytest.raises(FileFormatError, match=sentence):
        DraftMemory.load(tmp_path / "memory", vocab_size=11)


def test_a_file_that_is_not_there_is_the_systems_error(tmp_path: Path) -> None:
    for load in loads(tmp_path / "none"):
        with pytest.raises(FileNotFoundError):
            load()


# Writing.


def table_with(wrong: Successors) -> SuccessorTable:
    table = SuccessorTable(AMPLE)
    table.put([1], wrong)
    return table


UNLOADABLE: dict[str, Callable[[Path], None]] = {
    "a negative id": pool_of([(1, (2, -3))]).save,
    "an id outside the vocabulary": DraftMemory("m", 6, SuccessorTable(0), pool_of([(1, (2, 6))])).save,
    "a successor outside the vocabulary": DraftMemory("m", 6, table_of([([1], [6])])).save,
    "no vocabulary": DraftMemory("m", 0, SuccessorTable(0)).save,
    "a name without end": DraftMemory("m" * 2**16, 6, SuccessorTable(0)).save,
    "a bucket too many": table_with(Successors([2], b"\x0d")).save,
    "a bucket without a token": table_with(Successors([2], b"\0\0")).save,
}


@pytest.mark.parametrize("fault", UNLOADABLE)
def test_what_could_not_be_loaded_is_not_saved(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match=r"token|vocabulary|rows|header"):
        UNLOADABLE[fault](path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_row_is_cut_to_what_a_file_takes(tmp_path: Path) -> None:
    table_with(Successors(list(range(65)), bytes(65))).save(tmp_path / "file")
    ((_, row),) = SuccessorTable.load(tmp_path / "file", AMPLE).get([1])
    assert list(row.tokens) == list(range(64))


def test_the_longest_header_that_is_saved_is_loaded(tmp_path: Path) -> None:
    memory = DraftMemory("m", 6, SuccessorTable(0))
    memory.save(tmp_path / "memory")
    length = struct.unpack_from("<I", (tmp_path / "memory").read_bytes(), 12)[0]
    memory.model = "m" * (2**16 - length + 1)
    memory.save(tmp_path / "memory")
    assert DraftMemory.load(tmp_path / "memory", max_bytes=0).model == memory.model
    memory.model += "m"
    with pytest.raises(ValueError, match="the header takes 65537 bytes; use a shorter name for the model"):
        memory.save(tmp_path / "memory")


@pytest.mark.parametrize("old_mode", [None, 0o600, 0o644])
def test_a_file_is_its_owners_from_the_first_moment(
    old_mode: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "memory"
    if old_mode is not None:
        path.touch()
        path.chmod(old_mode)
    modes: list[int] = []
    fdopen = os.fdopen

    def watched(descriptor: int, mode: str) -> Any:
        modes.append(os.fstat(descriptor).st_mode & 0o777)
        return fdopen(descriptor, mode)

    monkeypatch.setattr(os, "fdopen", watched)
    umask = os.umask(0)
    try:
        small_memory().save(path)
    finally:
        os.umask(umask)
    assert modes == [0o600]
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_new_file_is_on_the_disk_whole_before_it_takes_the_old_ones_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "memory"
    small_memory().save(path)
    size = path.stat().st_size
    done: list[object] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        done.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    def watched_replace(source: str, target: str) -> None:
        done.append((Path(source).parent, Path(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    small_memory().save(path)
    assert done == [size, (tmp_path, path)]


@pytest.mark.parametrize("call", ["replace", "fsync"])
@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    call: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pool"
    pool_of([(1, (2, 3))]).save(path)
    old = path.read_bytes()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error)):
        pool_of([(4, (5, 6))]).save(path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["pool"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "memory")
    small_memory().save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert DraftMemory.load(tmp_path / "folder" / "memory").model == "a model"


def test_a_name_without_a_folder_is_saved_where_the_process_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pool_of([(1, (2, 3))]).save("pool")
    assert os.listdir(tmp_path) == ["pool"]
    assert list(NgramPool.load("pool").get(1)) == [(2, 3)]


# Bases.


@settings(deadline=None)
@given(own=NGRAM_PUTS, below=NGRAM_PUTS, guesses=st.integers(0, 4), below_guesses=st.integers(0, 4))
def test_a_pool_proposes_its_own_first_and_then_what_only_its_base_has(
    own: NgramPuts, below: NgramPuts, guesses: int, below_guesses: int
) -> None:
    base, alone = pool_of(below, below_guesses), pool_of(own, guesses)
    known = ngrams_in(base)
    pool = pool_of(own, guesses, base=base)
    for key in range(5):
        mine = list(alone.get(key))
        assert list(pool.get(key)) == (mine + [n for n in known[key] if n not in mine])[:guesses]
    assert (pool.nbytes, len(pool)) == (alone.nbytes, len(alone))
    assert ngrams_in(base) == known


@settings(deadline=None)
@given(own=ROW_PUTS, below=ROW_PUTS)
def test_a_table_has_for_each_order_its_own_row_or_its_bases(own: RowPuts, below: RowPuts) -> None:
    base, alone = table_of(below), table_of(own)
    known = rows_in(base)
    table = table_of(own, base=base)
    for context in CONTEXTS:
        found = dict(table.get(context))
        for order in (1, 2, 3):
            short = context[-order:]
            mine, theirs = dict(alone.get(short)).get(order), dict(base.get(short)).get(order)
            row_of_order = theirs if mine is None else mine
            longer = [found[n] for n in range(order + 1, 4) if n in found]
            if row_of_order is None:
                assert order not in found
            elif order in found:
                assert found[order] == row_of_order
            else:
                assert longer[0] == row_of_order
    assert (table.nbytes, len(table)) == (alone.nbytes, len(alone))
    assert rows_in(base) == known


def test_a_bases_row_is_named_once_and_gives_way_to_an_own_one_of_its_order() -> None:
    base = SuccessorTable(AMPLE)
    base.put([1, 2, 3], row(7))
    table = SuccessorTable(AMPLE, base=base)
    assert list(table.get([1, 2, 3])) == [(3, row(7))]
    table.put([3], row(8))
    assert list(table.get([1, 2, 3])) == [(3, row(7)), (1, row(8))]
    assert list(base.get([3])) == [(1, row(7))]


def test_a_base_may_have_a_base() -> None:
    tables = [SuccessorTable(AMPLE)]
    pools = [NgramPool(3, 3)]
    for token in range(3):
        tables.append(SuccessorTable(AMPLE, base=tables[-1]))
        tables[-1].put([token], row(token))
        pools.append(NgramPool(3, 3, base=pools[-1]))
        pools[-1].put(5, [token, token])
    assert [list(tables[-1].get([token])) for token in range(3)] == [[(1, row(token))] for token in range(3)]
    assert list(pools[-1].get(5)) == [(2, 2), (1, 1), (0, 0)]


def test_a_base_of_other_ngrams_is_refused() -> None:
    with pytest.raises(ValueError, match="n-grams of 4 tokens do not go with those of 3"):
        NgramPool(3, 2, base=NgramPool(4, 2))


def test_a_base_is_neither_saved_nor_merged(tmp_path: Path) -> None:
    pool = pool_of([(1, (2, 3))], base=pool_of([(1, (0, 0))]))
    pool.save(tmp_path / "pool")
    into = pool_of([])
    into.merge(pool)
    assert list(NgramPool.load(tmp_path / "pool").get(1)) == list(into.get(1)) == [(2, 3)]
    table = table_of([([1], [2])], base=table_of([([0], [1])]))
    table.save(tmp_path / "table")
    into_table = table_of([])
    into_table.merge(table)
    assert len(SuccessorTable.load(tmp_path / "table", AMPLE)) == len(into_table) == 1


# Merges.


@settings(deadline=None)
@given(ours=NGRAM_PUTS, theirs=NGRAM_PUTS, guesses=st.integers(0, 4), max_bytes=st.sampled_from([0, 4096, AMPLE]))
def test_merged_ngrams_are_the_newest_and_the_bounds_hold(
    ours: NgramPuts, theirs: NgramPuts, guesses: int, max_bytes: int
) -> None:
    other = pool_of(theirs)
    known = ngrams_in(other)
    pool = pool_of(ours, guesses, max_bytes)
    before = ngrams_in(pool)
    pool.merge(other)
    assert ngrams_in(other) == known
    assert pool.nbytes <= max_bytes
    for key in range(5):
        together = (known[key] + [n for n in before[key] if n not in known[key]])[:guesses]
        assert list(pool.get(key)) == (together if max_bytes == AMPLE else together[: len(list(pool.get(key)))])


@settings(deadline=None)
@given(ours=ROW_PUTS, theirs=ROW_PUTS, max_bytes=st.sampled_from([0, 2000, AMPLE]))
def test_merged_rows_are_as_if_told_after_the_others(ours: RowPuts, theirs: RowPuts, max_bytes: int) -> None:
    other = table_of(theirs)
    known = rows_in(other)
    table = table_of(ours, max_bytes)
    table.merge(other)
    assert table.nbytes <= max_bytes
    assert rows_in(other) == known
    assert rows_in(table) == rows_in(table_of([*ours, *theirs], max_bytes))


def test_what_was_merged_gives_way_last() -> None:
    pool = pool_of([(1, (0, 0)), (2, (0, 0))], max_bytes=3 * pool_of([(1, (0, 0))]).nbytes)
    pool.merge(pool_of([(1, (0, 0)), (3, (0, 0))]))
    pool.put(4, [0, 0])
    assert [key for key in range(5) if list(pool.get(key))] == [1, 3, 4]


def test_a_merge_with_itself_changes_nothing() -> None:
    memory = small_memory()
    assert memory.ngrams is not None
    before = rows_in(memory.successors), ngrams_in(memory.ngrams)
    memory.merge(memory)
    assert (rows_in(memory.successors), ngrams_in(memory.ngrams)) == before


def test_what_does_not_go_together_is_not_merged_in_part() -> None:
    memory = small_memory()
    assert memory.ngrams is not None
    before = rows_in(memory.successors), ngrams_in(memory.ngrams)
    news = table_of([([0], [1])])
    with pytest.raises(ValueError, match="'b' with 11 tokens does not go with one of 'a model' with 10"):
        memory.merge(DraftMemory("b", 11, news))
    with pytest.raises(ValueError, match="n-grams of 4 tokens do not go with those of 3"):
        memory.merge(DraftMemory("b", 10, news, NgramPool(4, 2)))
    assert (rows_in(memory.successors), ngrams_in(memory.ngrams)) == before


def test_a_memory_without_a_pool_gets_one_of_its_own_from_the_first_that_has_one() -> None:
    memory, other = DraftMemory("m", 10, table_of([([1], [1])])), small_memory()
    assert other.ngrams is not None
    memory.merge(other)
    assert memory.ngrams is not None
    assert memory.ngrams is not other.ngrams
    assert ngrams_in(memory.ngrams) == ngrams_in(other.ngrams)
    assert (memory.ngrams.guesses, memory.ngrams.max_bytes) == (other.ngrams.guesses, other.ngrams.max_bytes)
    assert len(memory.successors) == 1 + len(other.successors)
    kept = ngrams_in(memory.ngrams)
    memory.merge(DraftMemory("m", 10, table_of([])))
    assert ngrams_in(memory.ngrams) == kept
