"""From logits to tokens: the same ones, and the same random state, as ``torch.multinomial`` leaves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from lookahead_decoding.errors import ModelOutputError
from lookahead_decoding.recycle import Successors
from lookahead_decoding.sampling import NoiseStream, TokenDrawer, likeliest

CPU = torch.device("cpu")
VOCABULARIES = [7, 512, 49_152]
NUM_DRAWS = 12
IDS = torch.tensor([[1, 2, 3]])


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def distributions(vocab: int, kind: str) -> Iterator[Tensor]:
    """Logits ``[V]`` of a few steps."""
    source = generator(vocab)
    for step in range(NUM_DRAWS):
        logits = 3 * torch.randn(vocab, generator=source)
        if kind == "top-k":
            logits = TopKLogitsWarper(5)(IDS, logits[None])[0]
        elif kind == "one-hot":
            only = step * 5 % vocab
            logits = torch.full((vocab,), -torch.inf).index_fill(0, torch.tensor([only]), 1.5)
        yield logits


@pytest.fixture
def own_random_state() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.parametrize("kind", ["full", "top-k", "one-hot"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_sampled_tokens_and_the_generator_afterwards_are_multinomials(vocab: int, kind: str) -> None:
    plain, ours = generator(), generator()
    drawer = TokenDrawer(LogitsProcessorList(), NoiseStream(vocab, ours, CPU))
    for logits in distributions(vocab, kind):
        expected = torch.multinomial(logits[None].softmax(dim=-1), 1, generator=plain)
        assert drawer.draw(IDS, logits[None]) == [int(expected)]
        assert torch.equal(ours.get_state(), plain.get_state())


@pytest.mark.usefixtures("own_random_state")
def test_without_a_generator_the_noise_is_torchs_global_one() -> None:
    torch.manual_seed(11)
    expected = [int(torch.multinomial(logits.softmax(-1), 1)) for logits in distributions(512, "full")]
    state = torch.get_rng_state()
    torch.manual_seed(11)
    drawer = TokenDrawer(LogitsProcessorList(), NoiseStream(512, None, CPU))
    assert [drawer.draw(IDS, logits[None])[0] for logits in distributions(512, "full")] == expected
    assert len(set(expected)) > 1
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_noise_drawn_ahead_is_the_noise_drawn_in_time(vocab: int) -> None:
    in_time = NoiseStream(vocab, generator(), CPU)
    noise = [in_time.at(i).clone() for i in range(6)]
    assert not torch.equal(noise[0], noise[1])
    ahead = NoiseStream(vocab, generator(), CPU)
    for position in (0, 3, 3, 5):
        assert torch.equal(ahead.at(position), noise[position])


def test_asking_twice_for_a_position_draws_once() -> None:
    source = generator()
    stream = NoiseStream(512, source, CPU)
    first = stream.at(0).clone()
    state = source.get_state()
    assert torch.equal(stream.at(0), first)
    assert torch.equal(source.get_state(), state)


def test_noise_of_a_position_that_has_passed_is_refused() -> None:
    stream = NoiseStream(7, generator(), CPU)
    stream.at(3)
    for position in (0, 2):
        with pytest.raises(ValueError, match=f"position {position} was given up; the stream is at 3"):
            stream.at(position)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_greedy_takes_the_first_of_equal_scores(vocab: int) -> None:
    drawer = TokenDrawer(LogitsProcessorList(), None)
    assert drawer.draw(IDS, torch.zeros(1, vocab)) == [0]
    logits = torch.zeros(vocab)
    logits[[vocab - 1, vocab // 2, vocab // 3]] = 1.0
    assert drawer.draw(IDS, logits[None]) == [vocab // 3]


def test_greedy_finds_the_only_possible_token() -> None:
    logits = torch.full((512,), -torch.inf)
    logits[300] = -1e30
    assert TokenDrawer(LogitsProcessorList(), None).draw(IDS, logits[None]) == [300]


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("only", [False, True])
def test_scores_that_are_no_numbers_are_an_error_and_no_token(samples: bool, only: bool) -> None:
    logits = torch.full((512,), torch.nan) if only else torch.randn(512, generator=generator())
    logits[17] = torch.nan
    drawer = TokenDrawer(LogitsProcessorList(), NoiseStream(512, generator(), CPU) if samples else None)
    with pytest.raises(ModelOutputError, match=r"scores for token 4 are not numbers \(NaN\)"):
        drawer.draw(IDS, logits[None])


class Adding(LogitsProcessor):  # type: ignore[misc]
    """Adds to one token's score; in place, as a careless user's processor would."""

    def __init__(self, token: int, amount: float) -> None:
        self.token, self.amount = token, amount
        self.dtypes: list[torch.dtype] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape == (1, 3)
        self.dtypes.append(scores.dtype)
        scores[:, self.token] += self.amount
        return scores


def test_bf16_logits_are_processed_and_compared_in_fp32() -> None:
    logits = torch.zeros(7, dtype=torch.bfloat16)
    logits[2] = 100.0
    logits[4] = 100.0
    adding = Adding(4, 1e-3)  # 100.001 is 100 in bf16
    assert TokenDrawer(LogitsProcessorList([adding]), None).draw(IDS, logits[None]) == [4]
    assert adding.dtypes == [torch.float32]
    assert logits[4] == 100.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_models_logits_are_not_written_to(dtype: torch.dtype) -> None:
    logits = torch.arange(7).to(dtype)
    TokenDrawer(LogitsProcessorList([Adding(0, 50.0)]), None).draw(IDS, logits[None])
    assert torch.equal(logits, torch.arange(7).to(dtype))


def kept(processor: LogitsProcessor) -> tuple[list[Tensor], list[Tensor]]:
    """Scores and logits that are kept of two draws, of ``[0..6]`` and of twice that."""
    drawer = TokenDrawer(LogitsProcessorList([processor]), None, keep_scores=True, keep_logits=True)
    for factor in (1, 2):
        drawer.draw(IDS, factor * torch.arange(7.0)[None])
    assert drawer.scores is not None
    assert drawer.logits is not None
    return drawer.scores, drawer.logits


def test_kept_scores_are_the_processed_ones_and_kept_logits_the_raw_ones() -> None:
    scores, logits = kept(TemperatureLogitsWarper(0.5))
    raw = torch.arange(7.0)[None]
    assert [*map(torch.equal, scores, [raw * 2, raw * 4])] == [True, True]
    assert [*map(torch.equal, logits, [raw, raw * 2])] == [True, True]


def test_a_processor_that_works_in_place_changes_the_kept_logits_as_it_does_in_transformers() -> None:
    scores, logits = kept(Adding(0, 50.0))
    assert [float(row[0, 0]) for row in scores] == [50.0, 50.0]
    assert [float(row[0, 0]) for row in logits] == [50.0, 50.0]


def test_nothing_is_kept_that_was_not_asked_for() -> None:
    drawer = TokenDrawer(LogitsProcessorList(), None)
    drawer.draw(IDS, torch.zeros(1, 7))
    assert drawer.scores is drawer.logits is None


def test_transformers_processors_are_applied_in_their_order() -> None:
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.7), TopKLogitsWarper(4)]
    )
    plain, ours = generator(), generator()
    drawer = TokenDrawer(processors, NoiseStream(512, ours, CPU), keep_scores=True)
    ids = torch.tensor([[5, 9, 300]])
    tokens = []
    for logits in distributions(512, "full"):
        scores = processors(ids, logits[None].clone())
        expected = int(torch.multinomial(scores.softmax(-1), 1, generator=plain))
        tokens += drawer.draw(ids, logits[None])
        assert tokens[-1] == expected
        assert drawer.scores is not None
        assert torch.equal(drawer.scores[-1], scores)
        ids = torch.cat([ids, torch.tensor([[expected]])], dim=1)
    assert len(set(tokens)) > 1


# What sources are shown of the logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 64, 150])
@pytest.mark.parametrize("vocab", [200, 512, 49_152])
def test_the_likeliest_tokens_are_the_topmost_of_each_row(vocab: int, rows: int, dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(rows, vocab, generator=generator(rows))).to(dtype)
    found = likeliest(logits, 8)
    assert len(found) == rows
    for row, successors in zip(logits, found, strict=True):
        # Equal logits, which bfloat16 has many of, may come in any order.
        assert len(set(successors.tokens)) == 8
        assert row[list(successors.tokens)].tolist() == row.topk(8).values.tolist()


@pytest.mark.parametrize("vocab", [200, 49_152])
def test_a_certain_token_has_the_first_bucket_and_an_impossible_one_the_last(vocab: int) -> None:
    logits = torch.full((1, vocab), -100.0)
    logits[0, 150] = 3.0
    (found,) = likeliest(logits, 3)
    assert found.tokens[0] == 150
    assert list(found.buckets) == [0, 12, 12]


def test_buckets_are_those_of_the_log_probabilities_where_few_tokens_are_likely() -> None:
    logits = torch.full((3, 49_152), -30.0)
    logits[:, 1000::4000] = torch.randn(3, 13, generator=generator())
    log_probs = logits.log_softmax(dim=-1)
    for row, found in zip(log_probs, likeliest(logits, 8), strict=True):
        exact = Successors.of(found.tokens, row[list(found.tokens)].tolist())
        assert found == exact


@pytest.mark.parametrize("vocab", [3, 20, 129])
def test_of_a_small_vocabulary_no_more_tokens_are_named_than_there_are(vocab: int) -> None:
    (found,) = likeliest(torch.randn(1, vocab, generator=generator()), 24)
    assert len(set(found.tokens)) == len(found.tokens) == min(vocab, 24)
    assert max(found.tokens) < vocab


def test_a_token_that_the_model_rules_out_is_no_error() -> None:
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [7, 200]] = torch.tensor([1.0, 2.0])
    (found,) = likeliest(logits, 8)
    assert list(found.tokens[:2]) == [200, 7]
    assert all(bucket == 12 for bucket in found.buckets[2:])


def test_a_row_that_is_no_numbers_is_no_error_until_a_token_is_drawn_from_it() -> None:
    logits = torch.randn(2, 300, generator=generator())
    logits[1, 50] = torch.nan
    whole = likeliest(logits[:1], 8)
    assert likeliest(logits, 8)[:1] == whole
