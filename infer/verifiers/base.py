"""What an acceptance rule is, and the registry of them.

A rule says which path of a token tree the target accepts, and the token behind it. Rules are pure
functions on tensors; they know no model and no cache. `scores` are the target's logits where a rule
needs no more (`reads="logits"`) and its probabilities otherwise. Rules marked lossy change the
output distribution and are never chosen unless the user names them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from drafthead.heads.errors import UserError
from drafthead.heads.sampling import RowRandom
from drafthead.heads.trees.tree import TokenTree


@dataclass(frozen=True)
class Acceptance:
    """The accepted path of each row, beginning with the root, and the target's own next token.

    `length` counts the root and the accepted nodes; as the root was committed before and the bonus
    is new, it is also the number of tokens that the pass commits.
    """

    path: torch.Tensor  # [B, max_depth + 1] node indices; 0 behind a row's length
    length: torch.Tensor  # [B], 1 to max_depth + 1
    bonus: torch.Tensor  # [B]


class Rule(Protocol):
    """The signature of an acceptance rule."""

    def __call__(
        self, tree: TokenTree, scores: torch.Tensor, random: RowRandom | None
    ) -> Acceptance:
        """Accept a path of `tree` given scores [B, N, V]."""
        ...


@dataclass(frozen=True)
class Verifier:
    """An acceptance rule and what the engine must know of it."""

    name: str
    rule: Rule
    lossless: bool
    reads: Literal["logits", "probs"]
    greedy: bool  # only for temperature 0; the others only for temperatures above it
    draws_children: bool  # whether it gains from children drawn from the draft's distribution
    follows: bool  # whether it accepts what the target itself says, as `follow` does


VERIFIERS: dict[str, Verifier] = {}


def register_verifier(
    name: str,
    *,
    lossless: bool,
    reads: Literal["logits", "probs"],
    greedy: bool = False,
    draws_children: bool = False,
    follows: bool = False,
) -> Callable[[Rule], Rule]:
    """Make a rule known by name; raises ValueError when the name is taken."""

    def register(rule: Rule) -> Rule:
        if name in VERIFIERS:
            raise ValueError(f"two verifiers are called {name!r}")
        VERIFIERS[name] = Verifier(name, rule, lossless, reads, greedy, draws_children, follows)
        return rule

    return register


def verifier_for(name: str, temperature: float, follows: bool = False) -> Verifier:
    """The verifier called `name`; `auto` is the fastest lossless one for the temperature.

    Above 0 that is `match` where it `follows` the target within a compiled graph, or in trees that
    adapt to what is accepted, which seeded answers of rules that draw children do not allow. Where
    it has neither advantage it is `rejection`, which accepts a little more of a tree.

    Raises UserError for an unknown name, or a rule that does not exist at this temperature.
    """
    if name == "auto":
        above_zero = "match" if follows else "rejection"
        name = "greedy" if temperature == 0 else above_zero
    if name not in VERIFIERS:
        known = ", ".join(["auto", *sorted(VERIFIERS)])
        raise UserError(f"unknown verifier {name!r}; known verifiers: {known}")
    verifier = VERIFIERS[name]
    if verifier.greedy and temperature > 0:
        raise UserError(
            f"verifier {name!r} would ignore temperature {temperature}: use rejection, or "
            "temperature 0"
        )
    if not verifier.greedy and temperature == 0:
        raise UserError(
            f"verifier {name!r} needs a temperature above 0: use greedy for temperature 0"
        )
    return verifier


def follow(tree: TokenTree, said: torch.Tensor) -> Acceptance:
    """Accept each node that is what the target says behind its parent; said [B, N]."""
    passes = tree.tokens == said.gather(1, tree.parents.clamp_min(0))
    passes[:, 0] = True
    node = deepest(tree, passes)
    return path_to(tree, node, said.gather(1, node[:, None]).squeeze(1))


def path_to(tree: TokenTree, node: torch.Tensor, bonus: torch.Tensor) -> Acceptance:
    """The acceptance of everything from the root to node [B]."""
    batch = torch.arange(node.shape[0], device=node.device)
    on_path = tree.ancestors[batch, node]  # [B, N]
    indices = torch.arange(tree.num_nodes, device=node.device).expand_as(on_path)
    # Each depth has one node on the path; the others are scattered into a column that is cut off.
    column = torch.where(on_path, tree.depths, tree.max_depth + 1)
    path = indices.new_zeros(node.shape[0], tree.max_depth + 2).scatter_(1, column, indices)
    return Acceptance(path[:, :-1], on_path.sum(1), bonus)


def deepest(
    tree: TokenTree, passes: torch.Tensor, preference: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """The deepest node [B] whose path passes [B, N] throughout, by preference [B, N] in [0, 1)."""
    reached = (passes[:, None, :] | ~tree.ancestors).all(-1)
    return torch.where(reached, tree.depths + preference, -1.0).argmax(1)
