"""All tests of exactness, one after the other, with as much effort as is asked for."""

from dataclasses import dataclass

from drafthead.heads.errors import UserError
from drafthead.infer.verifiers import VERIFIERS
from drafthead.lab.exactness.exactness import (
    Evidence,
    SampledPair,
    drawn_differences,
    greedy_differences,
    later_tokens,
    sampled_start,
)
from drafthead.lab.exactness.rule_law import fit_of_rule
from drafthead.lab.exactness.target_law import LENGTH

TABLES, BATCHES = 4, 8  # random tables, and batches of ROWS samples for each


@dataclass(frozen=True)
class Effort:
    """How much is sampled; raises UserError for numbers that test nothing."""

    samples: int  # of the first tokens, per prompt
    answers: int  # whole ones, per prompt
    max_new_tokens: int
    false_alarm: float  # chance that exact decoding is called inexact

    def __post_init__(self) -> None:
        if self.samples < 100 or self.answers < 1 or self.max_new_tokens < LENGTH:
            raise UserError(
                f"at least 100 samples, 1 answer and {LENGTH} new tokens are needed, got "
                f"{self.samples}, {self.answers} and {self.max_new_tokens}"
            )
        if not 0 < self.false_alarm < 1:
            raise UserError(f"false_alarm is a chance between 0 and 1, got {self.false_alarm}")


def evidence_of(pair: SampledPair, prompts: list[list[int]], effort: Effort, seed: int) -> Evidence:
    """All tests, one after the other; at temperature 0 greedy answers alone."""
    decoder, rule, length = pair.decoder, VERIFIERS[pair.verifier], effort.max_new_tokens
    same_bits, starts, tables, later, drawn = decoder.target.same_bits, [], [], None, None
    if not pair.sampling.greedy:
        tables = [fit_of_rule(rule, seed + table, BATCHES) for table in range(TABLES)]
        for number, prompt in enumerate(prompts):
            first_seed = seed + number * effort.samples
            starts.append(sampled_start(pair, prompt, effort.samples, first_seed))
        later = later_tokens(pair, prompts, effort.answers, length, seed)
        # Answers must then be those that plain decoding draws with the same seed.
        if pair.verifier == "match" and same_bits:
            drawn = drawn_differences(pair, prompts, length, seed)
    under = rule.name if rule.greedy else "auto"
    greedy = greedy_differences(decoder, pair.reference, prompts, length, under)
    return Evidence(
        pair.reference.dtype, effort.false_alarm, tables, starts, later, greedy, same_bits, drawn
    )
