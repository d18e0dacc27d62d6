"""What the n-gram pool costs: microseconds per token (append and look up) and bytes, over a long text.

    python benchmarks/pool_cost.py --tokens 32768

The text repeats itself in part, as text does: half of its tokens come from phrases seen before. Prints a table, then
one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import tracemalloc

from lookahead_decoding import LookaheadConfig
from lookahead_decoding.sources import PromptNgrams


def text(tokens: int, vocabulary: int, rng: random.Random) -> list[int]:
    phrases = [[rng.randrange(vocabulary) for _ in range(rng.randrange(3, 12))] for _ in range(400)]
    ids: list[int] = []
    while len(ids) < tokens:
        ids += rng.choice(phrases) if rng.random() < 0.15 else [rng.randrange(vocabulary)]
    return ids[:tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--ngram", type=int, default=5)
    parser.add_argument("--guesses", type=int, default=15)
    parser.add_argument("--pool-bytes", type=int, default=LookaheadConfig().pool_bytes)
    arguments = parser.parse_args()
    config = LookaheadConfig(ngram=arguments.ngram, guesses=arguments.guesses, pool_bytes=arguments.pool_bytes)
    ids = text(arguments.tokens, arguments.vocabulary, random.Random(0))

    source = PromptNgrams(config)
    seconds = []
    for token in ids:
        begun = time.perf_counter()
        source.extend([token])
        for _ in source.propose():
            pass
        seconds.append(time.perf_counter() - begun)
    tracemalloc.start()
    measured = PromptNgrams(config)
    measured.extend(ids)
    real_bytes, _ = tracemalloc.get_traced_memory()
    quarter = len(ids) // 4
    line = {
        "tokens": len(ids),
        "ngram": config.ngram,
        "guesses": config.guesses,
        "us_per_token": round(1e6 * sum(seconds) / len(ids), 2),
        "us_first_quarter": round(1e6 * sum(seconds[:quarter]) / quarter, 2),
        "us_last_quarter": round(1e6 * sum(seconds[-quarter:]) / quarter, 2),
        "claimed_mib": round(measured.nbytes / 2**20, 2),
        "real_mib": round(real_bytes / 2**20, 2),
        "bound_mib": round(config.pool_bytes / 2**20, 2),
    }
    for name, value in line.items():
        print(f"{name:>18}  {value}")
    print(json.dumps(line))


if __name__ == "__main__":
    main()
