"""What a user may set, and what a user is told who sets something else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_decoding.config import (
    BUILTIN_SOURCES,
    PRESETS,
    LookaheadConfig,
    as_config,
    preset,
    read_config_file,
)
from lookahead_decoding.errors import ConfigError, LookaheadError

LIMITS = {
    "budget": (1, 4096),
    "window": (0, 1024),
    "ngram": (2, 64),
    "guesses": (0, 1024),
    "window_seed": (0, 2**63 - 1),
    "pool_bytes": (4096, 2**40),
    "prefill_chunk": (1, 2**20),
}
SWITCHES = ["adaptive", "verify_window", "keep_bonus", "verify_during_warmup"]


def valid(**fields: Any) -> LookaheadConfig:
    return LookaheadConfig(**fields | ({"adaptive": True} if fields["budget"] is None else {}))


configs = st.builds(
    valid,
    **{
        name: st.integers(least, most)
        for name, (least, most) in LIMITS.items()
        if name not in ("budget", "ngram", "window")
    },
    window=st.integers(0, 20),
    budget=st.one_of(st.none(), st.integers(20 * 31, LIMITS["budget"][1])),
    ngram=st.integers(3, 32),
    sources=st.lists(st.sampled_from([*BUILTIN_SOURCES, "my.module:Source", "other:made_by"]), unique=True),
    **{name: st.booleans() for name in SWITCHES},
)


def refusal(values: Mapping[str, Any]) -> str:
    """The sentence that these fields are refused with."""
    with pytest.raises(ConfigError) as caught:
        LookaheadConfig.from_dict(values)
    assert isinstance(caught.value, LookaheadError)
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_config_under_its_name(name: str) -> None:
    assert preset(name) is PRESETS[name]
    assert LookaheadConfig.from_dict(PRESETS[name].to_dict()) == PRESETS[name]


def test_the_presets_are_the_papers_settings() -> None:
    assert PRESETS["default"] == LookaheadConfig()
    paper, reference = PRESETS["paper"], PRESETS["paper-reference"]
    assert (paper.window, paper.ngram, paper.guesses, paper.sources) == (15, 5, 15, ("pool",))
    assert paper.verify_window
    assert paper.keep_bonus
    assert paper.verify_during_warmup
    # The paper's steps are as wide as its window and its n-grams make them.
    assert paper.budget is None
    assert not paper.adaptive
    assert reference == paper.replace(verify_window=False, keep_bonus=False, verify_during_warmup=False)
    assert PRESETS["jacobi"].ngram == 2
    assert PRESETS["jacobi"].verify_window


@pytest.mark.parametrize(
    ("fields", "is_plain"),
    [
        ({"window": 0, "guesses": 0}, True),
        ({"window": 0, "sources": []}, True),
        ({"window": 0}, False),
        ({"guesses": 0}, True),
        ({"window": 2, "guesses": 0}, False),
        ({"window": 2, "sources": []}, False),
        ({"sources": ["suffix"]}, False),
        ({"preset": "plain"}, True),
        ({"preset": "jacobi"}, False),
    ],
)
def test_a_config_is_plain_when_neither_window_nor_drafts_are_left(fields: dict[str, Any], is_plain: bool) -> None:
    assert LookaheadConfig.from_dict(fields).is_plain == is_plain


@settings(deadline=None, max_examples=50)
@given(config=configs)
def test_a_config_survives_json(config: LookaheadConfig) -> None:
    read = LookaheadConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert read == config
    assert hash(read) == hash(config)


def test_a_tuned_window_gives_way_to_a_budget_that_does_not_hold_it() -> None:
    tuned = LookaheadConfig(window=7, ngram=4, budget=32)
    assert as_config({"budget": 8}, tuned) == tuned.replace(window=0, budget=8)
    assert as_config({"budget": 21}, tuned) == tuned.replace(budget=21)
    with pytest.raises(ConfigError, match="takes 21 nodes"):
        as_config({"budget": 8, "window": 7}, tuned)


def test_to_dict_names_every_field() -> None:
    assert list(LookaheadConfig().to_dict()) == [field.name for field in dataclasses.fields(LookaheadConfig)]


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(LookaheadConfig)])
def test_no_field_of_a_config_can_be_set(name: str) -> None:
    config = LookaheadConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, getattr(config, name))


def test_a_list_of_sources_is_copied() -> None:
    sources = ["pool"]
    config = LookaheadConfig(sources=sources)  # type: ignore[arg-type]
    sources.append("prompt_ngrams")
    assert config.sources == ("pool",)


@pytest.mark.parametrize(("name", "limits"), LIMITS.items())
def test_a_number_may_be_its_limits_and_nothing_beyond(name: str, limits: tuple[int, int]) -> None:
    for value in limits:
        # A window at its limit takes more nodes than a bounded step has.
        fields = {"budget": None, name: value}
        assert getattr(LookaheadConfig.from_dict(fields), name) == value
    for value in (limits[0] - 1, limits[1] + 1):
        assert refusal({name: value}) == f"{name} goes from {limits[0]} to {limits[1]}; got {value}"


def test_a_budget_may_be_none_and_no_other_number() -> None:
    assert LookaheadConfig.from_dict({"budget": None}).budget is None
    for name in LIMITS.keys() - {"budget"}:
        assert refusal({name: None}) == f"{name} is a whole number; got None"


@pytest.mark.parametrize(("window", "ngram", "budget"), [(15, 5, 60), (1, 2, 1), (20, 3, 40)])
def test_a_window_that_does_not_fit_the_budget_is_refused(window: int, ngram: int, budget: int) -> None:
    fields = {"window": window, "ngram": ngram}
    assert LookaheadConfig.from_dict({**fields, "budget": budget}).budget == budget
    for bound in (None, 4096):
        assert LookaheadConfig.from_dict({**fields, "budget": bound}).window == window
    if budget > 1:
        assert refusal({**fields, "budget": budget - 1}) == (
            f"a window of {window} columns and ngram {ngram} takes {budget} nodes per step and the budget is "
            f"{budget - 1}; give a larger budget, null for no bound, or a smaller window"
        )


@pytest.mark.parametrize("value", [True, False, 3.0, "3", [3]])
@pytest.mark.parametrize("name", LIMITS)
def test_what_is_no_whole_number_is_refused(name: str, value: object) -> None:
    assert refusal({name: value}) == f"{name} is a whole number; got {value!r}"


@pytest.mark.parametrize("value", [0, 1, "true", None])
@pytest.mark.parametrize("name", SWITCHES)
def test_what_is_neither_true_nor_false_is_refused(name: str, value: object) -> None:
    assert refusal({name: value}) == f"{name} is true or false; got {value!r}"


@pytest.mark.parametrize("value", ["pool", b"pool", [1], ["pool", None], 3, None, {"pool": False}])
def test_sources_that_are_no_list_of_names_are_refused(value: object) -> None:
    assert refusal({"sources": value}) == f"sources is a list of names; got {value!r}"


@pytest.mark.parametrize(
    "name", ["", "poool", "a.b", ":Source", "module:", "a:b:c", "a b:c", "a/b:c", "a:b.c", "pool "]
)
def test_a_source_that_is_neither_built_in_nor_module_attr_is_refused(name: str) -> None:
    message = refusal({"sources": [name]})
    assert message.startswith(f"unknown draft source {name!r}")
    assert "known are suffix, recycled, prompt_ngrams, pool, and module:attr for your own" in message


def test_a_misspelt_source_gets_a_suggestion() -> None:
    assert "(did you mean 'prompt_ngrams'?)" in refusal({"sources": ["prompt_ngram"]})


def test_a_source_named_twice_is_refused() -> None:
    message = refusal({"sources": ["pool", "a:b", "pool"]})
    assert message == "each draft source is named once; got pool, a:b, pool"


@pytest.mark.parametrize(
    ("fields", "is_refused"),
    [
        ({"ngram": 2, "guesses": 1}, True),
        ({"ngram": 2, "guesses": 0}, False),
        ({"ngram": 3, "guesses": 1}, False),
    ],
)
def test_dropping_the_bonus_of_2_gram_drafts_is_refused(fields: dict[str, Any], is_refused: bool) -> None:
    fields = {"keep_bonus": False, **fields}
    if is_refused:
        assert "ngram 3 or more, or guesses 0" in refusal(fields)
    else:
        assert LookaheadConfig.from_dict(fields).keep_bonus is False


def test_an_unknown_option_is_refused_with_the_nearest_known_one() -> None:
    message = refusal({"windows": 3})
    assert message.startswith("unknown lookahead option 'windows' (did you mean 'window'?); known are ")
    for field in dataclasses.fields(LookaheadConfig):
        assert field.name in message
    with pytest.raises(ConfigError, match=r"'ngrams' \(did you mean 'ngram'"):
        LookaheadConfig().replace(ngrams=3)


def test_an_option_that_resembles_nothing_gets_no_suggestion() -> None:
    assert "did you mean" not in refusal({"xyzzy": 1})


@pytest.mark.parametrize("read", [preset, as_config, lambda name: LookaheadConfig.from_dict({"preset": name})])
def test_an_unknown_preset_is_refused_with_the_nearest_known_one(read: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        read("papper")
    assert str(caught.value) == (
        "unknown preset 'papper' (did you mean 'paper'?); known are default, paper, paper-reference, jacobi, plain"
    )


@pytest.mark.parametrize("name", [None, 3, ["paper"]])
def test_a_preset_that_is_no_name_is_refused(name: object) -> None:
    assert refusal({"preset": name}).startswith(f"unknown preset {name!r}")


def test_a_dict_starts_from_its_preset_or_from_the_defaults() -> None:
    assert LookaheadConfig.from_dict({}) == LookaheadConfig()
    values = {"preset": "paper", "window": 3}
    assert LookaheadConfig.from_dict(values) == PRESETS["paper"].replace(window=3)
    assert values == {"preset": "paper", "window": 3}


def test_a_changed_copy_is_checked_like_a_new_config() -> None:
    with pytest.raises(ConfigError, match="window goes from"):
        LookaheadConfig().replace(window=-1)


def test_every_lookahead_argument_takes_a_name_a_dict_or_a_config() -> None:
    config = LookaheadConfig(window=3)
    assert as_config(config) is config
    assert as_config("paper") is PRESETS["paper"]
    assert as_config({"preset": "paper", "guesses": 2}) == PRESETS["paper"].replace(guesses=2)


@pytest.mark.parametrize(("value", "kind"), [(None, "NoneType"), (5, "int"), (["paper"], "list"), (True, "bool")])
def test_any_other_lookahead_argument_is_refused(value: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"a preset's name, a dict or a LookaheadConfig; got {kind}$"):
        as_config(value)


def test_a_config_file_holds_any_of_the_fields(tmp_path: Path) -> None:
    path = tmp_path / "lookahead.json"
    path.write_text('{"preset": "paper", "window": 4, "sources": ["prompt_ngrams"]}', encoding="utf-8")
    expected = PRESETS["paper"].replace(window=4, sources=("prompt_ngrams",))
    assert LookaheadConfig.from_json(path) == LookaheadConfig.from_json(str(path)) == expected
    assert read_config_file(path) == {"preset": "paper", "window": 4, "sources": ["prompt_ngrams"]}


def test_a_config_files_fields_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "lookahead.json"
    path.write_text('{"window": 2.5}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^window is a whole number; got 2\.5$"):
        LookaheadConfig.from_json(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read the config file {path}: "),
        (b"\xff\xfe{}", "cannot read the config file {path}: "),
        (b"{'window': 3}", "the config file {path} is not JSON: "),
        (b"", "the config file {path} is not JSON: "),
        (b'["window", 3]', "the config file {path} holds list, not a JSON object of fields"),
        (b"3", "the config file {path} holds int, not a JSON object of fields"),
    ],
    ids=["missing", "not-utf8", "not-json", "empty", "list", "number"],
)
def test_a_file_that_is_no_config_is_refused_by_its_path(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "lookahead.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        LookaheadConfig.from_json(path)
    assert str(caught.value).startswith(reason.format(path=path))


def test_a_folder_is_no_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config file"):
        read_config_file(tmp_path)
