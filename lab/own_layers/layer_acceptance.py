"""How often a part of a target guesses the target's next token, over the target's own keys.

As in a step of decoding: the layers that guess see what the target has committed. So each guess is
a node of its own, after the committed tokens before it, and the guesses at many positions of many
answers are one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafthead.heads.kv_cache.column_cache import additive
from drafthead.heads.sampling import most_probable
from drafthead.heads.target.features import NO_FEATURES
from drafthead.heads.target.target import Target
from drafthead.heads.target.tree_cache import TreeCache
from drafthead.infer.engine.prefill import padded, prefill
from drafthead.train.data.token_table import TokenSequence

POSITIONS = 24  # of each answer
ANSWERS = 4  # that are read together


@dataclass(frozen=True)
class GuessedAnswers:
    """Answers that the target has read, and what it says at some of their positions."""

    cache: TreeCache  # with all tokens committed
    tokens: torch.Tensor  # [B, N] the roots
    positions: torch.Tensor  # [B, N] theirs
    next_tokens: torch.Tensor  # [B, N] the target's most probable ones after them

    def agreement(self, part: Target) -> torch.Tensor:
        """Where a part of the target guesses the target's token, [B, N] bool."""
        found = guesses(part, self.cache, self.tokens, self.positions)
        return found == self.next_tokens


@torch.no_grad()
def guessed_answers(target: Target, answers: Sequence[TokenSequence]) -> list[GuessedAnswers]:
    """Read answers, at least one, which have supervised tokens; see `places_of`.

    The target's keys and values of all of them stay in memory.
    """
    groups = [answers[start : start + ANSWERS] for start in range(0, len(answers), ANSWERS)]
    found = []
    for group in groups:
        ids, lengths = padded([answer.input_ids.tolist() for answer in group], target.device)
        positions = torch.stack([places_of(answer.supervised) for answer in group])
        positions = positions.to(target.device)
        cache = target.new_cache()
        prefill(target, ids, lengths, NO_FEATURES, cache, room=POSITIONS)
        tokens = ids.gather(1, positions)
        said = guesses(target, cache, tokens, positions)
        found.append(GuessedAnswers(cache, tokens, positions, said))
    return found


def places_of(supervised: torch.Tensor, count: int = POSITIONS) -> torch.Tensor:
    """The roots [count] from which to guess: evenly spaced among those before supervised tokens.

    Of an answer at places 3 to 6, two are places 2 and 4; one with fewer tokens has some twice.
    """
    roots = supervised[1:].nonzero().squeeze(1)
    return roots[torch.arange(count) * len(roots) // count]


@torch.no_grad()
def guesses(
    model: Target,
    cache: TreeCache,
    tokens: torch.Tensor,  # [B, N]
    positions: torch.Tensor,  # [B, N]
) -> torch.Tensor:
    """A model's most probable token [B, N] after each of the tokens.

    Each sees itself and what is committed before its position; nothing stays in the cache.
    """
    seen, columns = cache.make_room(tokens.shape[1])
    itself = seen == columns[:, None]  # [N, S]
    before = seen < positions[..., None]  # [B, N, S]
    mask = additive((before | itself)[:, None], model.dtype)
    return most_probable(model.run(tokens, positions, mask, NO_FEATURES, cache).logits)


def alpha_of(part: Target, answers: Sequence[GuessedAnswers]) -> float:
    """The share of guesses of a part that are the target's token."""
    return float(torch.cat([group.agreement(part) for group in answers]).float().mean())
