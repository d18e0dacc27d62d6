"""Tokens per step and nodes per step of presets and configs, over a task's prompts and window seeds.

    python benchmarks/tokens_per_step.py mt-bench PATH/mt_bench_question.jsonl --stride 10 --seeds 3 \
        --lookahead paper --lookahead '{"preset": "paper", "sources": ["prompt_ngrams", "pool"]}'

Totals are total tokens over total steps; a step is a forward pass that decides at least one token. The median
over prompts stands beside them, for some outputs of small models loop and loops are easy to guess. Prints one
JSON line per configuration.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from prompts import TASKS, load_prompts

from lookahead_decoding import Engine, LookaheadConfig
from lookahead_decoding.config import as_config
from lookahead_decoding.statistics import DecodingStatistics


def parse_lookahead(text: str) -> LookaheadConfig:
    return as_config(json.loads(text) if text.startswith("{") else text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("data", type=Path)
    parser.add_argument("--stride", type=int, default=10)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--seeds", type=int, default=1, help="window seeds 0, 1, ...")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--threads", type=int, help="torch's default, unless other work is running")
    parser.add_argument("--lookahead", action="append", help="a preset or a JSON object of options; repeatable")
    arguments = parser.parse_args()

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    engine = Engine.from_pretrained(arguments.model, dtype=arguments.dtype)
    prompts = load_prompts(arguments.task, arguments.data, arguments.stride)
    for text in arguments.lookahead or ["paper", "default"]:
        config = parse_lookahead(text)
        by_seed, per_prompt = [], []
        for seed in range(arguments.seeds):
            total = DecodingStatistics()
            for prompt in prompts:
                completion = engine.generate(
                    prompt,
                    lookahead=config.replace(window_seed=seed),
                    max_new_tokens=arguments.max_new_tokens,
                    temperature=arguments.temperature,
                    top_p=arguments.top_p,
                    repetition_penalty=arguments.repetition_penalty,
                    seed=None if arguments.temperature == 0 else 0,
                )
                total += completion.statistics
                per_prompt.append(completion.statistics.tokens_per_step)
            by_seed.append(total)
        summary = sum(by_seed, DecodingStatistics())
        line = {
            "task": arguments.task,
            "prompts": len(prompts),
            "lookahead": text,
            "tokens_per_step": round(statistics.mean(t.tokens_per_step for t in by_seed), 3),
            "by_seed": [round(t.tokens_per_step, 3) for t in by_seed],
            "median_of_prompts": round(statistics.median(per_prompt), 3),
            "nodes_per_step": round(summary.nodes_per_step, 1),
            "new_tokens": summary.new_tokens,
            "accepted_by_source": dict(summary.accepted_by_source),
            "dtype": arguments.dtype,
            "threads": torch.get_num_threads(),
            "temperature": arguments.temperature,
            "top_p": arguments.top_p,
            "repetition_penalty": arguments.repetition_penalty,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
