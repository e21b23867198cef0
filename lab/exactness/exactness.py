"""Is what is decoded what the target alone would have generated? Measured on a user's own pair.

Do sampled answers follow the target's law, at their beginning, where whole texts can be counted,
and token by token later on? Are greedy answers those of plain decoding?
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from tqdm import tqdm, trange
from transformers.generation.configuration_utils import GenerationConfig

from drafthead.core.errors import UserError
from drafthead.core.sampling import SamplingConfig
from drafthead.infer import Decoder, DecodeResult, Target
from drafthead.infer.verifiers import VERIFIERS
from drafthead.lab.exactness.goodness_of_fit import Fit, chance_of_worse, fit
from drafthead.lab.exactness.oracle import OracleDecoder
from drafthead.lab.exactness.rule_law import fit_of_rule
from drafthead.lab.exactness.target_law import LENGTH, TargetLaw, places_in_law
from drafthead.lab.races.divergence import Divergence, divergence, rounding_step

PLACES = 20  # parts of [0, 1] in which later tokens are counted
TABLES, BATCHES = 4, 8  # random tables, and batches of samples for each
ROWS = 64  # answers that are sampled at a time

# Greedy answers may differ where the logit of the other token lies at most this number of rounding
# steps of the dtype below the largest. In 16 bits the rounding of the logits themselves decides
# ties; in float32 it is the order of sums over thousands of terms, which differs from pass to pass.
TIE_STEPS = {torch.float32: 128, torch.bfloat16: 1, torch.float16: 1}


@dataclass(frozen=True)
class SampledPair:
    """A decoder that samples under a verifier, and the target whose law it should follow.

    Raises UserError for a decoder whose steps need not verify trees, which would test nothing.
    """

    decoder: Decoder
    reference: Target
    sampling: SamplingConfig
    verifier: str
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.decoder.adaptive or self.decoder.drafter is None:
            raise UserError("exactness is tested with a drafter and trees of a fixed size")

    @property
    def generation_config(self) -> GenerationConfig | None:
        """The penalty, if there is one."""
        if self.repetition_penalty == 1:
            return None
        return GenerationConfig(do_sample=True, repetition_penalty=self.repetition_penalty)

    def sample(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        seed: int,
        decoder: Decoder | None = None,
    ) -> DecodeResult:
        """A sampled answer to each prompt; by another decoder, where one is given."""
        return (decoder or self.decoder).generate(
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            verifier=self.verifier,
            seed=seed,
            generation_config=self.generation_config,
            use_model_defaults=False,  # the law is that of the target's own logits
        )


@dataclass(frozen=True)
class Start:
    """The fit of the first tokens of sampled answers to one prompt to the target's law."""

    fit: Fit
    largest_logit: float


def sampled_start(pair: SampledPair, prompt: list[int], samples: int, seed: int) -> Start:
    """Decode one prompt `samples` times, with seeds from `seed` on, and compare LENGTH tokens."""
    law = TargetLaw(
        pair.reference, prompt, pair.sampling, samples, pair.decoder.end_ids,
        pair.repetition_penalty,
    )  # fmt: skip
    answers: list[list[int]] = []
    for start in trange(0, samples, ROWS, desc="first tokens", unit="batch", leave=False):
        rows = min(ROWS, samples - start)
        answers += pair.sample([prompt] * rows, LENGTH, seed + start).sequences
    return Start(law.fit_of(answers), law.largest_logit)


@dataclass
class LaterTokens:
    """All tokens but the first of sampled answers, by their place in the target's law.

    Order the tokens after a text from the most to the least probable and give each the part of
    [0, 1] that is its probability. A point drawn evenly from the sampled token's part is even on
    [0, 1], whatever came before, exactly if the token has the target's law (Rosenblatt's
    transform). Drafts accepted too readily show as too many small points, a damaged context as too
    many large ones.
    """

    counts: torch.Tensor = field(  # [PLACES]
        default_factory=lambda: torch.zeros(PLACES, dtype=torch.long)
    )
    impossible: int = 0
    accept_lengths: list[int] = field(default_factory=list)

    @property
    def fit(self) -> Fit:
        """The counts compared with the even law."""
        return fit(self.counts, torch.full((PLACES,), 1 / PLACES), self.impossible)

    @property
    def accepted(self) -> float:
        """The mean number of drafted tokens that a step accepted."""
        return sum(self.accept_lengths) / max(1, len(self.accept_lengths)) - 1


def later_tokens(
    pair: SampledPair, prompts: Sequence[list[int]], answers: int, max_new_tokens: int, seed: int
) -> LaterTokens:
    """Sample `answers` answers to each prompt, and place their tokens in the target's law."""
    later = LaterTokens()
    generator = torch.Generator().manual_seed(seed)
    rows = [prompt for prompt in prompts for _ in range(answers)]
    for start in trange(0, len(rows), ROWS, desc="later tokens", unit="batch"):
        batch = rows[start : start + ROWS]
        result = pair.sample(batch, max_new_tokens, seed + start)
        later.accept_lengths += [n for row in result.stats.accept_lengths for n in row]
        for prompt, answer in zip(batch, result.sequences, strict=True):
            if len(answer) < 2:
                continue
            place, chance = places_in_law(
                pair.reference, prompt, answer, pair.sampling, pair.repetition_penalty
            )
            points = place + chance * torch.rand(len(place), generator=generator)
            cells = (points * PLACES).long().clamp_max(PLACES - 1)
            later.counts += torch.bincount(cells, minlength=PLACES)
            later.impossible += int((chance == 0).sum())
    return later


def rounding_doubt(starts: Sequence[Start], dtype: torch.dtype, temperature: float) -> float:
    """About the total variation per token that rounding in the target's dtype alone may cause.

    Logits that are off by e change every probability by a factor within exp(+-2 e / temperature)
    and so the law by no more than tanh(e / temperature); e is one rounding step of the largest.
    """
    step = rounding_step(max(each.largest_logit for each in starts), dtype)
    return float(torch.tanh(torch.tensor(step / temperature)))


def greedy_differences(
    decoder: Decoder,
    reference: Target,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    verifier: str = "auto",
) -> list[Divergence]:
    """Return where greedy answers under a rule differ from those of plain decoding."""

    def answer(one: Decoder, prompt: list[int], _: int) -> list[int]:
        options = {"verifier": verifier, "use_model_defaults": False}
        return one.generate(prompt, max_new_tokens=max_new_tokens, **options).sequences[0]

    return differences("greedy", decoder, reference, prompts, answer)


def drawn_differences(
    pair: SampledPair, prompts: Sequence[list[int]], max_new_tokens: int, seed: int
) -> list[Divergence]:
    """Return where answers drawn under `match` differ from plain decoding's for the same seed."""

    def answer(one: Decoder, prompt: list[int], number: int) -> list[int]:
        return pair.sample([prompt], max_new_tokens, seed + number, one).sequences[0]

    return differences("drawn", pair.decoder, pair.reference, prompts, answer)


def differences(
    mode: str,
    decoder: Decoder,
    reference: Target,
    prompts: Sequence[list[int]],
    answer: Callable[[Decoder, list[int], int], list[int]],
) -> list[Divergence]:
    """Return where answers of a decoder to numbered prompts differ from plain decoding's.

    That is plain decoding with the decoder's own target where its passes have the `same_bits`, and
    with `reference` elsewhere.
    """
    plain, found = OracleDecoder(decoder.target if decoder.target.same_bits else reference), []
    plain.end_ids = decoder.end_ids
    for number, prompt in enumerate(tqdm(prompts, desc=f"{mode} answers", unit="answer")):
        expected, other = (answer(one, prompt, number) for one in (plain, decoder))
        if other != expected:
            found.append(divergence(mode, number, prompt, expected, other, reference))
    return found


def is_near_tie(difference: Divergence, dtype: torch.dtype) -> bool:
    """Tell whether rounding explains the difference: see TIE_STEPS."""
    return difference.token_gap <= TIE_STEPS[dtype] * difference.rounding_step


@dataclass(frozen=True)
class Evidence:
    """All measurements of a pair of `dtype`; the statistical parts are empty at temperature 0.

    `false_alarm` is the chance that exact decoding is called inexact. Each statistical part gets a
    third of it; near ties aside, the greedy part does not err. Where the decoder's passes have the
    `same_bits`, there are no near ties, and `drawn` answers must be plain decoding's as well.
    """

    dtype: torch.dtype
    false_alarm: float
    rule: Sequence[Fit]  # one for each random table
    starts: Sequence[Start]  # one for each prompt
    later: LaterTokens | None
    greedy: Sequence[Divergence]
    same_bits: bool = False
    drawn: Sequence[Divergence] | None = None  # None where nothing was drawn under `match`

    @property
    def parts(self) -> dict[str, list[Fit]]:
        """The statistical parts; the experiments of one are independent."""
        return {
            "rule on tables": list(self.rule),
            f"first {LENGTH} tokens": [each.fit for each in self.starts],
            "later tokens": [self.later.fit] if self.later and self.later.counts.any() else [],
        }

    @property
    def level(self) -> float:
        """The p-value below which a statistical part fails."""
        return self.false_alarm / len(self.parts)

    def failures(self) -> list[str]:
        """A sentence for each part that shows another law than the target's; none is a pass."""
        sentences = []
        for part, fits in self.parts.items():
            chance = chance_of_worse(fits)
            if chance < self.level:
                impossible = sum(each.impossible for each in fits)
                forbidden = f", {impossible} samples of probability 0" if impossible else ""
                sentences.append(f"{part}: not the target's law, p-value {chance:.1e}{forbidden}")
        if wrong := [each for each in self.greedy if not self.is_excused(each)]:
            worst = max(wrong, key=lambda each: each.token_gap)
            reason = (
                "though nothing is rounded otherwise"
                if self.same_bits
                else "by more than rounding explains"
            )
            sentences.append(
                f"greedy answers: {len(wrong)} differ {reason}; prompt {worst.prompt}, token "
                f"{worst.position} lies {worst.token_gap:.4f} below the largest logit"
            )
        if self.drawn:
            sentences.append(
                f"drawn answers: {len(self.drawn)} are not plain decoding's for the same seed"
            )
        return sentences

    def is_excused(self, difference: Divergence) -> bool:
        """Tell whether rounding explains that a greedy answer differs."""
        return not self.same_bits and is_near_tie(difference, self.dtype)


@dataclass(frozen=True)
class Effort:
    """The numbers of samples; raises UserError for numbers that test nothing."""

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
