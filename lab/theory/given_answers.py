"""What a drafter proposes at every place of the target's own answers (teacher forcing)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import torch

from drafthead.heads.coupling import Choice, NextDraws
from drafthead.heads.drafting.drafter import Committed, Drafter
from drafthead.heads.sampling import RowRandom, SamplingConfig, probabilities
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import TokenTree
from drafthead.lab.theory.chains import chain_budget


@dataclass(frozen=True)
class GivenAnswer:
    """What the target has answered to a prompt, under which seed."""

    prompt: list[int]
    tokens: list[int]  # T, the first of which the pass over the prompt gave
    seed: int


class Place(NamedTuple):
    """A step that could begin after the first tokens of an answer."""

    known: int  # tokens of the answer before the step
    outlook: int  # of the session, see `DraftSession.outlook`
    tree: TokenTree  # that is proposed there, of one row
    logits: torch.Tensor  # [V] the target's


class Run(NamedTuple):
    """A long chain at one place of an answer."""

    outlook: int
    drafted: int  # tokens that were proposed
    accepted: int  # of them from the first on, until one differs from the answer


@torch.no_grad()
def places(
    target: Target,
    drafter: Drafter,
    length: int,
    answer: GivenAnswer,
    sampling: SamplingConfig,
    choice: Callable[[int], Choice],
) -> Iterator[Place]:
    """The T - 1 places at which steps of decoding could begin, in order.

    The target reads the whole answer in one pass. The drafter's session gets its tokens one by one,
    and proposes a chain of `length` tokens before each; `choice(known)` is how it chooses them.
    """
    prompt, tokens = answer.prompt, answer.tokens
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=target.device)
    positions = torch.arange(ids.shape[1], device=target.device)[None]
    features = drafter.features.with_last()
    output = target.run(ids, positions, None, features, logits_to_keep=len(tokens) - 1)
    text = [*prompt, *tokens]
    lengths = torch.tensor([len(prompt)], device=target.device)
    session = drafter.start(ids[:, : len(prompt)], lengths)
    start, budget = 0, chain_budget(length)
    for known in range(1, len(tokens)):
        end = len(prompt) + known - 1  # positions from `start` to here are committed
        following = text[start + 1 : end + 1]
        part = output.features.map(itemgetter((slice(None), slice(start, end))))  # [1, new, D]
        count = torch.tensor([len(following)], device=target.device)
        new = torch.tensor([following], device=target.device)
        session.commit(Committed(new, part, count, host_tokens=[following]))
        outlook = session.outlook()
        tree = session.propose(budget, sampling, choice(known))
        yield Place(known, outlook, tree, output.logits[0, known - 1])
        start = end


def accepted_runs(
    target: Target, drafter: Drafter, length: int, answer: GivenAnswer, sampling: SamplingConfig
) -> list[Run]:
    """At each place, how much of a chain of `length` tokens decoding under `match` accepts.

    The answer must be plain decoding's of its seed, as those of `match` (at temperature 0 `greedy`)
    are: so a token is accepted where it is the answer's.
    """
    random = RowRandom([answer.seed], target.device)
    settings = sampling.settings(target.device)

    def draws(known: int) -> NextDraws | None:
        if sampling.greedy:
            return None
        random.begin_step([known])
        return NextDraws(random.ahead(length), settings)

    runs = []
    for place in places(target, drafter, length, answer, sampling, draws):
        drafted = [token for token in place.tree.tokens[0, 1:].tolist() if token >= 0]
        accepted = common_beginning(drafted, answer.tokens[place.known :])
        runs.append(Run(place.outlook, len(drafted), accepted))
    return runs


def common_beginning(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts have in common from their first on: 2 for 5 6 7 and 5 6 8 9."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def acceptance_chances(
    target: Target, drafter: Drafter, answer: GivenAnswer, sampling: SamplingConfig
) -> list[float]:
    """beta at each place: how likely `rejection` accepts the drafter's first token there.

    `drafter` drafts chains of one token. At temperature 0 it is 1 where the guess is right, else 0.
    """
    random = None if sampling.greedy else RowRandom([answer.seed], target.device)
    return [
        acceptance_chance(place.tree, probabilities(place.logits, sampling))
        for place in places(target, drafter, 1, answer, sampling, lambda known: random)
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
