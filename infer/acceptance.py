"""What becomes of a verified tree: the rule's verdict, and the tokens that it commits."""

import torch

from drafthead.heads.sampling import RowRandom, SamplingConfig, probabilities
from drafthead.heads.tree import TokenTree
from drafthead.infer.verifiers import VERIFIERS, Acceptance, Verifier


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


def accept_greedily(
    logits: torch.Tensor,  # [B, N, V]
    tokens: torch.Tensor,  # [B, N]
    parents: torch.Tensor,  # [B, N]
    depths: torch.Tensor,  # [B, N]
    ancestors: torch.Tensor,  # [B, N, N]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`accept` by the greedy rule, on tensors alone so that it can be compiled.

    Returns path [B, N], length [B], bonus [B] and following tokens [B, N]: as long as the tree has
    nodes, so that one graph serves trees of any depth.
    """
    most = tokens.shape[1] - 1
    tree = TokenTree(tokens, parents, depths, ancestors, max_depth=most, width=most)
    acceptance = VERIFIERS["greedy"].rule(tree, logits, None)
    following = following_tokens(tree, acceptance)
    return acceptance.path, acceptance.length, acceptance.bonus, following


def following_tokens(tree: TokenTree, acceptance: Acceptance) -> torch.Tensor:
    """The token [B, P] behind each node of the accepted path.

    For root "a", accepted "b c" and bonus "d" the path is a b c and the tokens are b c d.
    """
    path_tokens = tree.tokens.gather(1, acceptance.path)
    last = acceptance.length[:, None] - 1
    # Rolled and not cut by its first: a compiled graph for any P has no dimension that may be 1.
    return path_tokens.roll(-1, dims=1).scatter(1, last, acceptance.bonus[:, None])


def to_host(
    tokens: torch.Tensor,  # [B, P]
    acceptance: Acceptance,
) -> tuple[list[list[int]], list[list[int]]]:
    """Each row's tokens and path as lists of its accept length: the step's one synchronisation."""
    everything = torch.cat([acceptance.length[:, None], tokens, acceptance.path], dim=1).tolist()
    width = tokens.shape[1]
    answers = [row[1 : 1 + row[0]] for row in everything]
    paths = [row[1 + width : 1 + width + row[0]] for row in everything]
    return answers, paths
