"""What is worth saying about a head when its training ends: that it has learnt nothing."""

from collections import deque
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from drafthead.train.data.packing import PackedData
from drafthead.train.learning.evaluation import Evaluation

STEPS_LOOKED_AT = 20


class LastSteps:
    """The loss of the last step, and the first guesses at depth 1 in the last steps."""

    def __init__(self) -> None:
        self.loss: float | None = None  # of a step in this process
        self._guesses: deque[tuple[float, float]] = deque(maxlen=STEPS_LOOKED_AT)

    def add(self, loss: float, right: float, guesses: float) -> None:
        """Count a step in which so many of so many guesses were right."""
        self.loss = loss
        self._guesses.append((right, guesses))

    @property
    def share(self) -> float | None:
        """The share of right guesses; None without any."""
        right, guesses = (sum(step[part] for step in self._guesses) for part in (0, 1))
        return right / guesses if guesses else None


def verdict(
    last: LastSteps,
    evaluation: Evaluation | None,
    train: PackedData,
    held_out: PackedData | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Iterator[str]:
    """Sentences about a head that learnt nothing: its loss is 0, or one token guesses as well.

    The head's first guess is compared with the token that answers have most often, on the held-out
    rows that `evaluation` is of or, without any, on what the last steps have trained on.
    """
    if last.loss == 0:
        yield "the loss of the last step is exactly 0: the head learns nothing from these rows"
    where, share = "in the last steps", last.share
    token, often, positions = (held_out or train).sequences.most_frequent()
    if held_out is not None and evaluation is not None:
        where, share = "held out", evaluation.top1[0] * evaluation.anchors / max(1, positions)
    if share is None or share > often / max(1, positions):
        return
    name = repr(tokenizer.decode([token])) if tokenizer is not None else str(token)
    yield (
        f"{where}, the head's first guess is right for {share:.1%} of the tokens after an answer's "
        f"first one, and {name} alone would be for {often / max(1, positions):.1%}: it has not "
        "learnt what pays; train longer, on more answers, or with another optimizer.lr"
    )
