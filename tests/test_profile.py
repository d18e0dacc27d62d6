"""Tuned profiles: what they say between the measured points, when they are used, and when they are left aside."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import re
import stat
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import lookahead_decoding
from lookahead_decoding import Engine, LookaheadConfig, profile
from lookahead_decoding.cli.options import GuessingOptions
from lookahead_decoding.config import PRESETS, as_config
from lookahead_decoding.errors import ConfigError, FileFormatError
from lookahead_decoding.profile import TUNED_FIELDS, Figures, Profile, ProfileKey, StepTimes, find, path_of, save
from zoo import tiny

REAL_FOLDER = profile.folder  # which conftest.py replaces

TUNED = LookaheadConfig(window=2, ngram=3, guesses=4, sources=("suffix", "recycled", "pool"), budget=32)
TIMES = StepTimes(
    nodes=(1, 2, 4, 8, 16),
    contexts=(100, 300),
    seconds=((0.010, 0.011, 0.013, 0.017, 0.025), (0.020, 0.023, 0.029, 0.041, 0.065)),
)
FIGURES = Figures(1.9, 12.5, 40.0, 61.0, 12.5)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setattr(profile, "folder", REAL_FOLDER)
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("llama", initializer_range=0.1)


@pytest.fixture
def key(model: PreTrainedModel) -> ProfileKey:
    return Engine(model, name="org/tiny", tuned=False).profile_key


@pytest.fixture
def stored(key: ProfileKey) -> Path:
    return save(profile_of(key))


def profile_of(key: ProfileKey, **changes: Any) -> Profile:
    return dataclasses.replace(Profile(key, profile.versions(), TIMES, TUNED, FIGURES), **changes)


# Step times between the measured ones


def test_measured_points_are_what_was_measured() -> None:
    for context, row in zip(TIMES.contexts, TIMES.seconds, strict=True):
        for nodes, seconds in zip(TIMES.nodes, row, strict=True):
            assert TIMES.at(nodes, context) == pytest.approx(seconds)


def test_between_them_time_is_linear_in_the_logarithm_of_nodes_and_in_context() -> None:
    assert TIMES.at(3, 100) == pytest.approx(0.011 + math.log2(1.5) * 0.002)
    assert TIMES.at(4, 150) == pytest.approx(0.75 * 0.013 + 0.25 * 0.029)
    corner = [[TIMES.at(nodes, context) for nodes in (4, 8)] for context in (100, 300)]
    share = math.log2(6 / 4)
    expected = sum((1 - share) * a + share * b for a, b in corner) / 2
    assert TIMES.at(6, 200) == pytest.approx(expected)


def test_beyond_them_it_goes_on_in_a_line() -> None:
    assert TIMES.at(32, 100) == pytest.approx(0.025 + 16 * 0.001)
    assert TIMES.at(4, 500) == pytest.approx(0.029 + 0.016)
    assert TIMES.at(4, 50) == pytest.approx(0.013 - 0.004)
    assert TIMES.at(0, 100) == TIMES.at(1, 100)


def test_a_wide_step_that_took_less_is_averaged_with_the_narrower_one() -> None:
    times = StepTimes((1, 2, 4), (0,), ((0.010, 0.020, 0.016),))
    assert [times.at(nodes, 0) for nodes in (1, 2, 4)] == pytest.approx([0.010, 0.018, 0.018])


@st.composite
def step_times(draw: st.DrawFn) -> StepTimes:
    nodes = sorted({1, *draw(st.lists(st.integers(2, 300), min_size=1, max_size=6))})
    contexts = sorted(draw(st.sets(st.integers(0, 5000), min_size=1, max_size=4)))
    second = st.floats(1e-5, 10)
    return StepTimes(tuple(nodes), tuple(contexts), tuple(tuple(draw(second) for _ in nodes) for _ in contexts))


@settings(deadline=None, max_examples=100)
@given(times=step_times(), context=st.integers(0, 20000), nodes=st.lists(st.integers(1, 2000), min_size=2))
def test_any_measurement_makes_a_time_that_is_positive_and_never_falls_with_nodes(
    times: StepTimes, context: int, nodes: list[int]
) -> None:
    seconds = [times.at(width, context) for width in sorted(nodes)]
    assert all(0 < time < math.inf for time in seconds)
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(seconds))


@settings(deadline=None, max_examples=50)
@given(times=step_times(), width=st.integers(1, 400), share=st.floats(0, 1))
def test_a_time_lies_between_those_of_the_contexts_beside_it(times: StepTimes, width: int, share: float) -> None:
    first, last = times.contexts[0], times.contexts[-1]
    context = round(first + share * (last - first))
    sides = [times.at(width, measured) for measured in times.contexts]
    assert min(sides) * (1 - 1e-9) <= times.at(width, context) <= max(sides) * (1 + 1e-9)


def test_many_contexts_take_no_more_memory() -> None:
    times = dataclasses.replace(TIMES)
    for context in range(5000):
        times.at(3, context)
    assert len(times._rows) < 1000


@pytest.mark.parametrize(
    ("nodes", "contexts", "seconds"),
    [
        ((1,), (0,), ((1.0,),)),
        ((2, 4), (0,), ((1.0, 1.0),)),
        ((1, 4, 2), (0,), ((1.0, 1.0, 1.0),)),
        ((1, 2), (), ()),
        ((1, 2), (5, 5), ((1.0, 1.0), (1.0, 1.0))),
        ((1, 2), (-1,), ((1.0, 1.0),)),
        ((1, 2), (0,), ((1.0,),)),
        ((1, 2), (0, 1), ((1.0, 1.0),)),
        ((1, 2), (0,), ((1.0, 0.0),)),
        ((1, 2), (0,), ((1.0, math.nan),)),
        ((1, 2), (0,), ((1.0, math.inf),)),
        ((1, 2.5), (0,), ((1.0, 1.0),)),
        ((1, 2), (0,), ((1.0, "2"),)),
    ],
)
def test_times_that_cannot_be_are_refused(nodes: Any, contexts: Any, seconds: Any) -> None:
    with pytest.raises(ValueError, match=r"nodes|contexts|seconds"):
        StepTimes(nodes, contexts, seconds)


# Files


def test_a_profile_survives_its_file(key: ProfileKey, stored: Path) -> None:
    assert find(key) == profile_of(key)
    assert Profile.from_dict(json.loads(stored.read_text())).to_dict() == profile_of(key).to_dict()
    found = find(key)
    assert found is not None
    assert found.cost(8, 300) == TIMES.at(8, 300)


def test_a_file_has_a_name_to_be_recognised_by_and_is_its_owners(key: ProfileKey, stored: Path, cache: Path) -> None:
    assert stored.parent == cache / "tuned"
    assert stored.name.startswith("tiny-float32-")
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    assert list(stored.parent.iterdir()) == [stored]  # no half-written one


def test_a_profile_takes_an_earlier_ones_place(key: ProfileKey, stored: Path) -> None:
    later = profile_of(key, config=TUNED.replace(budget=64))
    assert save(later) == stored
    assert find(key) == later


def test_what_cannot_be_stored_leaves_nothing_behind(
    key: ProfileKey, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stored.read_bytes()

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        save(profile_of(key, config=TUNED.replace(budget=64)))
    assert [file.read_bytes() for file in stored.parent.iterdir()] == [before]


def test_a_cache_folder_that_cannot_be_written_is_a_sentence(key: ProfileKey, cache: Path) -> None:
    cache.write_text("a file")
    assert find(key) is None
    with pytest.raises(ConfigError, match=r"^the profile cannot be stored in .*; set LOOKAHEAD_CACHE to a folder"):
        save(profile_of(key))


@pytest.mark.parametrize("name", ["../../etc/passwd", "a b/c d", "..", "", "ü" * 300, "C:\\models\\m", "repo:F.gguf"])
def test_any_models_name_makes_a_file_inside_the_folder(model: PreTrainedModel, cache: Path, name: str) -> None:
    key = ProfileKey.of(model, name, torch.device("cpu"))
    path = save(profile_of(key))
    assert path.parent == cache / "tuned"
    assert find(key) == profile_of(key)


def test_a_model_is_known_by_the_last_part_of_its_name(model: PreTrainedModel) -> None:
    cpu = torch.device("cpu")
    names = ("org/tiny", "/home/me/models/tiny/", "tiny", "repo:tiny")
    assert {ProfileKey.of(model, name, cpu) for name in names} == {ProfileKey.of(model, "tiny", cpu)}


def test_a_key_has_the_number_of_threads(model: PreTrainedModel, key: ProfileKey) -> None:
    assert key.device.endswith(", 1 thread")
    torch.set_num_threads(2)
    try:
        assert ProfileKey.of(model, "tiny", torch.device("cpu")).device.endswith(", 2 threads")
    finally:
        torch.set_num_threads(1)


def test_nothing_stored_is_no_profile_and_no_warning(key: ProfileKey, caplog: pytest.LogCaptureFixture) -> None:
    assert find(key) is None
    assert not caplog.records


def test_looking_for_a_profile_takes_no_time(key: ProfileKey, model: PreTrainedModel) -> None:
    def seconds() -> float:
        begun = time.perf_counter()
        find(ProfileKey.of(model, "org/tiny", torch.device("cpu")))
        return time.perf_counter() - begun

    assert min(seconds() for _ in range(20)) < 5e-4


def altered(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values | changes


def within(name: str, **changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values | {name: values[name] | changes}


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda values: {key: value for key, value in values.items() if key != name}


UNUSABLE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "other torch": (within("versions", torch="1.0"), r"measured with torch 1\.0, and this is "),
    "other transformers": (within("versions", transformers="1.0"), "measured with transformers"),
    "other version": (within("versions", lookahead_decoding="0.0.1"), "measured with lookahead_decoding"),
    "no versions": (altered(versions={}), "measured with torch None"),
    "other schema": (altered(schema=2), "its schema is 2, and this version reads 1"),
    "other model": (altered(model="large"), "of another model"),
    "other size": (altered(parameters=7), r"of another parameters \(7, not"),
    "other dtype": (altered(dtype="bfloat16"), "of another dtype"),
    "other device": (altered(device="abacus"), r"of another device \('abacus', not"),
    "no curve": (without("curve"), "it is damaged .it has no 'curve'"),
    "no model": (without("model"), "it is damaged"),
    "no schema": (without("schema"), "it is damaged"),
    "a list": (lambda values: [values], "it is damaged"),
    "null": (lambda values: None, "it is damaged"),
    "falling nodes": (within("curve", nodes=[1, 8, 4, 2, 16]), "it is damaged .nodes ascend"),
    "a row too few": (within("curve", contexts=[1, 2, 3]), "it is damaged"),
    "no time at all": (within("curve", seconds=[[0.0] * 5] * 2), "it is damaged"),
    "words": (within("curve", seconds="fast"), "it is damaged"),
    "negative window": (within("config", window=-1), "it is damaged .window goes from"),
    "unknown field": (within("config", width=1), "it is damaged .config has"),
    "own source": (within("config", sources=["os:getcwd"]), "it is damaged .config has"),
    "a figure too few": (altered(measured={"tokens_per_step": 1.0}), "it is damaged"),
    "an endless figure": (within("measured", tokens_per_step=math.inf), "it is damaged"),
}


@pytest.mark.parametrize(("change", "reason"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_a_stale_foreign_or_damaged_profile_is_left_aside_with_one_warning(
    model: PreTrainedModel,
    key: ProfileKey,
    stored: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[dict[str, Any]], Any],
    reason: str,
) -> None:
    stored.write_text(json.dumps(change(json.loads(stored.read_text()))))
    is_left_aside(model, stored, caplog, reason)


def is_left_aside(model: PreTrainedModel, stored: Path, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    for _ in range(2):
        engine = Engine(model, name="tiny")
        assert engine.profile is None
        assert engine.config == LookaheadConfig()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name == "lookahead_decoding.profile"
    message = record.getMessage()
    assert message.startswith(f"the tuned profile {stored} is not used: ")
    assert message.endswith("; run `lookahead tune MODEL` to measure again")
    assert "\n" not in message
    assert re.search(reason, message), message


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_profile_is_left_aside(
    model: PreTrainedModel, stored: Path, caplog: pytest.LogCaptureFixture, share: float
) -> None:
    content = stored.read_bytes()
    stored.write_bytes(content[: int(share * len(content))])
    is_left_aside(model, stored, caplog, "it is no JSON")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 100_000, b"{", b"NaN"])
def test_what_is_no_profile_at_all_is_left_aside(
    model: PreTrainedModel, stored: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    stored.write_bytes(content)
    is_left_aside(model, stored, caplog, "it is (no JSON|damaged)")


def test_a_profile_that_cannot_be_read_is_left_aside(
    model: PreTrainedModel, stored: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored.unlink()
    stored.mkdir()
    is_left_aside(model, stored, caplog, "it cannot be read")


def test_a_profile_of_another_key_under_this_ones_name_is_left_aside(
    model: PreTrainedModel, key: ProfileKey, stored: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = save(profile_of(dataclasses.replace(key, device="abacus")))
    other.replace(stored)
    is_left_aside(model, stored, caplog, "of another device")


def test_from_dict_says_what_is_missing() -> None:
    with pytest.raises(FileFormatError, match="it has no 'curve'"):
        Profile.from_dict({"schema": 1})


# Who goes by it


def test_an_engine_goes_by_the_profile_of_its_model(model: PreTrainedModel, key: ProfileKey, stored: Path) -> None:
    engine = Engine(model, name="tiny")
    assert engine.profile == profile_of(key)
    assert engine.config == TUNED
    for context in (0, 256, 768):
        seconds = engine.costs.at(context)
        assert [seconds(nodes) for nodes in (1, 4, 20)] == pytest.approx([TIMES.at(n, context) for n in (1, 4, 20)])


def test_an_engine_without_one_is_as_ever(model: PreTrainedModel, stored: Path) -> None:
    for engine in (Engine(model, name="tiny", tuned=False), Engine(model, name="another")):
        assert engine.profile is None
        assert engine.config == LookaheadConfig()
    double = Engine(tiny("llama", dtype=torch.float64), name="tiny")
    assert double.profile is None


WIDE = LookaheadConfig(window=5, ngram=3)
ASKED: list[tuple[Any, LookaheadConfig]] = [
    ("default", TUNED),
    ({}, TUNED),
    ({"preset": "default"}, TUNED),
    ({"guesses": 2}, TUNED.replace(guesses=2)),
    ({"budget": 8}, TUNED.replace(budget=8)),
    ({"preset": "default", "adaptive": False}, TUNED.replace(adaptive=False)),
    ({"window": 3}, TUNED.replace(window=3, budget=LookaheadConfig.budget)),  # 32 nodes were enough for W=2
    ({"window": 3, "budget": 20}, TUNED.replace(window=3, budget=20)),
    ({"preset": "paper"}, PRESETS["paper"]),
    ({"preset": "paper", "window": 3}, PRESETS["paper"].replace(window=3)),
    *((name, config) for name, config in PRESETS.items() if name != "default"),
    (WIDE, WIDE),
]


@pytest.mark.parametrize(("asked", "config"), ASKED, ids=lambda value: str(value)[:40])
def test_tuned_fields_stand_in_for_the_preset_default_alone(
    model: PreTrainedModel, stored: Path, asked: Any, config: LookaheadConfig
) -> None:
    assert Engine(model, lookahead=asked, name="tiny").config == config
    completion = Engine(model, name="tiny").generate([1, 2, 3], lookahead=asked, max_new_tokens=2, temperature=0)
    assert completion.config == config
    assert as_config(asked) == Engine(model, lookahead=asked, name="another").config  # without a profile as ever


def test_options_go_before_the_file_that_before_the_tuned_fields_and_those_before_the_preset(
    model: PreTrainedModel, stored: Path, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"guesses": 3, "pool_bytes": 8192}))

    def config(**options: Any) -> LookaheadConfig:
        return Engine(model, lookahead=GuessingOptions(**options).resolve(), name="tiny").config

    assert config() == TUNED
    assert config(config=file) == TUNED.replace(guesses=3, pool_bytes=8192)
    assert config(config=file, guesses=5) == TUNED.replace(guesses=5, pool_bytes=8192)
    assert config(preset="jacobi") == PRESETS["jacobi"]
    assert config(config=file, preset="jacobi") == PRESETS["jacobi"].replace(guesses=3, pool_bytes=8192)


def test_a_field_that_does_not_exist_is_refused_with_a_profile_too(model: PreTrainedModel, stored: Path) -> None:
    for asked in ({"windows": 3}, "defualt", {"preset": None}, {"window": -1}):
        with pytest.raises(ConfigError):
            Engine(model, name="tiny").configured(asked)  # type: ignore[arg-type]


def test_the_one_line_call_goes_by_it(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model.config, "_name_or_path", "org/tiny")
    ids = torch.tensor([[5, 6, 7, 8, 5, 6]])
    expected = model.generate(ids, max_new_tokens=16, do_sample=False)
    path = save(profile_of(ProfileKey.of(model, "tiny", torch.device("cpu"))))
    seen: list[ProfileKey] = []
    monkeypatch.setattr("lookahead_decoding.engine.find", lambda key: seen.append(key) or find(key))
    assert torch.equal(lookahead_decoding.generate(model, ids, max_new_tokens=16, do_sample=False), expected)
    assert [path_of(key) for key in seen] == [path]
    assert not caplog.records


def test_the_tokens_are_the_same_with_and_without_it(model: PreTrainedModel, stored: Path) -> None:
    prompt = [5, 6, 7, 8, 9, 5, 6, 7]
    tuned, usual, plain = (
        engine.generate(prompt, max_new_tokens=40, temperature=0, lookahead=lookahead)
        for engine, lookahead in (
            (Engine(model, name="tiny"), None),
            (Engine(model, name="tiny", tuned=False), None),
            (Engine(model, name="tiny"), "plain"),
        )
    )
    assert tuned.token_ids == usual.token_ids == plain.token_ids
    assert tuned.config == TUNED
    assert usual.config != TUNED


def test_the_tuned_fields_are_the_configs(key: ProfileKey) -> None:
    assert profile_of(key).fields == {name: TUNED.to_dict()[name] for name in TUNED_FIELDS}
