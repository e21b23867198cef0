"""The theory of speculative decoding beside measurement, for each drafter and temperature."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tqdm import tqdm

from drafthead.core.sampling import SamplingConfig
from drafthead.infer import Decoder, Target
from drafthead.lab.races.contestants import Ours
from drafthead.lab.races.race import (
    PLAIN,
    Contestant,
    RaceRecord,
    in_batches,
    parts_of,
    prepare,
    race,
)
from drafthead.lab.races.terms import RaceTerms
from drafthead.lab.speedup_model import (
    ChainPrediction,
    StepParts,
    chain_speedup,
    deviation_factors,
    expected_tokens,
    operations_factor,
    predict_chain,
)
from drafthead.lab.theory.acceptance import Share, counted_alpha, counted_by_depth, share_of
from drafthead.lab.theory.chains import Chains, operations_ratio
from drafthead.lab.theory.given_answers import GivenAnswer, acceptance_chances

RULE = "rejection"  # above temperature 0: the rule that the theory is about


@dataclass(frozen=True)
class LengthRow:
    """The theory of chains of one length; speedups are over plain decoding."""

    length: int
    tokens: float  # of a step
    speedup: float  # with one c for all lengths, and verification as long as a plain pass
    operations: float  # arithmetic per token, plain decoding's being 1


@dataclass(frozen=True)
class Theory:
    """One drafter at one temperature."""

    drafter: str
    temperature: float
    rule: str
    alpha: Share  # counted while decoding
    by_depth: list[Share]  # likewise, of those accepted to the depth before
    chances: Share  # mean of the acceptance chance of a first token, over all places of the answers
    chances_at_steps: float  # the same over the places where steps began: as `by_depth[0]`
    operations_cost: float  # c^
    step: StepParts  # of the steps that were decoded
    plain: StepParts  # of plain steps
    prediction: ChainPrediction  # for the chains that were decoded
    lengths: list[LengthRow]
    tau: float
    tokens_per_second: float
    plain_tokens_per_second: float

    @property
    def speedup(self) -> float:
        """The measured speedup over plain decoding."""
        return self.tokens_per_second / self.plain_tokens_per_second

    @property
    def factors(self) -> dict[str, float]:
        """Say why that is not what was predicted, see `deviation_factors`."""
        return deviation_factors(self.prediction, self.tau, self.step, self.plain)

    @property
    def run_length(self) -> LengthRow:
        """Return what the theory says of the chains that were decoded."""
        return self.lengths[self.prediction.length - 1]


def examine(
    target: Target,
    drafters: Sequence[Chains],
    prompts: Sequence[list[int]],
    terms: RaceTerms,
    length: int,
) -> list[Theory]:
    """Decode prompts with each drafter and plainly, in turns, and compare with the theory.

    Chains have up to `length` tokens.
    """
    found = []
    for temperature in terms.temperatures:
        sampling = SamplingConfig(temperature, top_p=terms.top_p)
        plain, *records = decoded(target, drafters, prompts, sampling, terms, length)
        for chains, record in zip(drafters, records, strict=True):
            found.append(theory_of(chains, record, plain, prompts, terms.seed, length))
    return found


def decoded(
    target: Target,
    drafters: Sequence[Chains],
    prompts: Sequence[list[int]],
    sampling: SamplingConfig,
    terms: RaceTerms,
    length: int,
) -> list[RaceRecord]:
    """Answers to all prompts, one by one in turns: plain decoding's, then each drafter's."""
    rule = "greedy" if sampling.greedy else RULE
    contestants: list[Contestant] = [Ours(PLAIN, "none", sampling, Decoder(target))]
    for chains in drafters:
        decoder = chains.decoder(min(length, chains.longest))
        contestants.append(Ours(chains.name, chains.name, sampling, decoder, verifier=rule))
    batches = in_batches(prompts, 1)
    for contestant in contestants:
        prepare(contestant, batches[0], terms.max_new_tokens, terms.seed)
    return race(contestants, batches, 1, terms.max_new_tokens, terms.seed)


def theory_of(
    chains: Chains,
    record: RaceRecord,
    plain: RaceRecord,
    prompts: Sequence[list[int]],
    seed: int,
    length: int,
) -> Theory:
    """Return what was measured of a drafter's answers, beside what the theory makes of it."""
    sampling, longest = record.contestant.sampling, chains.longest
    length = min(length, longest)
    stats, plain_stats = record.stats(), plain.stats()
    assert stats is not None and plain_stats is not None  # of our engine
    step, operations = parts_of(stats, plain_stats), operations_ratio(chains, length)
    accept_lengths = stats.accept_lengths
    flat = [n for answer in accept_lengths for n in answer]
    prediction = predict_chain(flat, length, step.draft / length, longest)
    answers = tqdm(record.first_round(), desc=f"reading {chains.name}", unit="answer", leave=False)
    chances = []
    for number, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
        answer = GivenAnswer(list(prompt), tokens, seed + number)
        chances.append(acceptance_chances(chains.target, chains.drafter(1), answer, sampling))
    return Theory(
        drafter=chains.name,
        temperature=sampling.temperature,
        rule=record.contestant.verifier,
        alpha=counted_alpha(accept_lengths, length),
        by_depth=counted_by_depth(accept_lengths, length),
        chances=share_of([sum(c) for c in chances], [len(c) for c in chances]),
        chances_at_steps=mean_at_steps(chances, accept_lengths),
        operations_cost=operations,
        step=step,
        plain=parts_of(plain_stats, plain_stats),
        prediction=prediction,
        lengths=length_rows(prediction, operations, longest),
        tau=stats.tau,
        tokens_per_second=stats.tokens_per_second,
        plain_tokens_per_second=plain_stats.tokens_per_second,
    )


def length_rows(
    prediction: ChainPrediction, operations_cost: float, longest: int
) -> list[LengthRow]:
    """Return what the theory says of chains of 1 to `longest` tokens."""
    alpha = prediction.alpha
    return [
        LengthRow(
            length,
            expected_tokens(alpha, length),
            chain_speedup(alpha, length, prediction.cost),
            operations_factor(alpha, length, operations_cost),
        )
        for length in range(1, longest + 1)
    ]


def mean_at_steps(
    chances: Sequence[Sequence[float]], accept_lengths: Sequence[Sequence[int]]
) -> float:
    """The mean of acceptance chances of all places over those where steps began.

    Steps that committed 2 and 3 tokens began at places 0 and 2 of an answer.
    """
    at_steps = [
        answer[place]
        for answer, lengths in zip(chances, accept_lengths, strict=True)
        for place in accumulate(lengths[:-1], initial=0)
        if lengths
    ]
    return sum(at_steps) / len(at_steps)
