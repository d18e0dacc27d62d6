"""Wall-clock time of whole answers, prefill included: lookahead beside plain decoding and what Transformers has.

    python benchmarks/wall_clock.py mt-bench PATH/mt_bench_question.jsonl --stride 10
    python benchmarks/wall_clock.py spec-bench PATH/question.jsonl --category translation --arms plain default
    python benchmarks/wall_clock.py random-words --temperature 1.5 --arms plain default

Arms: ``generate`` is Transformers' own greedy or sampled decoding, ``prompt-lookup`` the same with
``prompt_lookup_num_tokens=10``; any other is a preset or a JSON object of options for one engine, whose step times
and profile all of them share. ``plain`` is one token per step on that engine, without drafting code. The arms take
turns on every prompt, in an order that is turned each time. Ratios are of tokens per second, per prompt, to every
other arm; their medians are printed as one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from prompts import TASKS, Messages, load_prompts, random_words

from lookahead_decoding import Engine
from lookahead_decoding.statistics import DecodingStatistics

RANDOM_WORDS = "random-words"
TRANSFORMERS_ARMS: dict[str, dict[str, Any]] = {"generate": {}, "prompt-lookup": {"prompt_lookup_num_tokens": 10}}

Arm = Callable[[Messages], tuple[int, DecodingStatistics | None]]


def transformers_arm(engine: Engine, options: dict[str, Any], arguments: argparse.Namespace) -> Arm:
    """Decode with ``model.generate``."""

    def run(prompt: Messages) -> tuple[int, None]:
        ids = torch.tensor([engine.encode(prompt)])
        sampling = {"do_sample": False}
        if arguments.temperature:
            torch.manual_seed(0)
            sampling = {"do_sample": True, "temperature": arguments.temperature}
        output = engine.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=arguments.max_new_tokens,
            pad_token_id=engine.tokenizer.pad_token_id,
            **sampling,
            **options,
        )
        return output.shape[1] - ids.shape[1], None

    return run


def engine_arm(engine: Engine, lookahead: Any, arguments: argparse.Namespace) -> Arm:
    """Decode with a preset or config."""

    def run(prompt: Messages) -> tuple[int, DecodingStatistics]:
        completion = engine.generate(
            prompt,
            lookahead=lookahead,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            seed=0 if arguments.temperature else None,
        )
        engine.forget()
        return len(completion.token_ids), completion.statistics

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=[*TASKS, RANDOM_WORDS])
    parser.add_argument("data", type=Path, nargs="?", help=f"not for {RANDOM_WORDS}")
    parser.add_argument("--category", help="of Spec-Bench")
    parser.add_argument("--stride", type=int, default=10)
    parser.add_argument("--arms", nargs="+", default=["generate", "prompt-lookup", "plain", "default"])
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if (arguments.data is None) != (arguments.task == RANDOM_WORDS):
        parser.error(f"{arguments.task} {'takes no' if arguments.data else 'needs a'} data file")

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    engine = Engine.from_pretrained(arguments.model, dtype=arguments.dtype, tuned=False)
    if arguments.task == RANDOM_WORDS:
        prompts = random_words(12)
    else:
        prompts = load_prompts(arguments.task, arguments.data, arguments.stride, arguments.category)
    arms: dict[str, Arm] = {}
    for name in arguments.arms:
        if name in TRANSFORMERS_ARMS:
            arms[name] = transformers_arm(engine, TRANSFORMERS_ARMS[name], arguments)
        else:
            arms[name] = engine_arm(engine, json.loads(name) if name.startswith("{") else name, arguments)
    for arm in arms.values():
        arm(prompts[0])

    rates: dict[str, list[float]] = {name: [] for name in arms}
    totals = {name: DecodingStatistics() for name in arms}
    order = list(arms)
    for prompt in prompts * arguments.repeats:
        for name in order:
            begun = time.perf_counter()
            tokens, counts = arms[name](prompt)
            rates[name].append(tokens / (time.perf_counter() - begun))
            if counts is not None:
                totals[name] += counts
        order = [*order[1:], order[0]]
    for name, mine in rates.items():
        total = totals[name]
        line: dict[str, Any] = {"task": arguments.task, "category": arguments.category, "arm": name}
        line["tokens_per_second"] = round(statistics.median(mine), 2)
        line["ratio_to"] = {
            other: round(statistics.median(a / b for a, b in zip(mine, theirs, strict=True)), 3)
            for other, theirs in rates.items()
            if other != name
        }
        if total.steps:
            line |= {
                "tokens_per_step": round(total.tokens_per_step, 3),
                "nodes_per_step": round(total.nodes_per_step, 1),
                "steps_at_width_1": round(statistics.mean(width == 1 for width in total.widths), 3),
                "estimated_speedup": round(total.estimated_speedup, 3),
            }
        line |= {
            "prompts": len(prompts),
            "repeats": arguments.repeats,
            "temperature": arguments.temperature,
            "dtype": arguments.dtype,
            "threads": torch.get_num_threads(),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
