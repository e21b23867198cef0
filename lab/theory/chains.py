"""Drafters as chains of any length: what the theory of speculative decoding is about."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from drafthead.core.drafting.drafter import Committed, Drafter
from drafthead.core.errors import UserError
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.loading import vocabulary_of
from drafthead.core.target.target import TargetOutput
from drafthead.core.trees.guesses import known
from drafthead.core.trees.tree import Budget, TokenTree, TreeShape
from drafthead.heads.base import DraftHead
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.formats.loading import load_head
from drafthead.infer import Decoder, Target
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.drafters.model_drafter import load_draft_model, model_drafter
from drafthead.infer.drafters.store_lookup import DEPTH, LookupChains, load_table
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.engine.stepper import Stepper
from drafthead.infer.loading.loaded import NamedDraft
from drafthead.infer.request.request import Request
from drafthead.infer.verifiers import VERIFIERS
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
        """Return what drafts chains of `length` tokens; made once."""
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
    if draft.name == "lookup":  # a chain of no tokens counts as one that is refused
        return Chains(name, target, MAX_CHAIN, PromptLookup)
    if draft.name == "model":
        return model_chains(name, load_draft_model(draft.argument, target, dtype), target)
    if draft.name == "ngrams":
        assert target.tokenizer is not None  # a target read from disk has one
        table = load_table(Path(draft.argument), vocabulary_of(target.tokenizer))
        drafter = LookupChains(table)
        return Chains(name, target, DEPTH, lambda n: drafter)  # shorter where little is known
    raise UserError(f"the theory is of chains, which {draft.name} do not draft: leave them out")


def head_chains(name: str, head: DraftHead, target: Target) -> Chains:
    """A head's first guesses, as many as it drafts."""
    most = min(MAX_CHAIN, head.depth)
    return Chains(name, target, most, lambda n: drafter_for(head, target, TreeShape.chain(n)))


def model_chains(name: str, model: Target, target: Target) -> Chains:
    """A draft model, with the target's tokenizer or another; one drafter serves all lengths."""
    drafter = model_drafter(model, target, MAX_CHAIN)
    return Chains(name, target, MAX_CHAIN, lambda n: drafter)


@torch.no_grad()
def operations_ratio(chains: Chains, length: int) -> float:
    """c^: arithmetic of one drafted token of a chain / that of the target's pass over one token.

    Additions and multiplications of matrix products and attention are counted while both run.
    """
    target, drafter = chains.target, chains.drafter(length)
    columns = 1, min(COMMITTED, target.max_length or COMMITTED)
    random = torch.Generator().manual_seed(0)
    text = torch.randint(target.vocab_size, columns, generator=random).tolist()
    stepper = greedy_stepper(target, text, drafter.features, length + 1)
    prompt, _ = stepper.prefill()
    a_pass = operations(pass_alone(stepper, 1))
    propose = proposal_alone(drafter, chain_budget(length), stepper, prompt)
    return operations(propose) / length / a_pass


def operations(call: Callable[[], object]) -> int:
    """Floating-point operations of torch's matrix products and attention in a call."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


COMMITTED = 256  # cache columns before a pass
GREEDY = SamplingConfig()


def proposal_alone(
    drafter: Drafter, budget: Budget, stepper: Stepper, prompt: Committed
) -> Callable[[], TokenTree]:
    """A greedy proposal after one newly committed token, ready to be called.

    Its session has read the prompt, and what the drafter computes of it is not part of the call.
    """
    session = drafter.start(stepper.prompt_ids, stepper.prompt_lengths)
    session.commit(prompt)
    session.propose(budget, GREEDY, None)  # reads the rest of the prompt, if any
    ones = torch.ones_like(prompt.lengths)
    session.commit(Committed(prompt.tokens, prompt.features, ones, width=1, cache=stepper.cache))
    return lambda: known(session.propose(budget, GREEDY, None))


def greedy_stepper(
    target: Target, prompts: Sequence[Sequence[int]], features: FeatureSpec, max_nodes: int
) -> Stepper:
    """The engine's stepper for greedy answers to prompts."""
    ones, seeds = [1] * len(prompts), [0] * len(prompts)
    request = Request(prompts=prompts, limits=ones, seeds=seeds, sampling=GREEDY)
    run = BatchRun(request, target.device)
    return Stepper(target, run, features, VERIFIERS["greedy"], max_nodes)


def pass_alone(stepper: Stepper, nodes: int) -> Callable[[], TargetOutput]:
    """A pass over a chain of `nodes` tokens after the committed text, ready to be called.

    Mask and positions are made here, outside the pass, and the pass commits nothing.
    """
    target, cache, features = stepper.target, stepper.cache, stepper.features
    assert cache.lengths is not None
    device = target.device
    steps = torch.arange(nodes, device=device)
    tokens = stepper.roots[:, None].expand(-1, nodes).contiguous()
    positions = target.legal_positions(cache.lengths[:, None] + steps)
    mask = target.tree_mask(cache, (steps[:, None] >= steps)[None])
    return lambda: target.run(tokens, positions, mask, features, cache)
