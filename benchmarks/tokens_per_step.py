"""Tokens per step and nodes per step of presets and configs, over a task's prompts and window seeds.

    python benchmarks/tokens_per_step.py mt-bench PATH/mt_bench_question.jsonl --stride 10 --seeds 3 \
        --lookahead paper --lookahead '{"preset": "paper", "sources": ["prompt_ngrams", "pool"]}'

With ``--along-plain FILE`` every configuration is walked along the text of plain decoding, so that a tie between
two tokens in bf16 does not give one of them another, harder text; FILE keeps these texts.

With ``--warm`` the rows behind those measured are answered first, and what was learned of them is a draft memory.

Totals are total tokens over total steps; a step is a forward pass that decides at least one token. The median
over prompts stands beside them, for some outputs of small models loop and loops are easy to guess (their
share is printed as well). Prints one JSON line per configuration.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from prompts import TASKS, Messages, load_prompts
from torch import Tensor

from lookahead_decoding import DraftMemory, Engine, LookaheadConfig
from lookahead_decoding.config import as_config
from lookahead_decoding.request import resolve
from lookahead_decoding.sampling import TokenDrawer
from lookahead_decoding.statistics import DecodingStatistics


def parse_lookahead(text: str) -> LookaheadConfig:
    return as_config(json.loads(text) if text.startswith("{") else text)


class PlainText:
    """Stands in for a session's drawer: draws the tokens of a known text."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = iter(tokens)
        self.temperature, self.knows_noise = 0.0, False

    def draw(self, ids: Tensor, logits: Tensor) -> int:
        return next(self._tokens)

    def close(self) -> None:
        pass


def walk_along(engine: Engine, prompt: Messages, text: list[int], config: LookaheadConfig) -> DecodingStatistics:
    """Statistics of decoding with this config if the model were to write this text."""
    ids = engine.encode(prompt)
    inputs = torch.tensor([ids], device=engine.runner.device)
    request = resolve(
        engine.model,
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=len(text),
        do_sample=False,
    )
    request.criteria[:] = [each for each in request.criteria if each.__class__.__name__ != "EosTokenCriteria"]
    session = engine.open(ids, request, lookahead=config)
    session.drawer = PlainText(text)  # type: ignore[assignment]
    for _ in engine.run([session]):
        pass
    assert session.tokens == text
    engine.forget()
    return session.statistics


def plain_texts(engine: Engine, prompts: list[Messages], max_new_tokens: int, path: Path) -> list[list[int]]:
    """The texts of greedy plain decoding, from the file or made and kept there."""
    if path.exists():
        texts = json.loads(path.read_text())
        if len(texts) != len(prompts):
            raise SystemExit(f"{path} holds {len(texts)} texts for {len(prompts)} prompts; give another file")
        return texts
    texts = []
    for prompt in prompts:
        completion = engine.generate(prompt, lookahead="plain", max_new_tokens=max_new_tokens, temperature=0)
        texts.append(list(completion.token_ids))
    path.write_text(json.dumps(texts))
    return texts


def loops(tokens: Sequence[int], longest: int = 32, repeats: int = 3) -> bool:
    """Whether a text ends in the same up to ``longest`` tokens over and over."""
    return any(
        len(tokens) >= period * repeats and tokens[-period * (repeats - 1) :] == tokens[-period * repeats : -period]
        for period in range(1, longest + 1)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("data", type=Path)
    parser.add_argument("--stride", type=int, default=10)
    parser.add_argument("--category", help="of Spec-Bench")
    parser.add_argument("--along-plain", type=Path, metavar="FILE")
    parser.add_argument("--blind", action="store_true", help="sample without looking at the noise while guessing")
    parser.add_argument("--warm", action="store_true", help="begin with what the next row of each stride has taught")
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0, 1, ... of the window and of sampling")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--threads", type=int, help="torch's default, unless other work is running")
    parser.add_argument("--lookahead", action="append", help="a preset or a JSON object of options; repeatable")
    arguments = parser.parse_args()
    if arguments.along_plain and (arguments.temperature or arguments.repetition_penalty or arguments.blind):
        parser.error("--along-plain walks along greedy text without penalties; leave the sampling options out")

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    engine = Engine.from_pretrained(arguments.model, dtype=arguments.dtype, tuned=False)
    prompts = load_prompts(arguments.task, arguments.data, arguments.stride, arguments.category)
    others = load_prompts(arguments.task, arguments.data, arguments.stride, arguments.category, start=1)
    texts = None
    if arguments.along_plain:
        texts = plain_texts(engine, prompts, arguments.max_new_tokens, arguments.along_plain)
    if arguments.blind:
        sighted = TokenDrawer.__init__
        TokenDrawer.__init__ = lambda *a, **k: sighted(*a, **{**k, "draws_ahead": False})  # type: ignore[method-assign]
    for text in arguments.lookahead or ["paper", "default"]:
        config = parse_lookahead(text)
        by_seed, per_prompt, outputs = [], [], []
        if arguments.warm:
            engine.memory = DraftMemory.empty(engine.name, engine.runner.vocab_size)
            for prompt in others:
                engine.generate(
                    prompt, lookahead=config, max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature
                )
        for seed in range(arguments.seeds):
            total = DecodingStatistics()
            for index, prompt in enumerate(prompts):
                if texts is not None:
                    statistics_ = walk_along(engine, prompt, texts[index], config.replace(window_seed=seed))
                    total += statistics_
                    per_prompt.append(statistics_.tokens_per_step)
                    outputs.append(texts[index])
                    continue
                completion = engine.generate(
                    prompt,
                    lookahead=config.replace(window_seed=seed),
                    max_new_tokens=arguments.max_new_tokens,
                    temperature=arguments.temperature,
                    top_p=arguments.top_p,
                    repetition_penalty=arguments.repetition_penalty,
                    seed=None if arguments.temperature == 0 else seed,
                )
                outputs.append(completion.token_ids)
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
            "looping_outputs": round(statistics.mean(map(loops, outputs)), 3),
            "nodes_per_step": round(summary.nodes_per_step, 1),
            "new_tokens": summary.new_tokens,
            "accepted_by_source": dict(summary.accepted_by_source),
            "along_plain": texts is not None,
            "dtype": arguments.dtype,
            "threads": torch.get_num_threads(),
            "temperature": arguments.temperature,
            "top_p": arguments.top_p,
            "blind": arguments.blind,
            "warm": arguments.warm,
            "repetition_penalty": arguments.repetition_penalty,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
