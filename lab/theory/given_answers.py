"""A drafter's proposals at every place of the target's own answers (teacher forcing)."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

import torch

from drafthead.core.drafting.drafter import Committed, Drafter
from drafthead.core.sampling import RowRandom, SamplingConfig, probabilities
from drafthead.core.trees.guesses import known as with_tokens
from drafthead.core.trees.tree import Budget, TokenTree
from drafthead.infer import Target

ONE_TOKEN = Budget(2, 1)  # a chain of it


@dataclass(frozen=True)
class GivenAnswer:
    """The target's answer to a prompt, and its seed."""

    prompt: list[int]
    tokens: list[int]  # T, the first of which the pass over the prompt gave
    seed: int


@torch.no_grad()
def places(
    target: Target, drafter: Drafter, answer: GivenAnswer, sampling: SamplingConfig
) -> Iterator[tuple[TokenTree, torch.Tensor]]:
    """The T - 1 places at which steps of decoding could begin, in order.

    Of each the chain of one token that is proposed there, and the target's logits [V]. The target
    reads the whole answer in one pass; the drafter's session gets its tokens one by one.
    """
    prompt, tokens = answer.prompt, answer.tokens
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=target.device)
    positions = torch.arange(ids.shape[1], device=target.device)[None]
    features = drafter.features.with_last()
    output = target.run(ids, positions, None, features, logits_to_keep=len(tokens) - 1)
    text = [*prompt, *tokens]
    lengths = torch.tensor([len(prompt)], device=target.device)
    session = drafter.start(ids[:, : len(prompt)], lengths)
    random = None if sampling.greedy else RowRandom([answer.seed], target.device)
    start = 0
    for known in range(1, len(tokens)):
        end = len(prompt) + known - 1  # positions from `start` to here are committed
        following = text[start + 1 : end + 1]
        part = output.features.map(itemgetter((slice(None), slice(start, end))))  # [1, new, D]
        count = torch.tensor([len(following)], device=target.device)
        new = torch.tensor([following], device=target.device)
        session.commit(Committed(new, part, count, host_tokens=[following]))
        tree = with_tokens(session.propose(ONE_TOKEN, sampling, random))
        yield tree, output.logits[0, known - 1]
        start = end


def acceptance_chances(
    target: Target, drafter: Drafter, answer: GivenAnswer, sampling: SamplingConfig
) -> list[float]:
    """beta at each place: how likely `rejection` accepts the drafter's first token there.

    `drafter` drafts chains of one token. At temperature 0 it is 1 where the guess is right, else 0.
    """
    return [
        acceptance_chance(tree, probabilities(logits, sampling))
        for tree, logits in places(target, drafter, answer, sampling)
    ]


def acceptance_chance(tree: TokenTree, target_probs: torch.Tensor) -> float:
    """beta of the first token of a chain of one row, for the target's law target_probs [V].

    Where the token was drawn it is 1 - TV(target_probs, draft_probs), that is the sum over tokens
    of min(target_probs, draft_probs) (Leviathan et al., theorem 3.5). Where it was chosen,
    draft_probs is 1 at the token; so beta is target_probs there, and 0 without a token.
    """
    if tree.draft_ids is not None and tree.draft_probs is not None:
        ids, draft_probs = tree.draft_ids[0, 0], tree.draft_probs[0, 0]  # [k]
        return float(torch.minimum(target_probs[ids].double(), draft_probs).sum())
    guesses = tree.tokens[0, 1:2]
    return float(target_probs[guesses[guesses >= 0]].sum())
