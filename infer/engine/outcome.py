"""What becomes of a verified tree: the rule's verdict, and the tokens that it commits."""

from dataclasses import dataclass

import torch

from drafthead.heads.drafting.drafter import Committed, Ends
from drafthead.heads.sampling import RowRandom, SamplingConfig, probabilities
from drafthead.heads.target.features import Features
from drafthead.heads.trees.tree import TokenTree
from drafthead.infer.verifiers import Acceptance, Verifier


@dataclass(frozen=True)
class Outcome:
    """What a step commits: the accepted path of each row's tree, and a token behind each node."""

    acceptance: Acceptance
    tokens: torch.Tensor  # [B, P] behind the path's nodes
    features: Features  # [B, P, D] at the path's nodes
    answers: list[list[int]]  # the tokens as lists of each row's accept length
    lengths: torch.Tensor  # [B] committed positions, these included
    in_place: bool  # whether the path's cache columns stand behind the committed ones
    hidden: torch.Tensor | None = None  # [B, D] last hidden state at the path's end, where known

    @property
    def width(self) -> int:
        """The largest accept length."""
        return max(map(len, self.answers))

    def committed(self) -> Committed:
        """As drafters are told."""
        accepted = self.acceptance
        ends = None if self.hidden is None else Ends(accepted.bonus, self.hidden)
        return Committed(self.tokens, self.features, accepted.length, self.width, ends)


def accept(
    verifier: Verifier,
    tree: TokenTree,
    logits: torch.Tensor,  # [B, N, V]
    sampling: SamplingConfig,
    random: RowRandom | None,
) -> tuple[Acceptance, torch.Tensor]:
    """Apply the rule to the target's scores in the form that it reads.

    Returns its verdict and the token [B, P] behind each node of the accepted path.
    """
    scores = logits if verifier.reads == "logits" else probabilities(logits, sampling)
    acceptance = verifier.rule(tree, scores, random)
    return acceptance, following_tokens(tree, acceptance)


def following_tokens(tree: TokenTree, acceptance: Acceptance) -> torch.Tensor:
    """The token [B, P] behind each node of the accepted path.

    For root "a", accepted "b c" and bonus "d" the path is a b c and the tokens are b c d.
    """
    path_tokens = tree.tokens.gather(1, acceptance.path)
    last = acceptance.length[:, None] - 1
    # Rolled and not cut by its first: a compiled graph for any P has no dimension that may be 1.
    return path_tokens.roll(-1, dims=1).scatter(1, last, acceptance.bonus[:, None])


def in_one_table(
    tokens: torch.Tensor,  # [B, P]
    acceptance: Acceptance,
) -> torch.Tensor:
    """Accept lengths, tokens and paths as one tensor [B, 1 + 2P], for one copy to the host."""
    return torch.cat([acceptance.length[:, None], tokens, acceptance.path], dim=1)


def to_host(table: torch.Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """Each row's tokens and path as lists of its accept length: the step's one synchronisation."""
    width = table.shape[1] // 2
    rows = table.tolist()
    answers = [row[1 : 1 + row[0]] for row in rows]
    paths = [row[1 + width : 1 + width + row[0]] for row in rows]
    return answers, paths
