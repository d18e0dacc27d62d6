"""How many threads: pure logic under made-up timings, and one probe of a real engine."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from lookahead_decoding import Engine
from lookahead_decoding.threads import available_threads, choose_threads, settle_threads
from zoo import tiny


@pytest.fixture(autouse=True)
def _threads_stay_as_they_were() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        pytest.param({8: 1.0, 4: 1.9}, 8, id="an idle machine"),
        pytest.param({8: 1.0, 4: 0.95, 2: 0.92, 1: 0.91}, 8, id="a little faster is not enough"),
        pytest.param({8: 112.0, 4: 30.0, 2: 9.0, 1: 3.5}, 1, id="a busy machine"),
        pytest.param({8: 4.0, 4: 1.0, 2: 1.5}, 4, id="half of it is busy"),
        pytest.param({8: 1.0, 4: 1.0, 2: 0.5, 1: 0.7}, 2, id="the first half alone tells nothing"),
        pytest.param({3: 1.0, 1: 0.5}, 1, id="an odd number"),
        pytest.param({1: 1.0}, 1, id="one core"),
    ],
)
def test_fewer_threads_are_taken_only_where_they_are_clearly_faster(seconds: Mapping[int, float], chosen: int) -> None:
    # A timing that is missing must not be asked for: the search stops where still fewer would be slower.
    assert choose_threads(seconds.__getitem__, max(seconds)).threads == chosen


def test_one_slow_measurement_decides_nothing() -> None:
    calls: Counter[int] = Counter()

    def measure(threads: int) -> float:
        calls[threads] += 1
        return 9.0 if threads == 2 and calls[threads] == 1 else {2: 1.0, 1: 1.9}[threads]

    assert choose_threads(measure, 2).threads == 2


def test_the_reason_names_the_gain() -> None:
    assert "4.0 times" in choose_threads({2: 4.0, 1: 1.0}.__getitem__, 2).reason
    assert "all 2" in choose_threads({2: 1.0, 1: 2.0}.__getitem__, 2).reason


@pytest.mark.parametrize(("quota", "bound"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 64)])
def test_a_cpu_quota_bounds_the_threads(
    quota: str, bound: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    file = tmp_path / "cpu.max"
    file.write_text(quota + "\n")
    assert available_threads(file) == bound


def test_without_a_control_group_the_affinity_bounds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert available_threads(tmp_path / "missing") == 64
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert available_threads(tmp_path / "missing") == 3


def test_a_real_probe_settles_on_an_available_number_and_leaves_no_cache_behind() -> None:
    engine = Engine(tiny("llama"))
    choice = settle_threads(engine)
    assert 1 <= choice.threads <= available_threads()
    assert torch.get_num_threads() == choice.threads
    completion = engine.generate([0] * 8, max_new_tokens=1)
    assert not isinstance(completion, list)
    assert completion.cached_tokens == 0


def test_the_number_asked_for_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny("llama"))
    monkeypatch.setattr(engine, "generate", None)
    assert settle_threads(engine, 1).threads == torch.get_num_threads() == 1
