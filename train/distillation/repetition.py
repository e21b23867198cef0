"""Ends answers that only repeat themselves: of those nothing is learnt that prompt lookup lacks.

Small models often fall into such loops when they decode greedily: a third of SmolLM2-135M's answers
to invented prompts did within 320 tokens.
"""

from collections.abc import Sequence

import torch
from transformers.generation.stopping_criteria import StoppingCriteria

WINDOW = 32  # tokens
TIMES = 3  # that the last WINDOW tokens occur, the last one included
EVERY = 8  # tokens between two looks


class EndlessRepetition(StoppingCriteria):
    """True where the last `WINDOW` tokens have occurred at least twice before.

    Twice, because an answer may quote its prompt once.
    """

    every = EVERY  # asked for each token of 512 rows, it would take longer than a GPU's step

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor | None, **_: object
    ) -> torch.BoolTensor:
        """For prompts with their answers so far [B, T], which of them repeat themselves [B]."""
        length = input_ids.shape[1]
        if length % EVERY or length < WINDOW + TIMES - 1:
            return torch.zeros(len(input_ids), dtype=torch.bool)  # type: ignore[return-value]
        windows = input_ids.unfold(1, WINDOW, 1)  # [B, T - WINDOW + 1, WINDOW]
        same = (windows == windows[:, -1:]).all(dim=2)
        return same.sum(dim=1) >= TIMES  # type: ignore[return-value]


def without_repetition(prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """An answer [T] up to where `EndlessRepetition` would have ended it, or all of it.

    For answers of a server, which knows no such criterion.
    """
    criterion = EndlessRepetition()
    text = torch.tensor([[*prompt, *answer]])
    for length in range(1, len(answer) + 1):
        whole = len(prompt) + length
        if whole % EVERY == 0 and criterion(text[:, :whole], None).all():  # type: ignore[arg-type]
            return list(answer[:length])
    return list(answer)
