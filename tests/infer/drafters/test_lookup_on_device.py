"""Lookup on the device gives what lookup on the host gives."""

import random

import pytest
import torch
from rehearsal import rehearse
from tiny import random_prompts

from drafthead.backends.compiled_target import CompiledTarget
from drafthead.core.host import to_device
from drafthead.core.trees.tree import PADDING, TokenTree, TreeShape, ancestor_mask
from drafthead.infer.decoder import Decoder, decoder_for
from drafthead.infer.drafters import lookup_on_device
from drafthead.infer.drafters.history import FIRST_SHARES, LONGEST, History, MatchRecord
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.drafters.lookup_on_device import Text, advanced, text_of, with_chain
from drafthead.infer.drafters.with_lookup import merged
from drafthead.infer.engine import stepper
from drafthead.infer.serving import ServeRequest
from drafthead.lab.exactness.oracle import OracleDecoder

CPU = torch.device("cpu")


def random_texts(seed: int, rows: int) -> list[History]:
    """Texts of few letters, so that much matches; the first of one token."""
    chance = random.Random(seed)
    texts = []
    for row in range(rows):
        past = History(chance.randrange(4))
        for _ in range(row * chance.randrange(60)):
            past.append(next_token(past, chance))
        texts.append(past)
    return texts


def next_token(past: History, chance: random.Random) -> int:
    """Often what the match says, so that matches become long, longer than they count."""
    if past.guess is not None and chance.random() < 0.97:
        return past.guess
    return chance.randrange(2 + chance.randrange(4))


def state_of(past: History) -> tuple[int, int]:
    return tuple(past.match or (0, 0))


def pairs(text: Text) -> list[tuple[int, int]]:
    return list(zip(text.places.tolist(), text.matched.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_matches_go_on_as_those_of_the_host(seed: int) -> None:
    chance, texts = random.Random(seed), random_texts(seed, 5)
    text = text_of(texts, CPU)
    assert pairs(text) == [state_of(past) for past in texts]
    longest = 0
    for width in (1, 2, 4, 8, 16, 5, 1, 16, 16):
        tokens, counts = torch.full((5, width), 3), []
        for row, past in enumerate(texts):
            counts.append(chance.randint(1, width))
            for place in range(counts[-1]):
                tokens[row, place] = next_token(past, chance)
                past.append(int(tokens[row, place]))
        text = advanced(text, tokens, torch.tensor(counts))
        assert pairs(text) == [state_of(past) for past in texts]
        for row, past in enumerate(texts):
            assert text.tokens[row, : text.lengths[row]].tolist() == past.tokens
        longest = max(longest, *text.matched.tolist())
    assert longest == LONGEST
    most = text.tokens.shape[1] - 1 - int(text.lengths.max())  # free columns, fewer than padding
    tokens = torch.tensor([past.guess or 0 for past in texts])[:, None].expand(5, most + 9)
    text = advanced(text, tokens.contiguous(), torch.ones(5, dtype=torch.long))
    for past, token in zip(texts, tokens[:, 0].tolist(), strict=True):
        past.append(token)
    assert pairs(text) == [state_of(past) for past in texts]


def random_tree(chance: random.Random, texts: list[History], nodes: int) -> TokenTree:
    """A tree with scores that follows what lookup says for a part of its way, with padding."""
    paths: list[tuple[int, ...]] = []
    ranks: dict[tuple[int, ...], int] = {}
    while len(paths) < nodes - 1:
        above = chance.choice([(), *paths, paths[-1] if paths else ()])
        ranks[above] = ranks.get(above, -1) + 1
        paths.append((*above, ranks[above]))
    shape = TreeShape.from_paths(paths)
    parents = shape.parents.tolist()
    tokens, scores = [], []
    for past in texts:
        said, row, score = past.continuation(nodes), [past.tokens[-1]], [0.0]
        for node, parent in enumerate(parents[1:], 1):
            taken = {row[other] for other in range(1, node) if parents[other] == parent}
            guess = said[shape.depths[node] - 1] if said else 0
            free = [token for token in range(100) if token not in taken]
            row.append(guess if guess not in taken else chance.choice(free))
            score.append(score[parent] - chance.choice([0.0, 0.1, 0.5, 2.0]))
        if chance.random() < 0.3:
            row[-1] = PADDING
        tokens.append(row)
        scores.append(score)
    return TokenTree.from_shape(shape, torch.tensor(tokens), scores=torch.tensor(scores))


@pytest.mark.parametrize("seed", range(12))
def test_trees_have_the_nodes_that_the_host_would_take(seed: int) -> None:
    chance, texts = random.Random(seed), random_texts(seed, 6)
    record, lookup = MatchRecord(), PromptLookup(63, 2)
    for _ in range(300):
        record.add(chance.randint(1, len(FIRST_SHARES)), chance.random() < 0.6)
    lookup.matches = record
    logs = to_device(record.logs, CPU, torch.float64)
    for own, nodes in ((2, 2), (4, 8), (8, 8), (16, 16), (5, 64)):
        tree = random_tree(chance, texts, own)
        guesses = [lookup.guess(past, nodes - 1, nodes - 1) for past in texts]
        expected = merged(tree, guesses, nodes)
        form = tree.tokens, tree.parents, tree.ancestors, tree.scores
        tokens, parents, depths, ancestors = with_chain(text_of(texts, CPU), logs, *form, nodes, 2)
        size = expected.num_nodes  # the widest row's
        assert tokens[:, :size].equal(expected.tokens) and (tokens[:, size:] == PADDING).all()
        assert parents[:, :size].equal(expected.parents)
        assert depths[:, :size].equal(expected.depths)
        assert ancestors.equal(ancestor_mask(parents, nodes - 1))


@pytest.mark.parametrize(
    "law", [{}, {"temperature": 0.9, "seed": [3, 4, 5]}], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize(
    "name", ["eagle3:own+lookup", "medusa:tree+lookup", "parallel:own+lookup", "prompt-lookup"]
)
def test_no_draft_waits_for_tokens_and_no_text_changes(
    name: str, law: dict, target, make_drafter, monkeypatch
) -> None:
    rehearse(monkeypatch)
    monkeypatch.setattr(lookup_on_device, "ROOM", 20)  # texts are brought again
    ahead, lead_on = [], stepper.Stepper.lead_on
    monkeypatch.setattr(
        stepper.Stepper, "lead_on", lambda *given: (ahead.append(1), lead_on(*given))
    )
    compiled, drafter = CompiledTarget(target), make_drafter(name, target)
    drafter.compile(compiled)
    assert drafter.functions and all(budget.depth for budget in drafter.budgets)
    decoder, oracle = decoder_for(compiled, drafter, 8, compile=False), OracleDecoder(target)
    prompts = [[*range(20, 30), *range(20, 25 + n)] for n in range(2)] + random_prompts(1)
    for _ in range(2):
        expected = oracle.generate(prompts, max_new_tokens=40, **law).sequences
        found = decoder.generate(prompts, max_new_tokens=40, **law)
        assert found.sequences == expected
    assert len(ahead) > 10
    with monkeypatch.context() as there:
        there.setattr(lookup_on_device, "MOST_COMPARED", 1)  # the host does it
        by_host = decoder.generate(prompts, max_new_tokens=40, **law)
    assert by_host.sequences == expected
    if name == "prompt-lookup":  # whose chains depend on nothing that was learnt meanwhile
        assert by_host.stats.accept_lengths == found.stats.accept_lengths
        assert max(map(max, found.stats.accept_lengths)) > 2
    limits, seeds = (30, 4, 17), law.get("seed", [0] * 3)
    requests = [ServeRequest(*each) for each in zip(prompts, range(3), limits, seeds, strict=True)]
    asked = {key: value for key, value in law.items() if key != "seed"}
    for each in Decoder(compiled, drafter).serve(requests, max_rows=2, **asked):  # planned trees
        assert each.tokens == expected[each.id][: limits[each.id]]
