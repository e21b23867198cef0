"""Is what is decoded what the target alone would have said? Measured on a user's own pair.

Do sampled answers follow the target's law, at their beginning, where whole texts can be counted,
and token by token later on, and are greedy answers those of plain decoding? The target's law is
computed here by plain passes over whole texts, without trees, caches or rules, so that an error in
those cannot hide.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from drafthead.heads.errors import UserError
from drafthead.heads.sampling import SamplingConfig, probabilities
from drafthead.heads.target.features import FeatureSpec
from drafthead.heads.target.target import Target
from drafthead.infer.decoder import Decoder
from drafthead.infer.measuring.comparison import Divergence, divergence, rounding_step
from drafthead.infer.measuring.goodness_of_fit import FEWEST_EXPECTED, Fit, chance_of_worse, fit

Text = tuple[int, ...]
OTHER = -1  # any token that has no cell of its own

LENGTH = 3  # tokens of a sampled answer: the first is the prompt pass's, the others come from trees
PLACES = 20  # parts of [0, 1] in which later tokens are counted
ROWS = 64  # samples, or texts of a plain pass, at a time

# Greedy answers may differ where the logit of the token said lies at most so many rounding steps
# of the dtype below the largest. In 16 bits the rounding of the logits themselves decides ties; in
# float32 it is the order of sums over thousands of terms, which differs from pass to pass.
TIE_STEPS = {torch.float32: 128, torch.bfloat16: 1, torch.float16: 1}


class TargetLaw:
    """The target's exact law of the first LENGTH tokens behind a prompt, in cells.

    A cell is a text that is expected often enough among so many samples, or all continuations of
    a text that are not: (5, OTHER) is "5, then a token without a cell of its own". Texts that an
    end token ends are cells like any other.
    """

    def __init__(
        self,
        target: Target,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        samples: int,
        end_ids: frozenset[int],
    ):
        self.chances: dict[Text, float] = {}  # of the cells
        self.behind: dict[Text, torch.Tensor] = {}  # laws [V] behind texts that are told apart
        self.largest_logit = 0.0
        least = FEWEST_EXPECTED / samples
        texts: dict[Text, float] = {(): 1.0}
        for _ in range(LENGTH):
            if not texts:
                break
            longer: dict[Text, float] = {}
            for text, law in zip(texts, self._laws(target, prompt, texts, sampling), strict=True):
                self.behind[text] = law
                joint = texts[text] * law.double()
                common = (joint >= least).nonzero().flatten().tolist()
                longer |= {(*text, token): float(joint[token]) for token in common}
                rest = float(joint.sum() - joint[common].sum())
                self.chances[*text, OTHER] = max(rest, 0.0)
            ended = {text: chance for text, chance in longer.items() if text[-1] in end_ids}
            self.chances |= ended
            texts = {text: chance for text, chance in longer.items() if text not in ended}
        self.chances |= texts

    def _laws(
        self,
        target: Target,
        prompt: Sequence[int],
        texts: Iterable[Text],  # all of one length
        sampling: SamplingConfig,
    ) -> Iterable[torch.Tensor]:
        """The law [V] behind prompt and each text, by one plain pass over all of both."""
        ids = torch.tensor([[*prompt, *text] for text in texts], dtype=torch.long)
        for some in ids.split(ROWS):
            some = some.to(target.device)
            positions = torch.arange(some.shape[1], device=target.device).expand_as(some)
            spec = FeatureSpec(layers=(), last=False)
            logits = target.run(some, positions, None, spec, logits_to_keep=1).logits[:, -1]
            self.largest_logit = max(self.largest_logit, float(logits.amax()))
            yield from probabilities(logits, sampling).cpu()

    def cell(self, answer: Sequence[int]) -> Text:
        """The cell that an answer falls into."""
        text: Text = ()
        for token in answer[:LENGTH]:
            if text not in self.behind:
                break
            longer = (*text, token)
            if longer not in self.behind and longer not in self.chances:
                return (*text, OTHER)
            text = longer
        return text

    def is_impossible(self, answer: Sequence[int]) -> bool:
        """Whether the answer holds a token of probability 0, as far as it is followed."""
        return any(
            float(self.behind[text][token]) == 0
            for place, token in enumerate(answer[:LENGTH])
            if (text := tuple(answer[:place])) in self.behind
        )


@dataclass(frozen=True)
class Start:
    """First tokens of sampled answers to one prompt beside the target's law of them."""

    fit: Fit
    largest_logit: float


def sampled_start(
    decoder: Decoder,
    reference: Target,
    prompt: list[int],
    sampling: SamplingConfig,
    verifier: str,
    samples: int,
    seed: int,
    on_samples: Callable[[int], object] = lambda _: None,
) -> Start:
    """Decode one prompt `samples` times, with seeds from `seed` on, and compare LENGTH tokens.

    `reference` is asked for the law. Raises UserError as `refuse_plain_steps`.
    """
    refuse_plain_steps(decoder)
    law = TargetLaw(reference, prompt, sampling, samples, decoder.end_ids)
    found: Counter[Text] = Counter()
    impossible = 0
    for start in range(0, samples, ROWS):
        rows = min(ROWS, samples - start)
        result = decoder.generate(
            [prompt] * rows,
            max_new_tokens=LENGTH,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            verifier=verifier,
            seed=seed + start,
        )
        found.update(map(law.cell, result.sequences))
        impossible += sum(map(law.is_impossible, result.sequences))
        on_samples(rows)
    counts = torch.tensor([found[cell] for cell in law.chances])
    measured = fit(counts, torch.tensor(list(law.chances.values())), impossible)
    return Start(measured, law.largest_logit)


def refuse_plain_steps(decoder: Decoder) -> None:
    """Raise UserError for a decoder whose steps need not verify trees: they would test nothing."""
    if decoder.adaptive or decoder.drafter is None:
        raise UserError("exactness is tested with a drafter and trees of a fixed size")


@dataclass
class LaterTokens:
    """All tokens but the first of sampled answers, by their place in the target's law.

    Order the tokens behind a text from the most to the least probable and let each take up its
    probability of [0, 1]. A point drawn evenly from the part of the token said is even on [0, 1],
    whatever came before, exactly if the token has the target's law (Rosenblatt's transform). Drafts
    believed too readily show as too many small points, a damaged context as too many large ones.
    """

    counts: torch.Tensor = field(default_factory=lambda: torch.zeros(PLACES, dtype=torch.long))
    impossible: int = 0
    accept_lengths: list[int] = field(default_factory=list)

    @property
    def fit(self) -> Fit:
        """The counts beside the even law."""
        return fit(self.counts, torch.full((PLACES,), 1 / PLACES), self.impossible)

    @property
    def accepted(self) -> float:
        """The mean number of drafted tokens that a step accepted."""
        return sum(self.accept_lengths) / max(1, len(self.accept_lengths)) - 1


def later_tokens(
    decoder: Decoder,
    reference: Target,
    prompts: Sequence[list[int]],
    sampling: SamplingConfig,
    verifier: str,
    answers: int,
    max_new_tokens: int,
    seed: int,
    on_answers: Callable[[int], object] = lambda _: None,
) -> LaterTokens:
    """Sample `answers` answers to each prompt, and place their tokens in the law of `reference`.

    Raises UserError as `refuse_plain_steps`.
    """
    refuse_plain_steps(decoder)
    found = LaterTokens()
    generator = torch.Generator().manual_seed(seed)
    rows = [prompt for prompt in prompts for _ in range(answers)]
    for start in range(0, len(rows), ROWS):
        some = rows[start : start + ROWS]
        result = decoder.generate(
            some,
            max_new_tokens=max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            verifier=verifier,
            seed=seed + start,
        )
        found.accept_lengths += [n for row in result.stats.accept_lengths for n in row]
        for prompt, answer in zip(some, result.sequences, strict=True):
            if len(answer) < 2:
                continue
            place, chance = places_in_law(reference, prompt, answer, sampling)
            points = place + chance * torch.rand(len(place), generator=generator)
            cells = (points * PLACES).long().clamp_max(PLACES - 1)
            found.counts += torch.bincount(cells, minlength=PLACES)
            found.impossible += int((chance == 0).sum())
        on_answers(len(some))
    return found


def places_in_law(
    target: Target, prompt: list[int], answer: list[int], sampling: SamplingConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the parts of an answer's tokens but the first begin, and their widths, float64 [T - 1].

    With probabilities (.2, .5, .3) the parts are [.8, 1], [0, .5] and [.5, .8]. Equally probable
    tokens come in the order of their ids. One plain pass over prompt and answer.
    """
    ids = torch.tensor([[*prompt, *answer[:-1]]], device=target.device)
    positions = torch.arange(ids.shape[1], device=target.device)[None]
    spec = FeatureSpec(layers=(), last=False)
    output = target.run(ids, positions, None, spec, logits_to_keep=len(answer) - 1)
    law = probabilities(output.logits[0], sampling).double()  # [T - 1, V]
    said = torch.tensor(answer[1:], device=law.device)[:, None]
    own = law.gather(1, said)
    earlier = torch.arange(law.shape[1], device=law.device) < said
    above = (law > own) | ((law == own) & earlier)
    return (law * above).sum(1).cpu(), own[:, 0].cpu()


def rounding_doubt(starts: Sequence[Start], dtype: torch.dtype, temperature: float) -> float:
    """Total variation a token that rounding in the target's dtype alone may cause, about.

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
    on_answer: Callable[[int], object] = lambda _: None,
) -> list[Divergence]:
    """Where greedy answers differ from those of plain decoding with `reference`."""
    plain = Decoder(reference)
    plain.end_ids = decoder.end_ids
    found = []
    for number, prompt in enumerate(prompts):
        expected = plain.generate(prompt, max_new_tokens=max_new_tokens).sequences[0]
        answer = decoder.generate(prompt, max_new_tokens=max_new_tokens).sequences[0]
        if answer != expected:
            found.append(divergence("greedy", number, prompt, expected, answer, reference))
        on_answer(1)
    return found


def is_near_tie(found: Divergence, dtype: torch.dtype) -> bool:
    """Whether rounding explains the difference: see TIE_STEPS."""
    return found.token_gap <= TIE_STEPS[dtype] * found.rounding_step


@dataclass(frozen=True)
class Evidence:
    """What was measured of a pair of `dtype`; the statistical parts are empty at temperature 0.

    `false_alarm` is the chance that exact decoding is called inexact. Each statistical part gets a
    third of it; near ties aside, the greedy part does not err.
    """

    dtype: torch.dtype
    false_alarm: float
    rule: Sequence[Fit]  # one for each random table
    starts: Sequence[Start]  # one for each prompt
    later: LaterTokens | None
    greedy: Sequence[Divergence]

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
        found = []
        for part, fits in self.parts.items():
            chance = chance_of_worse(fits)
            if chance < self.level:
                impossible = sum(each.impossible for each in fits)
                forbidden = f", {impossible} samples of probability 0" if impossible else ""
                found.append(f"{part}: not the target's law, p-value {chance:.1e}{forbidden}")
        wrong = [each for each in self.greedy if not is_near_tie(each, self.dtype)]
        if wrong:
            worst = max(wrong, key=lambda each: each.token_gap)
            found.append(
                f"greedy answers: {len(wrong)} differ where rounding is no excuse; prompt "
                f"{worst.prompt}, token {worst.position} lies {worst.token_gap:.4f} below the "
                "largest logit"
            )
        return found
