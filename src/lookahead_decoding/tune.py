"""What ``lookahead tune`` does: measure how step time grows, try ways to guess, and make a profile of the best.

Wall time of a few answers would be noise. Steps of every width are timed in turn instead, and a way to guess is judged
by the steps it makes on sample prompts, each at its measured price.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from lookahead_decoding.budget import CostCurve
from lookahead_decoding.cache import KVStore, check_memory
from lookahead_decoding.config import LookaheadConfig
from lookahead_decoding.draft import load_source
from lookahead_decoding.engine import Engine
from lookahead_decoding.errors import CapacityError, ConfigError
from lookahead_decoding.model import ModelRunner
from lookahead_decoding.plan import StepPlan
from lookahead_decoding.profile import Figures, Profile, StepTimes, versions
from lookahead_decoding.request import resolve
from lookahead_decoding.sampling import likeliest
from lookahead_decoding.tree import TokenTree

WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
CONTEXTS = (128, 1024, 4096)
BUDGETS = (8, 16, 32, 64, 128)
WINDOWS = ((2, 3, 4), (4, 4, 7), (7, 4, 7))
"""W, N and G of the windows that are tried, beside none."""
REPEATS = 7
MAX_NEW_TOKENS = 96

_MAX_DEPTH = 15
_HARDLY_EVER = 0.02
"""Of the steps, how many may be wider than the budget."""
_AS_FAST = 0.98
"""Of the fastest, how fast a simpler way to guess has to be for it to be taken."""
_LEAST_ROOM = 16
"""Tokens that an answer must have room for."""

Progress = Callable[[str, int, int], None]
"""Told what is done, how much of it, and how much there is."""


@dataclass(frozen=True)
class Trial:
    """A way to guess, tried on the sample prompts: all steps but those that decide the first tokens.

    Attributes:
        config: with a budget that its steps hardly ever exceed.
        texts: the answers' tokens.
        steps, tokens, nodes: how many.
        seconds: what the steps take by the measured step times.
        plain_seconds: what the same tokens take one at a time.
        flops_per_step: relative to plain decoding's.
    """

    config: LookaheadConfig
    texts: Sequence[Sequence[int]]
    steps: int
    tokens: int
    nodes: int
    seconds: float
    plain_seconds: float
    flops_per_step: float

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    @property
    def nodes_per_step(self) -> float:
        return self.nodes / self.steps

    @property
    def tokens_per_second(self) -> float:
        """Expected, of the model's steps."""
        return self.tokens / self.seconds

    @property
    def plain_tokens_per_second(self) -> float:
        return self.tokens / self.plain_seconds

    @property
    def speedup(self) -> float:
        """Expected, over plain decoding."""
        return self.plain_seconds / self.seconds


@dataclass(frozen=True)
class Tuning:
    """What was found: the profile, and what was tried for it."""

    profile: Profile
    trials: Sequence[Trial]
    best: Trial


def tune(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    contexts: Sequence[int] = CONTEXTS,
    max_nodes: int = WIDTHS[-1],
    repeats: int = REPEATS,
    max_new_tokens: int = MAX_NEW_TOKENS,
    progress: Progress = lambda what, done, total: None,
) -> Tuning:
    """Measure a model on this machine, and choose how to guess.

    Args:
        engine: the model's, with the number of threads it will be used with.
        prompts: token ids of typical prompts; those that leave no room for an answer are left out.
        contexts: numbers of cached tokens to time steps over, cut to what the model takes.
        max_nodes: the widest step to time.
        repeats: timed steps of each kind.
        max_new_tokens: per answer.
        progress: told of every timed step and every answer.

    Raises:
        CapacityError: no prompt leaves room for an answer.
        ConfigError: a model with so few positions that there is nothing to measure.
    """
    runner = engine.runner
    room = runner.max_position
    fitting = [ids for ids in prompts if room is None or len(ids) + _LEAST_ROOM <= room]
    if not fitting:
        raise CapacityError(f"no prompt leaves room for an answer in the model's context of {room} tokens")
    widths = [width for width in WIDTHS if width <= max_nodes and (room is None or 2 * width <= room)]
    if len(widths) < 2:
        raise ConfigError(f"a width of 2 is the least to be measured; the bound is {max_nodes}, the context {room}")
    if room is not None:
        contexts = sorted({min(context, room - widths[-1]) for context in contexts})
    times = measure(runner, widths, sorted(set(contexts)), repeats=repeats, progress=progress)
    trials: list[Trial] = []
    configs = candidates(widths[-1])
    for i, config in enumerate(configs):

        def answered(j: int, before: int = i * len(fitting)) -> None:
            progress("trying ways to guess", before + j, len(configs) * len(fitting))

        texts = trials[0].texts if trials else None
        trials.append(
            attempt(engine, fitting, config, times, texts=texts, max_new_tokens=max_new_tokens, answered=answered)
        )
    fastest = max(trial.tokens_per_second for trial in trials)
    best = next(trial for trial in trials if trial.tokens_per_second >= _AS_FAST * fastest)
    profile = Profile(
        key=engine.profile_key,
        versions=versions(),
        times=times,
        config=best.config,
        figures=Figures(
            tokens_per_step=round(best.tokens_per_step, 4),
            nodes_per_step=round(best.nodes_per_step, 2),
            plain_tokens_per_second=round(best.plain_tokens_per_second, 2),
            tokens_per_second=round(best.tokens_per_second, 2),
            flops_per_step=round(best.flops_per_step, 2),
        ),
    )
    return Tuning(profile, trials, best)


# Step times


def measure(
    runner: ModelRunner, widths: Sequence[int], contexts: Sequence[int], *, repeats: int, progress: Progress
) -> StepTimes:
    """Median step times. Widths and contexts take turns, so that a busy moment spoils none of them alone.

    Args:
        runner: the model's.
        widths: ascending from 1.
        contexts: ascending.
        repeats: steps of each width over each context, after one that is not counted.
        progress: told of each step.
    """
    check_memory(runner.spec, sum(contexts) + len(contexts) * widths[-1])
    rng = random.Random(0)
    plans = [_random_plan(width, runner.vocab_size, rng) for width in widths]
    num_successors = max(load_source(name, LookaheadConfig()).successors for name in LookaheadConfig().sources)
    samples: dict[tuple[int, int], list[float]] = {}
    total = (repeats + 1) * len(contexts) * len(widths)
    done = 0
    with torch.inference_mode():
        stores = [_filled(runner, context) for context in contexts]
        for repeat in range(repeats + 1):
            for row, store in enumerate(stores):
                columns = range(len(widths))
                for column in columns if repeat % 2 == 0 else reversed(columns):
                    seconds = _time(runner, plans[column], store, num_successors)
                    if repeat > 0:
                        samples.setdefault((row, column), []).append(seconds)
                    done += 1
                    progress("timing steps", done, total)
    return StepTimes(
        nodes=tuple(widths),
        contexts=tuple(contexts),
        seconds=tuple(
            tuple(float(f"{statistics.median(samples[row, column]):.4g}") for column in range(len(widths)))
            for row in range(len(contexts))
        ),
    )


def _random_plan(width: int, vocab_size: int, rng: random.Random) -> StepPlan:
    """A branching tree of random tokens, all of them read."""
    tree = TokenTree.chain([rng.randrange(vocab_size)])
    while len(tree) < width:
        parent = rng.randrange(len(tree))
        if tree.depths[parent] < _MAX_DEPTH:
            tree.add(parent, rng.randrange(vocab_size))
    return StepPlan(tree, start=0, reads=tuple(range(width)))


def _filled(runner: ModelRunner, context: int) -> KVStore:
    """A store of so many random tokens. Not of zeros: memory that was never written is read from nowhere."""
    store = KVStore(runner.spec)
    store.reserve(context + WIDTHS[-1])
    for layer, shapes in enumerate(runner.spec.layers):
        if shapes is not None:
            keys, values = (
                torch.randn(shape.heads, context, shape.dim, device=shape.device).to(shape.dtype) for shape in shapes
            )
            store.write(layer, keys, values)
    store.keep(range(context))
    return store


def _time(runner: ModelRunner, plan: StepPlan, store: KVStore, num_successors: int) -> float:
    """Seconds of a step: the pass, the draws on a path of two, a look at all rows for the sources, the kept path."""
    length = store.length
    path = range(min(2, len(plan.tree)))
    _synchronize(runner.device)
    begun = time.perf_counter()
    (logits,) = runner.forward([(plan, store, None)])
    for node in path:
        int(logits[node].float().argmax())
    likeliest(logits, num_successors)
    store.keep(path)
    _synchronize(runner.device)
    seconds = time.perf_counter() - begun
    store.truncate(length)
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Ways to guess


def candidates(max_nodes: int) -> list[LookaheadConfig]:
    """The ways to guess that are tried, the simplest first: without a window, and with those that fit."""
    base = LookaheadConfig(budget=max_nodes)
    sources = base.sources
    return [
        base,
        *(
            base.replace(window=W, ngram=N, guesses=G, sources=sources)
            for W, N, G in WINDOWS
            if max_nodes > W * (N - 1)
        ),
    ]


class _FixedCosts(CostCurve):
    """Step times as they were measured, whatever the steps of a trial take: the next run makes the same trees."""

    def record(self, nodes: int, context: int, seconds: float) -> None:
        pass


class _Follow(LogitsProcessor):  # type: ignore[misc]
    """Makes the model give a certain answer.

    Args:
        text: the answer's tokens.
        start: the prompt's length.
    """

    def __init__(self, text: Sequence[int], start: int) -> None:
        self._text = text
        self._start = start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._text[input_ids.shape[1] - self._start]] = 0.0
        return forced


def attempt(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    config: LookaheadConfig,
    times: StepTimes,
    *,
    texts: Sequence[Sequence[int]] | None = None,
    max_new_tokens: int,
    answered: Callable[[int], None] = lambda count: None,
) -> Trial:
    """Decode the prompts in one way, greedily, and add up what its steps cost by the measured step times.

    Args:
        engine: the model's.
        prompts: token ids.
        config: how to guess; its budget is the widest step that is looked at.
        times: the step times, for the trees' widths and for the sum.
        texts: the answers to be given. In bfloat16 those of two trials would part at a tie, and one could be easier to
            guess than the other.
        max_new_tokens: per answer.
        answered: told how many prompts are done.
    """
    widths: list[int] = []
    written: list[list[int]] = []
    tokens = 0
    seconds = plain_seconds = flops = plain_flops = 0.0
    flops_of = flops_per_step(engine.runner)
    own_costs, engine.costs = engine.costs, _FixedCosts(times.at)
    own_memory, engine.memory = engine.memory, None  # no trial gains by those before it
    try:
        for i, prompt in enumerate(prompts):
            engine.forget()
            ids = torch.tensor([list(prompt)], device=engine.runner.device)
            request = resolve(
                engine.model,
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                logits_processor=LogitsProcessorList([] if texts is None else [_Follow(texts[i], len(prompt))]),
            )
            session = engine.open(prompt, request, lookahead=config, max_length=engine.runner.max_position)
            nodes = context = 0
            for _, advance in engine.run([session]):
                if nodes > 0:  # the prompt's pass is over
                    widths.append(session.statistics.nodes - nodes)
                    tokens += len(advance.tokens)
                    seconds += times.at(widths[-1], context)
                    flops += flops_of(widths[-1], context)
                    plain_flops += flops_of(1, context)
                    plain_seconds += sum(times.at(1, context + j) for j in range(len(advance.tokens)))
                nodes, context = session.statistics.nodes, session.store.length
            written.append(session.tokens)
            answered(i + 1)
    finally:
        engine.costs, engine.memory = own_costs, own_memory
        engine.forget()
    if not widths:
        raise CapacityError("every answer ends with its first token; give prompts with longer answers")
    return Trial(
        config=config.replace(budget=_budget(widths, least=config.window * (config.ngram - 1))),
        texts=written,
        steps=len(widths),
        tokens=tokens,
        nodes=sum(widths),
        seconds=seconds,
        plain_seconds=plain_seconds,
        flops_per_step=flops / plain_flops,
    )


def _budget(widths: Sequence[int], *, least: int) -> int:
    """The smallest of the budgets that hardly any step is wider than, and that the window fits."""
    allowed = _HARDLY_EVER * len(widths)
    fitting = (b for b in BUDGETS if b >= least and sum(width > b for width in widths) <= allowed)
    return next(fitting, BUDGETS[-1])


def flops_per_step(runner: ModelRunner) -> Callable[[int, int], float]:
    """Floating-point operations of a step, by number of nodes and of cached tokens.

    They are ``nodes x (2 x parameters + attention)``. ``parameters`` are all but the input embedding, unless the output
    layer shares it: each takes part in one multiplication and one addition per node. ``attention`` is
    ``2 x context x heads x (key size + value size)``, summed over the layers: a product with every key and a sum of
    every value. Experts count whether they are used or not, and sliding windows as if they had no end.

    Relative to a plain step over the same context this is the number of nodes per step: what parallel decoding pays for
    making fewer steps.
    """
    model = runner.model
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if output is not None and output.weight is not embedding.weight:
        parameters -= embedding.weight.numel()
    per_cached_token = 0
    for shapes in runner.spec.layers:
        if shapes is not None:
            keys, values = shapes
            heads = getattr(runner.text_config, "num_attention_heads", None) or keys.heads
            per_cached_token += 2 * heads * (keys.dim + values.dim)
    return lambda nodes, context: float(nodes * (2 * parameters + per_cached_token * context))
