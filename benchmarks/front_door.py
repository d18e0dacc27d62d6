"""What the front doors add to the engine: seconds to the first token and of whole calls, in one run.

    python benchmarks/front_door.py

Arms: ``generate`` is Transformers' own; ``engine`` an ``Engine``, ``enable`` and ``lookahead generate`` (one engine per
call, weights not packed) the doors of Transformers' users. All decode the same prompt greedily; the arms take turns.
The first token is a call with one new token. ``overhead`` is what the call spends outside the engine's steps. Medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

import lookahead_decoding
from lookahead_decoding import DecodingStatistics, Engine

PROMPT = "Explain in a few sentences why the sky is blue, and why it is red in the evening."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    engine = Engine.from_pretrained(arguments.model, dtype=arguments.dtype, tuned=False)
    model = engine.model
    ids = torch.tensor([engine.encode([{"role": "user", "content": PROMPT}])])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
    enabled = lookahead_decoding.enable(model)
    inside = enabled.__call__

    def by_engine(count: int, spent: DecodingStatistics) -> None:
        engine.forget()
        completion = engine.generate(ids[0].tolist(), max_new_tokens=count, temperature=0)
        spent += completion.statistics

    doors: dict[str, Callable[[int, DecodingStatistics], object]] = {
        "generate": lambda count, _: type(model).generate(model, **inputs, max_new_tokens=count),
        "engine": by_engine,
        "enable": lambda count, spent: inside(model, **inputs, max_new_tokens=count, statistics=spent),
        "lookahead generate": lambda count, spent: lookahead_decoding.generate(
            model, **inputs, max_new_tokens=count, statistics=spent
        ),
    }
    for door in doors.values():
        door(4, DecodingStatistics())
    seconds: dict[tuple[str, int], list[float]] = {}
    overhead: dict[str, list[float]] = {}
    for _ in range(arguments.repeats):
        for count in (1, arguments.max_new_tokens):
            for name, door in doors.items():
                spent = DecodingStatistics()
                begun = time.perf_counter()
                door(count, spent)
                took = time.perf_counter() - begun
                seconds.setdefault((name, count), []).append(took)
                if spent.steps:
                    overhead.setdefault(name, []).append(took - spent.seconds)
    for name in doors:
        line = {
            "door": name,
            "first_token_ms": round(1e3 * statistics.median(seconds[name, 1]), 1),
            "call_ms": round(1e3 * statistics.median(seconds[name, arguments.max_new_tokens]), 1),
            "overhead_ms": round(1e3 * statistics.median(overhead[name]), 2) if name in overhead else None,
            "prompt_tokens": ids.shape[1],
            "new_tokens": arguments.max_new_tokens,
            "dtype": arguments.dtype,
            "threads": torch.get_num_threads(),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
