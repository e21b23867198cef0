"""What an n-gram table adds to a head and lookup: `benchmarks/draft_sources.py --help`.

Answers are decoded with the head's trees alone. At each step the tokens that the table and lookup
would have proposed are compared with those that the target then wrote: how often a proposed first
token is right, by the probability that its source gave it, and tau of trees of all three.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from recorded import write_record
from tqdm import tqdm

from drafthead.core.coupling import Choice
from drafthead.core.sampling import Sampling
from drafthead.core.trees.guesses import GuessTree, known
from drafthead.core.trees.tree import Budget, TokenTree
from drafthead.heads.growing.growing_tree import GrowingTree
from drafthead.infer import Decoder
from drafthead.infer.drafters.history import History
from drafthead.infer.drafters.ngram_table import NgramTable
from drafthead.infer.drafters.store_lookup import DEPTH, LEAST_NGRAM, TRUE_SHARE
from drafthead.infer.drafters.with_lookup import WithLookup, WithLookupSession
from drafthead.lab.reports.report import Table, number, print_table
from drafthead.train.data.conversations import read_conversations

SIZES = (4, 6, 8, 16)  # nodes of a tree, the root among them
BINS = 10  # of the probability that a source gives a first token
SOURCES = {
    "head": ("head",),
    "head, lookup": ("head", "lookup"),
    "head, lookup, table": ("head", "lookup", "table"),
    "lookup": ("lookup",),
    "lookup, table": ("lookup", "table"),
    "lookup, table by halves": ("lookup", "by halves"),
    "table": ("table",),
}


@dataclass(frozen=True)
class Step:
    """What each source proposes after the first `place` tokens of a text."""

    place: int
    trees: dict[str, GuessTree]


class Recording(WithLookupSession):
    """A session that drafts with the head alone, and keeps what others would have proposed."""

    steps: list[Step]

    def propose(self, budget: Budget, sampling: Sampling, random: Choice) -> TokenTree:
        tree = known(self.session.propose(replace(budget, least_chance=0.0), sampling, random))
        [past], table = self.lookup.histories, self.drafter.table
        assert table is not None
        own = past.continuation(budget.nodes - 1, LEAST_NGRAM)
        scores = self.lookup.drafter.matches.log_chances(past.matched(LEAST_NGRAM), len(own))
        trees = {
            "head": guesses_of(tree),
            "lookup": GuessTree.chain(own, scores),
            "table": counted(table, past, budget.nodes - 1, 1.0),
            "by halves": counted(table, past, budget.nodes - 1, TRUE_SHARE),
        }
        self.steps.append(Step(len(past.tokens), trees))
        return tree


def guesses_of(tree: TokenTree) -> GuessTree:
    """A drafter's tree of one row, on the host."""
    assert tree.scores is not None
    grown, nodes = GrowingTree(), [0]
    scores = tree.scores.expand(tree.tokens.shape)[0]
    for token, parent, score in zip(
        tree.tokens[0].tolist()[1:], tree.parents[0].tolist()[1:], scores.tolist()[1:], strict=True
    ):
        nodes.append(grown.add(nodes[parent], token, score))
    return grown.tree


def counted(table: NgramTable, past: History, nodes: int, share: float) -> GuessTree:
    """What a table expects, of its probabilities a share at each level."""
    grown, true = GrowingTree(), [share ** (place + 1) for place in range(DEPTH)]
    grown.add_heaviest(table.after(past.tokens), true, nodes, DEPTH)
    return grown.tree


def accepted(tree: GuessTree, text: Sequence[int]) -> int:
    """How many tokens of a text a tree holds as a path from its root."""
    children = {
        pair: node for node, pair in enumerate(zip(tree.parents, tree.tokens, strict=True), start=1)
    }
    node = 0
    for depth, token in enumerate(text):
        if (node, token) not in children:
            return depth
        node = children[node, token]
    return len(text)


def firsts(tree: GuessTree) -> dict[int, float]:
    """The tokens right after the root, and their probabilities."""
    return {
        token: math.exp(score)
        for token, parent, score in zip(tree.tokens, tree.parents, tree.scores, strict=True)
        if parent == 0
    }


def steps_of(decoder: Decoder, prompts: Path, limit: int, new: int) -> Iterator[tuple[Step, list]]:
    """Each step of the answers to prompts, with the tokens that the target wrote from there on."""
    for row in tqdm(read_conversations(prompts, limit=limit), desc="prompts", leave=False):
        Recording.steps, messages = [], row.messages
        while messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        result = decoder.generate(messages, max_new_tokens=new)
        for step in Recording.steps:
            if text := result.sequences[0][step.place - result.prompt_lengths[0] :]:
                yield step, text


def main(
    target: Annotated[str, typer.Option(help="The model.")],
    head: Annotated[str, typer.Option(help="A trained head.")],
    ngrams: Annotated[Path, typer.Option(help="A folder of `drafthead data index`.")],
    prompts: Annotated[Path, typer.Option(help="Conversations, whose answers are not read.")],
    output: Annotated[Path, typer.Option(help="JSON file to write.")],
    limit: Annotated[int, typer.Option(help="Number of prompts to use.")] = 40,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 128,
) -> None:
    """Count what an n-gram table adds to a head and lookup."""
    torch.set_num_threads(1)
    draft = [head, f"ngrams:{ngrams}"]
    decoder = Decoder.from_pretrained(target, draft=draft, tree_nodes=SIZES[-1])
    assert isinstance(decoder.drafter, WithLookup)
    decoder.drafter.start = lambda *given: Recording(decoder.drafter, *given)  # type: ignore
    sums: Counter[tuple[str, int]] = Counter()
    seen: dict[str, list[list[float]]] = {
        source: [[0, 0.0, 0] for _ in range(BINS)] for source in ("head", "lookup", "table alone")
    }
    steps = 0
    for step, text in steps_of(decoder, prompts, limit, max_new_tokens):
        steps += 1
        for name, parts in SOURCES.items():
            both = GrowingTree()
            for part in parts:
                both.add_tree(step.trees[part])
            for size in SIZES:
                sums[name, size] += 1 + accepted(both.best(size - 1), text)
        others = firsts(step.trees["head"]) | firsts(step.trees["lookup"])
        alone = {t: p for t, p in firsts(step.trees["table"]).items() if t not in others}
        known_firsts = {name: firsts(step.trees[name]) for name in ("head", "lookup")}
        for source, found in {**known_firsts, "table alone": alone}.items():
            for token, chance in found.items():
                entry = seen[source][min(int(chance * BINS), BINS - 1)]
                entry[0], entry[1] = entry[0] + 1, entry[1] + chance
                entry[2] += token == text[0]
    taus = {name: {size: sums[name, size] / steps for size in SIZES} for name in SOURCES}
    rows = [[name, *(number(tau) for tau in of.values())] for name, of in taus.items()]
    print_table(Table(f"tau on {steps} steps", ["sources", *map(str, SIZES)], rows))
    totals = {source: [sum(part) for part in zip(*of, strict=True)] for source, of in seen.items()}
    rows = [[name, str(int(n)), number(p), str(int(r))] for name, (n, p, r) in totals.items()]
    print_table(Table("first tokens", ["source", "proposed", "promised right", "right"], rows))
    found = {
        "steps": steps,
        "tau": taus,
        "first tokens by tenths of probability: proposed, promised, right": seen,
    }
    write_record(output, found)


if __name__ == "__main__":
    typer.run(main)
