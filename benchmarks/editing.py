"""What ``references`` are worth when code is asked for again with a change.

    python benchmarks/editing.py

The model writes some code, then the same request comes with one more wish, as when an editor sends its file for
another round: once without references, once with the first answer as a reference. It is never part of the prompt.
Prints tokens per step of the second round, both ways, and in all, as JSON lines.
"""

from __future__ import annotations

import argparse
import json

import torch

from lookahead_decoding import Engine
from lookahead_decoding.statistics import DecodingStatistics

TASKS = (
    ("Write a Python class Stack with push, pop and peek.", "Add a method is_empty."),
    ("Write a Python function that counts the words of a text file.", "Ignore upper and lower case."),
    ("Write a Python function that sorts a list of numbers with bubble sort.", "Stop early when nothing was swapped."),
    ("Write an HTML page with a title, a heading and a list of three fruits.", "Add a fourth fruit."),
    ("Write a Python class BankAccount with deposit and withdraw.", "Add a docstring to each method."),
    ("Write a Python function fibonacci(n) that returns a list.", "Add type hints."),
    ("Write a JavaScript function that validates an email address.", "Add a comment to each line."),
    ("Write a SQL schema for a library with books, authors and loans.", "Add a table of members."),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--budget", type=int, default=32)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    engine = Engine.from_pretrained(
        arguments.model,
        dtype=arguments.dtype,
        lookahead={"budget": arguments.budget, "adaptive": False},
        tuned=False,
    )
    options = {"max_new_tokens": arguments.max_new_tokens, "temperature": 0}
    totals = {"without": DecodingStatistics(), "with": DecodingStatistics()}
    for request, wish in TASKS:
        before = engine.generate([{"role": "user", "content": request}], **options)
        prompt = [{"role": "user", "content": f"{request} {wish}"}]
        line: dict[str, object] = {"request": f"{request} {wish}"}
        for name, references in (("without", []), ("with", [list(before.token_ids)])):
            completion = engine.generate(prompt, references=references, **options)
            totals[name] += completion.statistics
            line[name] = round(completion.statistics.tokens_per_step, 3)
        print(json.dumps(line), flush=True)
    without, with_ = (totals[name].tokens_per_step for name in ("without", "with"))
    print(json.dumps({"all": True, "without": round(without, 3), "with": round(with_, 3), "gain": with_ / without}))


if __name__ == "__main__":
    main()
