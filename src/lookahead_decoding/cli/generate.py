"""``lookahead generate``."""

from __future__ import annotations

import json
from typing import Annotated

from lookahead_decoding.cli.failures import EXIT_FAILED
from lookahead_decoding.cli.options import (
    AsJson,
    GenerationOptions,
    GuessingOptions,
    Memory,
    Model,
    ModelOptions,
    NoColor,
    Verbose,
    output_option,
)
from lookahead_decoding.cli.prompt import PromptOptions
from lookahead_decoding.cli.report import details, note, summary, tuning, verdict
from lookahead_decoding.cli.screen import Screen
from lookahead_decoding.cli.setup import open_engine, remembering

Compare = Annotated[
    bool,
    output_option("--compare", help="Decode plainly as well; tell the speed-up and whether the tokens agree."),
]


def generate(
    *,
    prompt: PromptOptions,
    model: Model = None,
    load: ModelOptions,
    guessing: GuessingOptions,
    generation: GenerationOptions,
    memory: Memory = None,
    compare: Compare = False,
    as_json: AsJson = False,
    no_color: NoColor = False,
    verbose: Verbose = False,
) -> int:
    """Complete a prompt; the text streams as it is made."""
    lookahead = guessing.resolve()
    given = prompt.resolve()
    options = generation.to_dict()
    engine, _ = open_engine(model, load, lookahead, verbose=verbose)

    from lookahead_decoding.compare import compare_with_plain, warm_up

    ids = engine.encode(given)
    screen = Screen(engine.config, no_color=no_color, mute=as_json)
    if compare:
        warm_up(engine, ids)
        engine.forget()
    screen.legend()
    with remembering(engine, memory):
        completion = screen.stream(engine.stream(ids, **options))
    comparison = compare_with_plain(engine, ids, completion, **options) if compare else None

    if as_json:
        print(json.dumps((comparison or completion).to_dict()))
    else:
        if comparison is not None and comparison.plain.text != completion.text:
            note("Plain decoding:")
            print(comparison.plain.text)
        note(summary(completion))
        if comparison is not None:
            note(verdict(comparison, engine))
        if generation.seed is not None and not completion.sampling["do_sample"]:
            note("Decoding was greedy, so the seed had no use; --temperature turns sampling on.")
    if verbose:
        details(completion)
        note(f"tuned: {tuning(engine)}")
    return EXIT_FAILED if comparison is not None and comparison.is_bug else 0
