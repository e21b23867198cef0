"""Drafters as chains of any length: what the theory of speculative decoding is about."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from drafthead.core.drafting.drafter import Drafter
from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget, TreeShape
from drafthead.heads.base import DraftHead
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.formats.loading import load_head
from drafthead.infer.decoder import Decoder
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.drafters.model_drafter import load_draft_model, model_drafter
from drafthead.infer.drafters.store_lookup import DEPTH, LookupChains
from drafthead.infer.loaded import NamedDraft, store_lookup
from drafthead.lab.profiling.pass_times import after_random_text, pass_alone, proposal_alone
from drafthead.lab.speedup_model import MAX_CHAIN


@dataclass(frozen=True)
class Chains:
    """A drafter that proposes one token after the other, up to `longest` of them."""

    name: str
    target: Target
    longest: int
    make: Callable[[int], Drafter]  # drafts chains of so many tokens, within their budget
    made: dict[int, Drafter] = field(default_factory=dict)

    def drafter(self, length: int) -> Drafter:
        """What drafts chains of `length` tokens; made once."""
        if length not in self.made:
            self.made[length] = self.make(length)
        return self.made[length]

    def decoder(self, length: int) -> Decoder:
        """Decoding with chains of `length` tokens at every step."""
        return Decoder(self.target, self.drafter(length), chain_budget(length))


def chain_budget(length: int) -> Budget:
    """The budget of a chain of `length` tokens after the root."""
    return Budget(length + 1, length)


def named_chains(name: str, draft: NamedDraft, target: Target, dtype: str) -> Chains:
    """The chains of a drafter, called `name`; raises UserError for a kind that drafts none."""
    if draft.name == "head":
        return head_chains(name, load_head(Path(draft.argument), target), target)
    if draft.name == "model":
        return model_chains(name, load_draft_model(draft.argument, target, dtype), target)
    if draft.name == "lookup":
        return lookup_chains(name, target)
    if draft.name == "ngrams":
        return ngram_chains(name, Path(draft.argument), target)
    raise UserError(f"the theory is of chains, which {draft.name} do not draft: leave them out")


def head_chains(name: str, head: DraftHead, target: Target) -> Chains:
    """A head's first guesses, as many as it drafts."""
    most = min(MAX_CHAIN, head.depth)
    return Chains(name, target, most, lambda n: drafter_for(head, target, TreeShape.chain(n)))


def model_chains(name: str, model: Target, target: Target) -> Chains:
    """A draft model, with the target's tokenizer or another; one drafter serves all lengths."""
    drafter = model_drafter(model, target, MAX_CHAIN)
    return Chains(name, target, MAX_CHAIN, lambda n: drafter)


def lookup_chains(name: str, target: Target) -> Chains:
    """Prompt lookup; where it finds nothing, a chain of no tokens counts as one that is refused."""
    return Chains(name, target, MAX_CHAIN, PromptLookup)


def ngram_chains(name: str, folder: Path, target: Target) -> Chains:
    """Chains from a table of n-grams and the row's past, shorter where those know little."""
    drafter = LookupChains(store_lookup(folder, target).table)
    return Chains(name, target, DEPTH, lambda n: drafter)


@torch.no_grad()
def operations_ratio(chains: Chains, length: int) -> float:
    """c^: arithmetic of one drafted token of a chain / that of the target's pass over one token.

    Additions and multiplications of matrix products and attention are counted while both run.
    """
    drafter = chains.drafter(length)
    stepper, prompt = after_random_text(chains.target, drafter, 1, length + 1)
    target = operations(pass_alone(stepper, 1))
    propose = proposal_alone(drafter, chain_budget(length), stepper, prompt)
    return operations(propose) / length / target


def operations(call: Callable[[], object]) -> int:
    """Floating-point operations of torch's matrix products and attention in a call."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()
