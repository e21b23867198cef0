"""Acceptance rules and their registry.

A rule returns the path of a token tree that is accepted, and the token after it. Rules are pure
functions on tensors: they know no model and no cache. `scores` are the target's logits for rules
that need no more (`reads="logits"`), and its probabilities for the others. Lossy rules change the
output distribution and are used only when the user names them. A rule with options is a frozen
dataclass that is called: its fields are the options.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Protocol

import torch

from drafthead.core.errors import UserError
from drafthead.core.registry import Registry
from drafthead.core.sampling import RowRandom
from drafthead.core.settings import read
from drafthead.core.trees.tree import TokenTree

LEAST_LOG_PROB = math.log(1e-10)
FOLLOWING = ("greedy", "match")


@dataclass(frozen=True)
class Acceptance:
    """The accepted path of each row, beginning with the root, and the target's own next token.

    `length` counts the root and the accepted nodes. The root was committed before and the bonus
    is new, so it is also the number of tokens that the pass commits.
    """

    path: torch.Tensor  # [B, max_depth + 1] node indices; 0 after a row's length
    length: torch.Tensor  # [B], 1 to max_depth + 1
    bonus: torch.Tensor  # [B] the target's token after the path


class Rule(Protocol):
    """The signature of an acceptance rule."""

    def __call__(
        self,
        tree: TokenTree,
        scores: torch.Tensor,  # [B, N, V] of the target, after each node
        random: RowRandom | None,  # None at temperature 0
    ) -> Acceptance:
        """Accept a path of the tree."""
        ...


@dataclass(frozen=True)
class Verifier:
    """An acceptance rule and what the engine must know about it."""

    name: str
    rule: Rule
    lossless: bool
    reads: Literal["logits", "probs"]
    greedy: bool  # for temperature 0 alone; all other rules are for temperatures above it
    draws_children: bool  # accepts more when children are drawn from the draft's distribution
    follows: bool  # accepts exactly the nodes that are the target's own tokens, as `follow` does

    def with_options(self, options: Mapping[str, Any]) -> "Verifier":
        """This verifier with other options of its rule; those left out keep their defaults.

        Raises UserError for an option that the rule does not have, or a value out of its range.
        """
        if unknown := sorted(options.keys() - self.options.keys()):
            raise UserError(f"verifier {self.name!r} has no option {unknown[0]}")
        if not options:
            return self
        return replace(self, rule=read(type(self.rule), {**self.options, **options}))

    @property
    def options(self) -> dict[str, Any]:
        """The options of its rule, with their values: the fields of the rule's dataclass."""
        if not is_dataclass(self.rule):
            return {}
        return {each.name: getattr(self.rule, each.name) for each in fields(self.rule)}


VERIFIERS = Registry[Verifier](
    dict.fromkeys(("lenient", "top_k", "typical"), "drafthead.contrib.lossy_rules")
)


def register_verifier(
    name: str,
    *,
    lossless: bool,
    reads: Literal["logits", "probs"],
    greedy: bool = False,
    draws_children: bool = False,
    follows: bool = False,
) -> Callable[[Rule], Rule]:
    """Register a rule by name; raises ValueError when the name is taken."""

    def register(rule: Rule) -> Rule:
        verifier = Verifier(name, rule, lossless, reads, greedy, draws_children, follows)
        VERIFIERS.register(name, verifier, "verifiers")
        return rule

    return register


def verifier_for(name: str, temperature: float, sampling_rule: str = "match") -> Verifier:
    """The verifier called `name`; `auto` is `greedy`, or above temperature 0 `sampling_rule`.

    Raises UserError for an unknown name, or for a rule that does not exist at this temperature.
    """
    if name == "auto":
        name = "greedy" if temperature == 0 else sampling_rule
    if name not in VERIFIERS:
        known = ", ".join(["auto", *sorted(VERIFIERS)])
        raise UserError(f"unknown verifier {name!r}; known verifiers: {known}")
    verifier = VERIFIERS[name]
    if verifier.greedy and temperature > 0:
        raise UserError(
            f"the rule {name!r} would ignore temperature {temperature}: use rejection, or "
            "temperature 0"
        )
    if not verifier.greedy and temperature == 0:
        raise UserError(
            f"verifier {name!r} needs a temperature above 0: use greedy for temperature 0"
        )
    return verifier


def options_of_rule(name: str, wanted: Collection[str]) -> frozenset[str]:
    """The options of the rule called `name`, if there is one.

    Raises UserError for an option that is `wanted` and that another rule has.
    """
    own = frozenset(VERIFIERS[name].options if name in VERIFIERS else ())
    for other in sorted(set(wanted) - own):
        rules = [rule for rule in VERIFIERS if other in VERIFIERS[rule].options]
        if rules:
            raise UserError(
                f"verifier {name!r} has no option {other}; it is one of {' and '.join(rules)}"
            )
    return own


def rule_of_rows(name: str, greedy: bool) -> str:
    """The rule of a batch whose rows use this rule, depending on whether any of them samples.

    Rows of `greedy` and of `match` can share a batch: each follows the target's own tokens.
    """
    return name if name not in FOLLOWING else FOLLOWING[0 if greedy else 1]


def follow(tree: TokenTree, target_tokens: torch.Tensor) -> Acceptance:
    """Accept each node that is the target's own token after its parent.

    `target_tokens` [B, N] are the target's tokens after each node.
    """
    passes = tree.tokens == at_parents(tree, target_tokens)
    # The root was committed before; what its own token is compared with says nothing.
    passes[:, 0] = True
    node = deepest(tree, passes)
    return path_to(tree, node, target_tokens.gather(1, node[:, None]).squeeze(1))


def path_to(tree: TokenTree, node: torch.Tensor, bonus: torch.Tensor) -> Acceptance:
    """Accept everything from the root to `node` [B], with the token `bonus` [B] after it.

    Parents (-1, 0, 0, 2) and node 3 give the path 0 2 3 and length 3.
    """
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
    """The deepest node [B] whose whole path passes [B, N].

    Among nodes of one depth, the one with the largest `preference` [B, N], in [0, 1), wins.
    """
    # Nodes that are not on a path have no say in it.
    reached = (passes[:, None, :] | ~tree.ancestors).all(-1)
    # Depths are whole numbers and preferences less than one: depth decides first.
    return torch.where(reached, tree.depths + preference, -1.0).argmax(1)


def likeliest_deepest(
    tree: TokenTree, passes: torch.Tensor, log_probs: torch.Tensor
) -> torch.Tensor:
    """The node [B] at the end of the longest path that passes; of several the most probable one.

    `passes` [B, N] and the target's `log_probs` [B, N] of the nodes' tokens matter for real nodes
    alone: the root always passes, padding never.
    """
    passes = passes & (tree.tokens >= 0)
    passes[:, 0] = True
    # Very improbable tokens count alike, and so does what has no law: NaN or -inf at one node would
    # spoil the sums of all.
    log_probs = log_probs.nan_to_num(LEAST_LOG_PROB).clamp_min(LEAST_LOG_PROB)
    log_probs[:, 0] = 0
    path_log_probs = (log_probs[:, None] * tree.ancestors).sum(-1)
    # The log maps to (0, 1). The path's probability itself could be too small to be compared.
    return deepest(tree, passes, 0.999 / (1 - path_log_probs))


def at_parents(tree: TokenTree, table: torch.Tensor) -> torch.Tensor:
    """The entry [B, N, ...] of table [B, N, ...] at each node's parent; at the root its own.

    Parents (-1, 0, 0, 1) take the entries 0 0 0 1.
    """
    # -1, the root's parent, would be the last entry.
    parents = tree.parents.clamp_min(0)
    parents = parents.view(*parents.shape, *(1,) * (table.dim() - 2))
    return table.gather(1, parents.expand_as(table))
