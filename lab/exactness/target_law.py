"""The target's law of sampled answers, computed by plain passes over whole texts.

No tree, cache or acceptance rule is used, so an error in those cannot hide here.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from drafthead.core.sampling import SamplingConfig, probabilities
from drafthead.infer import Target
from drafthead.lab.exactness.goodness_of_fit import FEWEST_EXPECTED, Fit, fit

Text = tuple[int, ...]
OTHER = -1  # any token that has no cell of its own

LENGTH = 3  # tokens of a text: the first is the prompt pass's, the others come from trees
ROWS = 64  # texts of a plain pass at a time


class TargetLaw:
    """The target's exact law of the first LENGTH tokens after a prompt, in cells.

    A cell is a text that is expected often enough among `samples` samples, or all continuations of
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
        repetition_penalty: float = 1.0,
    ):
        self.sampling, self.repetition_penalty = sampling, repetition_penalty
        self.chances: dict[Text, float] = {}  # of the cells
        self.next_token: dict[Text, torch.Tensor] = {}  # [V] after a text
        self.largest_logit = 0.0
        least = FEWEST_EXPECTED / samples
        texts: dict[Text, float] = {(): 1.0}
        for _ in range(LENGTH):
            if not texts:
                break
            longer: dict[Text, float] = {}
            for text, law in zip(texts, self._laws(target, prompt, texts), strict=True):
                self.next_token[text] = law
                joint = texts[text] * law.double()  # [V]
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
    ) -> Iterable[torch.Tensor]:
        """Next-token probabilities [V] after the prompt and each text, by plain passes."""
        prefix = target.answer_prefix(prompt)
        for batch in torch.tensor([*texts], dtype=torch.long).split(ROWS):
            batch = batch.to(target.device)
            logits = target.plain_logits(prompt, batch, 1)[:, -1]
            self.largest_logit = max(self.largest_logit, float(logits.amax()))
            logits = penalised(prefix, batch, logits, self.repetition_penalty)
            yield from probabilities(logits, self.sampling).cpu()

    def fit_of(self, answers: Sequence[Sequence[int]], is_rounded: bool = False) -> Fit:
        """The fit of sampled answers; of one that `is_rounded` otherwise nothing is impossible."""
        found = Counter(map(self.cell, answers))
        counts = torch.tensor([found[cell] for cell in self.chances])
        impossible = 0 if is_rounded else sum(map(self.is_impossible, answers))
        return fit(counts, torch.tensor([*self.chances.values()]), impossible)

    def cell(self, answer: Sequence[int]) -> Text:
        """The cell that an answer falls into."""
        text: Text = ()
        for token in answer[:LENGTH]:
            if text not in self.next_token:
                break
            longer = (*text, token)
            if longer not in self.next_token and longer not in self.chances:
                return (*text, OTHER)
            text = longer
        return text

    def is_impossible(self, answer: Sequence[int]) -> bool:
        """Tell whether the answer holds a token of probability 0, as far as it is followed."""
        return any(
            float(self.next_token[text][token]) == 0
            for place, token in enumerate(answer[:LENGTH])
            if (text := tuple(answer[:place])) in self.next_token
        )


def penalised(
    prefix: Sequence[int],  # of all texts
    texts: torch.Tensor,  # [M, T]
    logits: torch.Tensor,  # [M, V] after them
    penalty: float,
) -> torch.Tensor:
    """The logits [M, V] with transformers' own repetition penalty."""
    if penalty == 1:
        return logits
    before = torch.tensor([*prefix], dtype=torch.long, device=texts.device)
    ids = torch.cat([before.expand(len(texts), -1), texts], dim=1)
    return RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.float())


def places_in_law(
    target: Target,
    prompt: list[int],
    answer: list[int],
    sampling: SamplingConfig,
    repetition_penalty: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Starts and widths of the parts of an answer's tokens but the first, float64 [T - 1].

    With probabilities (.2, .5, .3) the parts are [.8, 1], [0, .5] and [.5, .8]. Equally probable
    tokens come in the order of their ids. One plain pass over prompt and answer.
    """
    prefix, text = target.answer_prefix(prompt), torch.tensor([answer[:-1]], device=target.device)
    rows = target.plain_logits(prompt, text, len(answer) - 1)[0].split(1)
    logits = torch.cat(
        [
            penalised(prefix, text[:, :known], row, repetition_penalty)
            for known, row in enumerate(rows, start=1)
        ]
    )
    law = probabilities(logits, sampling).double()  # [T - 1, V]
    tokens = torch.tensor(answer[1:], device=law.device)[:, None]
    own = law.gather(1, tokens)
    smaller_id = torch.arange(law.shape[1], device=law.device) < tokens
    more_probable = (law > own) | ((law == own) & smaller_id)
    return (law * more_probable).sum(1).cpu(), own[:, 0].cpu()
