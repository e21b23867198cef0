"""One round of beam search as a pure function: the rule of `model.generate(num_beams=W)`.

A beam is an unfinished answer with the sum of its tokens' log-probabilities. A round extends the W
beams of a prompt by one token. Of all extensions the best are the candidates; those that end
become answers, and the best of the others are the next beams (transformers' `_beam_search`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from drafthead.infer.request.request import EarlyStopping

# Lowers the score of what must not be chosen, as in transformers: where too little else is there,
# it is chosen all the same, in the order of the scores.
NEVER = -1.0e9
Tokens: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class BeamRules:
    """The options of a search over one prompt."""

    num_beams: int  # W
    length_penalty: float
    early_stopping: EarlyStopping
    end_ids: frozenset[int]
    limit: int  # most new tokens
    forced: int = 0  # tokens that the model forces each answer to begin with, and that count too

    @property
    def num_candidates(self) -> int:
        """K: so many that W beams go on though each end token follows each beam."""
        return max(2, 1 + len(self.end_ids)) * self.num_beams

    def ends(self, answer: Sequence[int]) -> bool:
        """Whether an answer ends with its last token."""
        return answer[-1] in self.end_ids or len(answer) >= self.limit

    def normalised(self, scores: torch.Tensor, length: int) -> torch.Tensor:
        """Sums of log-probabilities [...] of answers of `length` tokens, as they are compared."""
        return scores / (length + self.forced) ** self.length_penalty


@dataclass(frozen=True)
class Beams:
    """Beam search over one prompt after some rounds; all tensors are float32 on the CPU."""

    running: Sequence[Tokens]  # W unfinished answers of the same length, best first
    scores: torch.Tensor  # [W] sums of their log-probabilities
    ended: Sequence[Tokens]  # W answers, best first
    ended_scores: torch.Tensor  # [W] normalised
    has_ended: torch.Tensor  # [W] bool: false where there is no such answer yet
    over: bool = False

    @classmethod
    def first(cls, num_beams: int) -> "Beams":
        """Before the first round: W times nothing, of which only the first one is extended."""
        scores = torch.full((num_beams,), NEVER)
        scores[0] = 0
        nothing: Sequence[Tokens] = [()] * num_beams
        nowhere = torch.full((num_beams,), NEVER)
        return cls(nothing, scores, nothing, nowhere, torch.zeros(num_beams, dtype=torch.bool))


@dataclass(frozen=True)
class Extensions:
    """The best extensions of one prompt's beams, best first."""

    scores: torch.Tensor  # [K] float32 on the CPU, sums of log-probabilities
    parents: Sequence[int]  # which beam each of them extends
    tokens: Sequence[int]  # by which token


def best_extensions(
    log_probs: torch.Tensor,  # [P, W, V] of the token after each beam
    scores: torch.Tensor,  # [P, W] of the beams
    count: int,
) -> torch.Tensor:
    """The best `count` extensions of each prompt's beams as a table [P, 2, K], best first.

    Of each extension its score, and its place among the W x V. Numbers are float64, which holds
    both exactly, so that the host reads them at once.
    """
    totals = (log_probs + scores[:, :, None]).flatten(1)
    best, places = totals.topk(count)
    return torch.stack([best.double(), places.double()], dim=1)


def candidates_of(table: Sequence[Sequence[float]], vocab_size: int) -> Extensions:
    """The candidates of a prompt, of a table [2, K] of `best_extensions` on the host.

    Place 7 in a vocabulary of 5 extends beam 1 by token 2.
    """
    places = [int(place) for place in table[1]]
    parents, tokens = zip(*(divmod(place, vocab_size) for place in places), strict=True)
    return Extensions(torch.tensor(table[0], dtype=torch.float32), parents, tokens)


def next_round(
    beams: Beams, candidates: Extensions, rules: BeamRules
) -> tuple[Beams, Sequence[int]]:
    """The beams after one more round, and which beam each running one extends.

    With two beams ``a`` (-1) and ``b`` (-2), and ``.`` as end token, candidates ``a.`` (-1.5),
    ``bc`` (-2.5), ``ac`` (-3) and ``b.`` (-4) make ``a.`` an answer, whose score is -1.5 / 2 with a
    length penalty of 1. ``b.`` is not among the best two, so it is forgotten. ``bc`` and ``ac`` go
    on: they extend beams 1 and 0.
    """
    pairs = zip(candidates.parents, candidates.tokens, strict=True)
    answers = [(*beams.running[parent], token) for parent, token in pairs]
    ends = torch.tensor([rules.ends(answer) for answer in answers])
    may_go_on = candidates.scores + ends * NEVER
    # Through topk as in transformers: of equal scores it need not take the first.
    kept = may_go_on.topk(rules.num_beams).indices
    ended, ended_scores, has_ended = with_ended(beams, answers, candidates.scores, ends, rules)
    running, scores = [answers[place] for place in kept], may_go_on[kept]
    after = Beams(running, scores, ended, ended_scores, has_ended)
    over = bool(ends.all()) or is_over(after, rules)
    return replace(after, over=over), [candidates.parents[place] for place in kept]


def with_ended(
    beams: Beams,
    answers: Sequence[Tokens],  # K candidates
    scores: torch.Tensor,  # [K]
    ends: torch.Tensor,  # [K] bool
    rules: BeamRules,
) -> tuple[Sequence[Tokens], torch.Tensor, torch.Tensor]:
    """The best W answers of old and new ones, their scores [W], and which of them there are [W].

    A candidate that ends is an answer if it is one of the best W candidates.
    """
    is_answer = ends & (torch.arange(len(ends)) < rules.num_beams)
    compared = rules.normalised(scores, len(answers[0])) + ~is_answer * NEVER
    all_scores = torch.cat([beams.ended_scores, compared])
    best = all_scores.topk(rules.num_beams).indices
    all_answers = [*beams.ended, *answers]
    there = torch.cat([beams.has_ended, is_answer])[best]
    return [all_answers[place] for place in best], all_scores[best], there


def is_over(beams: Beams, rules: BeamRules) -> bool:
    """Whether no beam can become one of the best W answers, as far as that is looked at.

    The best beam is taken to keep its sum of log-probabilities. Normalised by the length that it
    has now, or with `early_stopping="never"` and a length penalty above 0 by the limit, it would
    have to be better than the worst answer.
    """
    if rules.early_stopping is True and bool(beams.has_ended.all()):
        return True
    at_limit = rules.early_stopping == "never" and rules.length_penalty > 0
    length = rules.limit if at_limit else len(beams.running[0])
    best_possible = rules.normalised(beams.scores[0], length)
    worst = torch.where(beams.has_ended, beams.ended_scores.min(), NEVER)
    return not bool((best_possible > worst).any())
