"""Exporting a head, and refusing to when the format's readers would compute something else."""

from copy import deepcopy
from pathlib import Path

import torch
from transformers import LlamaConfig

from drafthead.core.drafting.drafter import Committed
from drafthead.core.errors import UserError
from drafthead.core.sampling import RowRandom, SamplingConfig
from drafthead.core.storage.files import fresh_folder
from drafthead.core.target.context import Context
from drafthead.core.target.features import Features
from drafthead.core.target.logit_finish import Finish
from drafthead.core.target.target import Target
from drafthead.core.trees.guesses import known
from drafthead.core.trees.tree import TokenTree, TreeShape
from drafthead.heads.base import DraftHead
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.formats.base import FORMATS, Export, Probe, TargetFacts, WritableFormat
from drafthead.heads.formats.loading import build_head, read_foreign

POSITIONS = 12  # of the target before the probe's root
TOLERANCE = 1e-3  # of log-probabilities in float32, relative to their spread where that is above 1
# Smaller log-probabilities are raised to it: in float32 exp(-104) is 0, its logarithm infinite.
LEAST = -80.0


class StandIn(Target):
    """Random embeddings and a random output head that replace a target that was not given."""

    def __init__(self, facts: TargetFacts):
        generator = torch.Generator().manual_seed(0)
        size, vocab = facts.hidden_size or 0, facts.vocab_size or 0
        # One attention head divides every hidden size.
        self.config = LlamaConfig(
            hidden_size=size,
            vocab_size=vocab,
            num_attention_heads=1,
            max_position_embeddings=2048,
        )
        self.context = Context.of(self.config)
        self.layers = range(facts.num_layers or 0)  # type: ignore[assignment]  # for their number
        self.finish = Finish()
        self.embedding = torch.randn(vocab, size, generator=generator)
        self.output = torch.randn(vocab, size, generator=generator) / size**0.5

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., D] of tokens [...]."""
        return self.embedding[token_ids]

    def output_weight(self) -> torch.Tensor:
        """The output head [V, D]."""
        return self.output

    def project(self, hidden: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [..., V] of hidden [..., D], or those of some tokens."""
        return hidden @ (self.output if tokens is None else self.output[tokens]).T


def writable(name: str, family: str) -> WritableFormat:
    """The format called `name`; raises UserError unless it can hold a head of `family`."""
    known = [key for key, value in FORMATS.items() if isinstance(value, WritableFormat)]
    found = FORMATS.get(name)
    if not isinstance(found, WritableFormat):
        raise UserError(f"cannot export to {name!r}; known formats: {', '.join(known)}")
    if family not in found.families:
        able = [key for key in known if family in FORMATS[key].families]
        raise UserError(
            f"{name} cannot express a head of the family {family}, only "
            f"{', '.join(found.families)}: use {' or '.join(able)}"
        )
    return found


def export_head(
    head: DraftHead, facts: TargetFacts, target: Target | None, name: str, folder: Path
) -> float:
    """Write a head in the format called `name`, after checking that readers compute the same.

    `target`, if given, is in float32 on the CPU; `facts` hold its sizes in any case. Returns the
    largest difference of log-probabilities, relative to their spread. Raises UserError, and writes
    nothing, when the format cannot express the head, when the files are read back as another head,
    or when the reader's arithmetic has another result.
    """
    known = writable(name, head.family)
    with fresh_folder(folder) as temporary, torch.no_grad():
        known.written(Export(head, facts, target)).save(temporary)
        stand_in = target or StandIn(facts)
        found, foreign = read_foreign(temporary, TargetFacts.of(stand_in))
        if found is not known:
            raise UserError(
                f"files written as {name} are read as {found.name}: the export was removed"
            )
        again = build_head(foreign, temporary, stand_in)
        if again.depth != head.depth:
            raise UserError(
                f"{name} cannot express a depth of {head.depth}: its files are read with "
                f"{again.depth}"
            )
        probe, tree = draw_chain(head, stand_in)
        _, tree_again = draw_chain(again, stand_in)
        difference = max(
            difference_of(known.replay(temporary, probe), tree),
            difference_of(log_probs_by_token(tree_again, stand_in.vocab_size), tree),
        )
        if not difference <= TOLERANCE:
            raise UserError(
                f"a reader of {name} would not compute what this head does (log-probabilities "
                f"differ by {difference:.1e}): the export was removed"
            )
    return difference


def draw_chain(head: DraftHead, target: Target) -> tuple[Probe, TokenTree]:
    """A chain that a head, in float32, draws after random features of a target."""
    head = deepcopy(head).float()
    generator = torch.Generator().manual_seed(1)
    shape = (1, POSITIONS, target.hidden_size)
    spec = head.features_needed
    features = Features(
        torch.randn(shape, generator=generator),
        tuple(torch.randn(shape, generator=generator) for _ in spec.layers),
    )
    tokens = torch.randint(target.vocab_size, shape[:2], generator=generator)
    drafter = drafter_for(head, target, TreeShape.chain(head.depth))
    session = drafter.start(tokens, torch.tensor([POSITIONS]))
    session.commit(Committed(tokens, features, torch.tensor([POSITIONS])))
    random = RowRandom([0], target.device)
    tree = known(session.propose(drafter.budgets[-1], SamplingConfig(temperature=1.0), random))
    return Probe(target, tokens, features, tree.tokens[0, 1:]), tree


def log_probs_by_token(tree: TokenTree, vocab_size: int) -> torch.Tensor:
    """Log-probabilities [K, V] from which a chain was drawn, -inf outside the support."""
    assert tree.draft_ids is not None and tree.draft_probs is not None
    ids, probs = tree.draft_ids[0, :-1], tree.draft_probs[0, :-1]
    return probs.new_full((len(ids), vocab_size), -torch.inf).scatter(1, ids, probs.log())


def difference_of(logits: torch.Tensor, tree: TokenTree) -> float:
    """Return how far logits [K, V] are from those the chain was drawn from, on its support.

    The largest difference of log-probabilities, relative to their spread; near 1 when other tokens
    are the most probable.
    """
    assert tree.draft_ids is not None and tree.draft_probs is not None
    ids, probs = tree.draft_ids[0, :-1], tree.draft_probs[0, :-1]
    expected = probs.log().clamp_min(LEAST)
    scores = logits.log_softmax(1).clamp_min(LEAST)
    found = scores.gather(1, ids)
    best = scores.topk(ids.shape[1], dim=1).values
    missed = (best.sort(dim=1).values - found.sort(dim=1).values).abs().max()
    distance = (found.log_softmax(1) - expected).abs().max()
    spread = float((expected.max() - expected.min()).clamp_min(1))
    return float(torch.maximum(missed, distance)) / spread
