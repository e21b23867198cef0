"""The law of an acceptance rule on small random tables, where the target's law is known exactly.

The shipped rule runs on a great many trees at once, filled and judged as while decoding.
"""

import torch
from tqdm import trange

from drafthead.core.coupling import Choice, NextDraws
from drafthead.core.sampling import (
    RowRandom,
    RowSampling,
    SamplingConfig,
    draft_distribution,
    draw_without_replacement,
    sample,
)
from drafthead.core.trees.tree import TokenTree, TreeShape
from drafthead.infer.engine.step import following_tokens
from drafthead.infer.verifiers import Verifier
from drafthead.lab.exactness.goodness_of_fit import Fit, fit

VOCAB = 5
SHAPE = TreeShape.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])
LENGTH = SHAPE.depth + 1  # tokens that a step commits at most
ROWS = 1 << 14  # trees at a time
# Half of the draft laws are so steep that their tokens are further apart than float32 reaches: what
# is left after the first child has to be exact too.
STEEP = 40.0

Laws = list[torch.Tensor]  # for each length d the laws [V^d, V] after all prefixes of d tokens


class OneStream(RowRandom):
    """Uniform numbers for all rows from one generator: a million generators would take minutes."""

    def __init__(self, rows: int, generator: torch.Generator):
        super().__init__([], generator.device)
        self.rows, self.generator = rows, generator
        self.keys: torch.Tensor | None = None  # [B, LENGTH]

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(self.rows, *shape, generator=self.generator, dtype=torch.float64)

    def ahead(self, count: int) -> torch.Tensor:
        """Keys [B, count] for the next tokens: the same ones at each call, up to LENGTH."""
        if self.keys is None:
            low, high = -(2**63), 2**63 - 1
            self.keys = torch.randint(low, high, (self.rows, LENGTH), generator=self.generator)
        return self.keys[:, :count]


def fit_of_rule(verifier: Verifier, seed: int, batches: int) -> Fit:
    """Texts of `batches` x ROWS steps under `verifier`, compared with a random target table's law.

    The target continues a step's tokens to LENGTH, the most that a step commits, so all samples
    are of one length; their VOCAB^LENGTH probabilities are products of table entries.
    """
    generator = torch.Generator().manual_seed(seed)
    target = [scores.softmax(-1) for scores in random_scores(generator)]
    draft = random_drafts(generator)
    counts = torch.zeros(VOCAB**LENGTH, dtype=torch.long)
    for _ in trange(batches, desc="rule on a table", unit="batch", leave=False):
        counts += torch.bincount(
            sample_texts(verifier, target, draft, OneStream(ROWS, generator)), minlength=len(counts)
        )
    law = torch.ones(1, dtype=torch.float64)
    for table in target:
        law = (law[:, None] * table).flatten()
    return fit(counts, law)


def random_scores(generator: torch.Generator) -> list[torch.Tensor]:
    """Logits [V^d, V] for each length d: uneven laws, each with one token of probability 0."""
    tables = []
    for length in range(LENGTH):
        scores = 1.5 * torch.randn(VOCAB**length, VOCAB, generator=generator)
        never = torch.randint(VOCAB, (VOCAB**length, 1), generator=generator)
        tables.append(scores.scatter(1, never, -torch.inf))
    return tables


def random_drafts(generator: torch.Generator) -> Laws:
    """The laws that children are drawn from; those after about half of the prefixes are steep."""
    laws = []
    for scores in random_scores(generator):
        steep = torch.rand(len(scores), 1, generator=generator) < 0.5
        scores = torch.where(steep, STEEP * scores, scores)
        laws.append(draft_distribution(scores, SamplingConfig(temperature=1.0)))
    return laws


def sample_texts(verifier: Verifier, target: Laws, draft: Laws, random: OneStream) -> torch.Tensor:
    """Return which of the VOCAB^LENGTH texts each row generates, [B]: its tokens are the digits.

    With VOCAB 5 the text (1, 0, 2) is 1 * 25 + 0 * 5 + 2 = 27. Children are chosen as while
    decoding with this rule.
    """
    choice: Choice = random if verifier.draws_children else None
    if verifier.follows:
        laws = RowSampling((SamplingConfig(1.0),) * random.rows)
        choice = NextDraws(random.ahead(LENGTH), laws.settings(random.device))
    tokens, codes = fill_trees(draft, choice, random.rows)
    depths = SHAPE.depths.tolist()

    def after_nodes(laws: Laws) -> torch.Tensor:  # [B, N, V]
        return torch.stack([laws[d][codes[:, node]] for node, d in enumerate(depths)], dim=1)

    tree = TokenTree.from_shape(SHAPE, tokens)
    if verifier.draws_children:
        draft_probs = after_nodes(draft)
        ids = torch.arange(VOCAB).expand_as(draft_probs)
        tree = TokenTree.from_shape(SHAPE, tokens, ids, draft_probs)
    acceptance = verifier.rule(tree, after_nodes(target), random)
    committed = following_tokens(tree, acceptance)  # [B, LENGTH]
    text = torch.zeros_like(acceptance.bonus)
    for place in range(LENGTH):
        continued = sample(target[place][text], random.uniform())
        token = torch.where(place < acceptance.length, committed[:, place], continued)
        text = text * VOCAB + token
    return text


def fill_trees(draft: Laws, random: Choice, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, N] of trees of SHAPE, and the text [B, N] from the root to each node as a number.

    `random` says how children are chosen from the draft's laws, see `DraftSession.propose`.
    """
    tokens = torch.zeros(rows, SHAPE.num_nodes, dtype=torch.long)
    codes = torch.zeros_like(tokens)
    for node, depth in enumerate(SHAPE.depths.tolist()):
        children = (SHAPE.parents == node).nonzero().flatten()
        if len(children) == 0:
            continue
        law = draft[depth][codes[:, node]]  # [B, V]
        if isinstance(random, RowRandom):
            chosen = draw_without_replacement(law, len(children), random.uniform(VOCAB))
        else:
            ordered, ids = law.sort(dim=-1, descending=True)
            if random is not None:
                ids = ids.gather(-1, random.best(depth, ordered.log(), ids, len(children))[1])
            chosen = ids[:, : len(children)]
        tokens[:, children] = chosen
        codes[:, children] = codes[:, node, None] * VOCAB + chosen
    return tokens, codes
