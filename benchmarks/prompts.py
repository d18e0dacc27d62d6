"""Benchmark prompts: public data sets as chat messages (the files are not part of this repository), and made ones."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


_TASKS: dict[str, Callable[[Mapping[str, Any]], Messages]] = {
    # lm-sys/FastChat's questions, first turn.
    "mt-bench": lambda row: _user(row["turns"][0]),
    # hemingkx/Spec-Bench's questions, first turn; mt-bench is a part of it.
    "spec-bench": lambda row: _user(row["turns"][0]),
    # openai/human-eval, as a request.
    "humaneval": lambda row: _user("Complete this Python function:\n" + row["prompt"]),
}
TASKS = tuple(_TASKS)


def load_prompts(task: str, path: Path, stride: int, category: str | None = None, start: int = 0) -> list[Messages]:
    """Every ``stride``-th row of a JSON-lines file (optionally .gz), of one category, as the task asks it."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    rows = [row for row in rows if category is None or row["category"] == category]
    return [_TASKS[task](row) for row in rows[start::stride]]


_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwxz" for vowel in "aeiou"]


def random_words(count: int, words: int = 60) -> list[Messages]:
    """Prompts that nothing can be guessed of: lists of made-up words, to be continued."""
    source = random.Random(0)

    def word() -> str:
        return "".join(source.choices(_SYLLABLES, k=source.randint(2, 4)))

    return [
        _user("Continue this list of random words:\n" + " ".join(word() for _ in range(words))) for _ in range(count)
    ]
