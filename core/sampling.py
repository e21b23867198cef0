"""From logits to probabilities, and random draws that do not depend on other rows of a batch."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import torch
from pydantic import Field

from drafthead.core.backend import kernel_of
from drafthead.core.host import to_device
from drafthead.core.settings import LEAST_TOP_P, MinP, Number, Temperature, TopK, TopP, settings

# Children are drawn from a draft's most probable tokens; any distribution known before the draw
# keeps the verification exact, and a short one keeps it cheap.
DRAFT_SUPPORT = 64
# Draft probabilities below this count as 0, see `draft_distribution`.
LEAST_DRAFT_PROBABILITY = 1e-200
# Stands for the token where logits describe no distribution. The host finds it among a step's
# tokens, so that no other copy has to be awaited. No token of a vocabulary is negative.
NO_TOKEN = -1
GOLDEN = 0x9E3779B97F4A7C15  # the step of the generator SplitMix64
STRIDE = 0xD1B54A32D192ED03  # between the numbers of two steps of a row
# More than any vocabulary has, and a whole number in float32.
NO_TOP_K = 2**24


@settings
class SamplingConfig:
    """The options that make the target's logits the distribution that is sampled.

    Temperature 0 is greedy decoding. `top_k` 0, `top_p` 1, `min_p` 0 and `typical_p` 1 keep the
    whole vocabulary. As in transformers, they apply after the temperature in the order of the
    fields, each to the tokens that the one before has left.
    """

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    typical_p: Annotated[Number, Field(gt=0, le=1)] = 1.0

    @property
    def greedy(self) -> bool:
        """Whether every token is the most probable one."""
        return self.temperature == 0

    @property
    def whole(self) -> bool:
        """Whether nothing but the temperature changes the target's distribution."""
        return (self.top_k, self.top_p, self.min_p, self.typical_p) == (0, 1.0, 0.0, 1.0)

    @property
    def settings(self) -> list[float]:
        """Temperature, top_k, top_p and min_p, as graphs take them: one serves all requests.

        Without `typical_p`. What is off has a value that keeps every token, also where the mass of
        all tokens is rounded up. Greedy is the least top_p, which keeps the most probable token.
        """
        if self.greedy:
            return [1.0, NO_TOP_K, LEAST_TOP_P, 0.0]
        top_k, top_p = self.top_k or NO_TOP_K, self.top_p if self.top_p < 1 else 2.0
        return [self.temperature, top_k, top_p, self.min_p]


@dataclass(frozen=True)
class RowSampling:
    """The sampling options of each row of a batch; see `SamplingConfig`."""

    rows: tuple[SamplingConfig, ...]

    @property
    def greedy(self) -> bool:
        """Whether no row draws."""
        return all(row.greedy for row in self.rows)

    @property
    def whole(self) -> bool:
        """Whether nothing but temperatures above 0 changes the distributions; or no row draws."""
        return all(row.whole for row in self.rows) and len({row.greedy for row in self.rows}) == 1

    @property
    def temperature(self) -> float | None:
        """The temperature of all rows; None where they differ."""
        first, *others = {row.temperature for row in self.rows}
        return None if others else first

    def settings(self, device: torch.device) -> torch.Tensor:
        """`SamplingConfig.settings` of each row, float32 [B, 4]."""
        return to_device([row.settings for row in self.rows], device)


Sampling: TypeAlias = SamplingConfig | RowSampling  # the same for all rows, or by row


def by_row(
    law: Callable[[torch.Tensor, SamplingConfig], torch.Tensor],
    logits: torch.Tensor,  # [B, ...]
    sampling: RowSampling,
) -> torch.Tensor:
    """`law(logits, sampling)` [B, ...] of each row, called once for all that are sampled alike."""
    alike: dict[SamplingConfig, list[int]] = defaultdict(list)
    for place, row in enumerate(sampling.rows):
        alike[row].append(place)
    if len(alike) == 1:
        return law(logits, sampling.rows[0])
    laws = [law(logits[places], row) for row, places in alike.items()]
    found = torch.empty_like(logits, dtype=laws[0].dtype)
    for places, part in zip(alike.values(), laws, strict=True):
        found[places] = part
    return found


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The float32 distribution [..., V] of a token sampled from logits [..., V].

    Top-k keeps ties with the k-th logit; top-p keeps the smallest set of most probable tokens
    whose mass reaches `top_p`; min-p keeps tokens at least `min_p` times as probable as the best
    one; typical-p keeps the smallest set of `typical` tokens whose mass reaches `typical_p`. At
    temperature 0 all mass lies on `most_probable`, and there is none where that is NO_TOKEN.
    """
    if isinstance(sampling, RowSampling):
        return by_row(probabilities, logits, sampling)
    if sampling.greedy:
        token = most_probable(logits)[..., None]
        mass = (token != NO_TOKEN).float()
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, token.clamp_min(0), mass)
    return warped(logits.float(), sampling).softmax(-1)


def draft_distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The float64 distribution [..., k] that a node's children are drawn from, of logits [..., k].

    Every drafter takes it from here: children must be drawn from the same numbers by which the
    rules test them. After a token of probability 1 - 1e-40 the next child is drawn from what
    remains, so ratios count between numbers that are tiny beside the first. In float32 such
    remainders leave the range of full precision, and their normalised sum is no longer 1: at a gap
    of 95 between logits over temperature the target's tokens came out as (.25, .75, 0, 0) instead
    of four times .25. Float64 holds gaps of 460, and what is smaller still becomes exactly 0 here.
    So in the worst case the last child is tested with 1e-200 / 1, far above the least normal number
    2e-308. A token of probability 0 fills up a tree but is never accepted. The sum needs no new
    division: the clipped mass, at most k times 1e-200, is less than half a unit in its last place.

    A draft may be any distribution, so this costs no exactness. A draft head whose logits are NaN
    proposes nothing.
    """
    if isinstance(sampling, RowSampling):
        return by_row(draft_distribution, logits, sampling)
    if sampling.greedy:
        return probabilities(logits, sampling).double()
    probs = warped(logits.double(), sampling).softmax(-1)
    # False for NaN as well.
    return torch.where(probs >= LEAST_DRAFT_PROBABILITY, probs, 0)


def warped(scores: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor:
    """Logits [..., V] over the temperature, -inf where a filter removes the token."""
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        smallest_kept = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < smallest_kept, -torch.inf)
    if sampling.top_p < 1:
        scores = scores.masked_fill(~nucleus(scores, sampling.top_p), -torch.inf)
    if sampling.min_p > 0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < sampling.min_p * probs.amax(-1, True), -torch.inf)
    if sampling.typical_p < 1:
        scores = scores.masked_fill(~typical(scores, sampling.typical_p), -torch.inf)
    return scores


def nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """The tokens [..., V] bool of the smallest most probable set of mass `top_p`.

    Probabilities (.5, .3, .2) and top_p .6 keep the first two: the mass above the second is .5. Of
    equals the first come first, where transformers leaves the order to an unstable sort: (.4, .4,
    .2) and top_p .3 keep the first.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(-1)
    mass_above = probs.cumsum(-1) - probs
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, mass_above < top_p)


def typical(scores: torch.Tensor, typical_p: float) -> torch.Tensor:
    """The tokens [..., V] bool of the smallest most typical set of mass `typical_p`.

    The closer a token's surprise, -log of its probability, is to the mean surprise, the entropy,
    the more typical it is (Meister et al., 2022, arXiv 2202.00666). Ties with the last are kept.

    Probabilities (.6, .3, .1) have entropy .90, and their surprises differ from it by .39, .31 and
    1.40, so typical_p .2 keeps the second token only.
    """
    log_probs = scores.log_softmax(-1)
    entropy = -(log_probs * log_probs.exp()).nansum(-1, keepdim=True)  # -inf x 0 counts as 0
    ordered, order = (-log_probs - entropy).abs().sort(dim=-1)
    mass = log_probs.exp().gather(-1, order).cumsum(-1)
    last = (mass < typical_p).sum(-1, keepdim=True).clamp_max(scores.shape[-1] - 1)
    kept = ordered <= ordered.gather(-1, last)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, kept)


class RowRandom:
    """Random numbers for each row of a batch and each step of that row.

    They are a function of the row's seed and its number of tokens so far. So a row's answer depends
    neither on other rows nor on how many numbers its earlier steps used.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device):
        self.device = device
        self.seeds = list(seeds)
        self.num_tokens = [0] * len(self.seeds)
        self.streams: list[torch.Generator] = []  # of this step, made at the first draw
        self.keys: torch.Tensor | None = None  # [B, .] of this step, made when they are asked for
        self.late: torch.Tensor | None = None  # [B] see `begin_step`

    def begin_step(self, num_tokens: Sequence[int], late: torch.Tensor | None = None) -> None:
        """Start the step that follows `num_tokens` tokens of each row.

        And `late` [B] more, which the device alone knows: then there are keys and nothing else.
        """
        self.num_tokens, self.streams, self.keys = list(num_tokens), [], None
        self.late = late

    def uniform(self, *shape: int) -> torch.Tensor:
        """The next of the step's uniform numbers in [0, 1), float64 [B, *shape].

        Float32 has only 2^24 of them, too few to draw from a vocabulary of 150,000 tokens: a
        probability of 1e-5 would be off by up to 1 %.
        """
        if not self.streams:
            pairs = zip(self.seeds, self.num_tokens, strict=True)
            bits = finished(torch.tensor([signed(numbered(*pair)) for pair in pairs])).tolist()
            self.streams = [torch.Generator(self.device).manual_seed(n % 2**64) for n in bits]
        double, device = torch.float64, self.device
        return torch.stack(
            [torch.rand(shape, generator=g, dtype=double, device=device) for g in self.streams]
        )

    def ahead(self, count: int) -> torch.Tensor:
        """The int64 keys [B, count] of the races in which plain decoding draws the next tokens.

        Key d belongs to the step after d more tokens. It needs no generator. Keys are made once a
        step, of numbers that are copied to the device: with one more than the draft asks for, which
        the pass over its tree needs.
        """
        if self.keys is None or self.keys.shape[1] < count:
            numbers = [
                [signed(numbered(seed, start + place)) for place in range(count + 1)]
                for seed, start in zip(self.seeds, self.num_tokens, strict=True)
            ]
            bits = to_device(numbers, self.device)
            if self.late is not None:
                bits = bits + self.late[:, None] * signed(STRIDE)
            self.keys = finished(bits)
        return self.keys[:, :count].contiguous()  # graphs are made for whole tables

    def token(self, probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Tokens [B] drawn from unnormalised probs [B, V] with keys [B] of `ahead`."""
        return race(probs, keys)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop the numbers of all other rows."""
        self.seeds = [self.seeds[row] for row in rows]
        self.begin_step([self.num_tokens[row] for row in rows])

    def join_rows(self, other: "RowRandom", order: Sequence[int]) -> None:
        """Go on with rows of both, see `RowState.join_rows`."""
        self.seeds, self.num_tokens = self.seeds + other.seeds, self.num_tokens + other.num_tokens
        self.keep_rows(order)


def numbered(seed: int, count: int) -> int:
    """64 bits for step `count`, in equal strides."""
    return (seed * GOLDEN + (count + 1) * STRIDE) & (2**64 - 1)


def signed(bits: int) -> int:
    """The number that 64 bits are as an int64."""
    return bits - (bits >> 63 << 64)


def arrival_times(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Exponential float32 numbers [..., k], functions of keys [...] and tokens [..., k] alone.

    The time of token x comes from number x of the generator SplitMix64, whose seed is a multiple of
    the key: 64 bits, so that small numbers are as exact as large ones. Few tokens cost little: a
    draft asks for those that it considers, and finds the numbers that the target will use.
    """
    bits = finished((keys[..., None] + tokens + 1) * signed(GOLDEN))
    uniform = shifted(bits, 1).float() * 2**-63 + 2**-64
    # At 1 the time would be infinite.
    return -torch.log1p(-uniform.clamp_max(1 - 2**-24))


def finished(bits: torch.Tensor) -> torch.Tensor:
    """int64 bits [...] that no longer show how they follow each other (SplitMix64's finaliser)."""
    bits = (bits ^ shifted(bits, 30)) * signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ shifted(bits, 27)) * signed(0x94D049BB133111EB)
    return bits ^ shifted(bits, 31)


def shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """int64 bits [...] moved down by `count`, with zeros above: >> alone would repeat the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def race(
    probs: torch.Tensor, keys: torch.Tensor, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Draw tokens [...] from unnormalised probs [..., V] with keys [...]: the first to arrive.

    Token x arrives at its `arrival_times` number over its probability, so the first one is a draw
    from the probabilities, and a small change of these seldom changes it. `tokens` [..., V] are
    those that the probabilities belong to, by default 0 to V - 1. Where the mass is 0, infinite or
    NaN there is NO_TOKEN.
    """
    ids = torch.arange(probs.shape[-1], device=probs.device) if tokens is None else tokens
    # NaN counts as the largest.
    speed, first = (probs / arrival_times(keys, ids)).max(-1)
    if tokens is not None:
        first = tokens.gather(-1, first[..., None])[..., 0]
    # Neither holds for NaN.
    return torch.where((speed > 0) & (speed < torch.inf), first, NO_TOKEN)


def sample(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw tokens [...] from unnormalised probs [..., V] with uniform numbers [...].

    Inverts the cumulative sum: the drawn token is the first at which it exceeds uniform x total
    mass, so a token without mass is never drawn. Probs (.5, .3, .2) and uniform .6 give token 1.
    Where the mass is 0, infinite or NaN there is NO_TOKEN.
    """
    cumulative = probs.double().cumsum(-1)
    total = cumulative[..., -1:]
    drawn = (cumulative <= uniform.double()[..., None] * total).sum(-1)
    # A uniform number just below 1 can round to the total: then the last token with mass is drawn.
    last_with_mass = (cumulative < total).sum(-1)
    total = total[..., 0]
    # Neither holds for NaN.
    is_law = (total > 0) & (total < torch.inf)
    return torch.where(is_law, torch.minimum(drawn, last_with_mass), NO_TOKEN)


def most_probable(logits: torch.Tensor) -> torch.Tensor:
    """The first token [...] of the largest logits [..., V]; NO_TOKEN if that is NaN or -inf.

    NaN counts as larger than any number, as in torch. transformers answers with the first NaN's
    token; but that token would be the answer's only one from then on.
    """
    has_16_bits = logits.dtype == torch.bfloat16 and logits.device.type == "cpu"
    if has_16_bits and (ours := kernel_of("most_probable")):
        return ours(logits)
    # In float32, because argmax over 16-bit numbers is four times slower on a CPU.
    scores = logits.float()
    token = scores.argmax(-1)
    largest = scores.gather(-1, token[..., None])[..., 0]
    return torch.where(largest > -torch.inf, token, NO_TOKEN)


def largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `count` largest of logits [..., V], or all, in float32 and from the largest on.

    Returns them and their places, both [..., k], and the log of the sum of exp over all, [..., 1].
    """
    numbers = logits.float()
    values, places = numbers.topk(min(count, numbers.shape[-1]), dim=-1)
    return values, places, numbers.logsumexp(-1, keepdim=True)


def draw(
    logits: torch.Tensor,  # [B, N, V]
    keys: torch.Tensor,  # [B, N] of the races
    settings: torch.Tensor,  # [B, 4], see `SamplingConfig.settings`
    filtered: bool,  # whether any row's settings are more than a temperature
) -> torch.Tensor:
    """The target's own token [B, N] after each node, drawn by its row's settings, or NO_TOKEN."""
    scores, ids = logits.float(), None
    # Masses that are not divided by their sum are the same whether others are filtered or not.
    scores = (scores - scores.amax(-1, keepdim=True)) / settings[:, 0, None, None]
    if filtered:
        scores, ids = scores.sort(dim=-1, descending=True, stable=True)
        scores = kept_of_sorted(scores, settings)
    return race(scores.exp(), keys, ids)


def kept_of_sorted(scores: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """Scores [B, ..., k] from the largest on, -inf where `settings` [B, 4] remove the token.

    As `warped`, without a branch that depends on the settings, so that one graph serves all.
    """
    by_row = settings.view(-1, *[1] * (scores.dim() - 1), 4)
    _, top_k, top_p, min_p = by_row.unbind(-1)  # [B, ..., 1]
    last = (top_k.long() - 1).clamp_max(scores.shape[-1] - 1).expand(*scores.shape[:-1], 1)
    scores = scores.masked_fill(scores < scores.gather(-1, last), -torch.inf)
    probs = scores.softmax(-1)
    kept = (probs.cumsum(-1) - probs < top_p) & (probs >= min_p * probs[..., :1])
    return scores.masked_fill(~kept, -torch.inf)


def draw_without_replacement(
    probs: torch.Tensor, count: int, uniform: torch.Tensor
) -> torch.Tensor:
    """Indices [..., count] of successive draws from probs [..., k] without replacement.

    An exponential race, which is Gumbel top-k (Kool et al., 2019, arXiv 1903.06059) without its
    logarithms of probabilities: token i arrives at time -log(uniform_i) / probs_i, and the order of
    arrival is that of successive draws. Entries of probability 0 come last.
    """
    # 0 becomes the least number of the generator, so that no time is infinite.
    times = -torch.log(uniform.clamp_min(torch.finfo(uniform.dtype).eps / 2))
    # The inverse is finite: the greatest number below 1 gives a time above 0.
    return (probs / times).topk(count, dim=-1).indices
