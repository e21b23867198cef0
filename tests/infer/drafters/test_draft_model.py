"""Draft models: trees hold the most probable paths, and bring more than chains do."""

import pytest
import torch
from hidden_answers import generated
from tiny import VOCAB, tiny_encoder_decoder, tiny_llama
from transformers import GPT2Config, GPT2LMHeadModel

from drafthead.core.drafting.drafter import Committed
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.any_target import target_of
from drafthead.core.target.features import Features
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget, TokenTree
from drafthead.infer import Decoder
from drafthead.infer.drafters.draft_model import DraftModel
from drafthead.infer.drafters.level_drafter import MOST_OPENED, grown_budgets
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.drafters.with_lookup import WithLookup

Path = tuple[int, ...]
PROMPTS = [[9, 10, 11, 12], [20, 21, 22, 23]]
ROOTS = [13, 24]


@pytest.fixture(scope="module")
def model(make_target) -> Target:
    return make_target(seed=1, layers=1)


def paths_of(tree: TokenTree, row: int) -> list[Path]:
    """The drafted tokens from the root to each node."""
    paths: list[Path] = [()]
    pairs = zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True)
    for token, parent in list(pairs)[1:]:
        paths.append((*paths[parent], token))
    return paths


def best_paths(model: Target, text: list[int], budget: Budget) -> set[Path]:
    """The most probable paths after a text, each probability from a pass of its own."""
    value: dict[Path, float] = {(): 0.0}
    opened, width = [()], min(MOST_OPENED, budget.nodes - 1)
    for _ in range(budget.depth):
        level: dict[Path, float] = {}
        for path in opened:
            logits = model.model(torch.tensor([[*text, *path]])).logits[0, -1].log_softmax(-1)
            best = logits.topk(width)
            for log_prob, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                level[*path, token] = value[path] + log_prob
        value |= level
        opened = sorted(level, key=level.__getitem__, reverse=True)[:width]
    return set(sorted(value, key=value.__getitem__, reverse=True)[: budget.nodes])


@pytest.mark.parametrize("budget", grown_budgets(3))
@torch.no_grad()
def test_trees_hold_the_most_probable_paths(target, model, budget) -> None:
    """Twice, as drafted tokens must leave nothing in the cache."""
    drafter = DraftModel(model, target, depth=3)
    prompts, lengths = torch.tensor(PROMPTS), torch.tensor([4, 4])
    session = drafter.start(prompts, lengths)
    following = torch.cat([prompts[:, 1:], torch.tensor(ROOTS)[:, None]], dim=1)
    session.commit(Committed(following, Features(last=None), lengths))
    texts = [[*prompt, root] for prompt, root in zip(PROMPTS, ROOTS, strict=True)]
    for more in ([30, 31], [40, 41]):
        tree = session.propose(budget, SamplingConfig(), None)
        for row, text in enumerate(texts):
            paths = paths_of(tree, row)
            assert set(paths) == best_paths(model, text, budget)
            assert len(paths) == budget.nodes
            text.append(more[row])
        session.commit(
            Committed(torch.tensor(more)[:, None], Features(last=None), torch.tensor([1, 1]))
        )


def test_a_tree_brings_more_than_a_chain_of_as_many_passes(target, make_target) -> None:
    """The draft is the target with a little noise, so that its first guess is often wrong."""
    noisy = make_target(seed=0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in noisy.model.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
    drafter = DraftModel(noisy, target, depth=3)
    taus = {}
    for budget in (Budget(4, 3), Budget(10, 3), Budget(25, 3)):
        result = Decoder(target, drafter, budget).generate(PROMPTS, max_new_tokens=60)
        taus[budget.nodes] = result.stats.tau
    assert 1 < taus[4] < taus[10] < taus[25]


def test_wider_trees_promise_more(target, model) -> None:
    drafter = DraftModel(model, target, depth=2)
    chain, (narrow, wide) = drafter.budgets[-1].chances, (b.chances for b in grown_budgets(2)[-2:])
    assert chain[0] < narrow[0] < wide[0] < 1 and chain[1] < narrow[1] < wide[1]
    assert drafter.budgets[-2:] == (Budget(2, 1), Budget(3, 2)), "children are drawn in chains"


def test_sizes_beside_lookup_are_those_of_the_drafter_and_free_ones(target, model) -> None:
    both = WithLookup(DraftModel(model, target, depth=2), None)
    assert isinstance(both.lookup, PromptLookup)
    assert {*both.drafter.budgets} == {size for size in both.budgets if size.levels}


# ---- drafts that are smaller than the target's texts ------------------------------------------

SHORT = 16  # positions of small drafts


def short_gpt2() -> Target:
    """A draft model with a table of positions."""
    torch.manual_seed(1)
    sizes = {"vocab_size": VOCAB, "n_positions": SHORT, "n_embd": 32, "n_layer": 1, "n_head": 4}
    return Target(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval())


def few_tokens() -> Target:
    """A draft model without embeddings for the last tokens of the target."""
    return Target(tiny_llama(1, vocab_size=VOCAB - 8, num_hidden_layers=1))


def texts(longest: int) -> list[list[int]]:
    """Prompts of different lengths, with the tokens that `few_tokens` lacks."""
    return [[*range(VOCAB - n, VOCAB)] for n in (SHORT - 1, 3, longest)]


@pytest.mark.parametrize("make", [short_gpt2, few_tokens])
def test_a_draft_with_fewer_positions_or_embeddings_leaves_the_answer_as_it_is(make) -> None:
    target = Target(tiny_llama())
    decoder = Decoder(target, DraftModel(make(), target, depth=3), Budget(4, 3))
    prompts = texts(3 * SHORT)
    found = decoder.generate(prompts, max_new_tokens=20).sequences
    assert found == [generated(target.model, prompt, 20) for prompt in prompts]
    assert found[-1:] == decoder.generate(prompts[-1], max_new_tokens=20).sequences


def test_a_draft_with_a_shorter_encoder_reads_the_beginning_of_the_source() -> None:
    target = target_of(tiny_encoder_decoder("bart"))
    small = target_of(tiny_encoder_decoder("bart", 1, max_position_embeddings=SHORT))
    drafter = DraftModel(small, target, depth=3)
    start = [*target.decoder_prompt]
    prompts = torch.tensor([[*range(9, 29), *start], [*range(9, 19), *start, *[0] * 10]])
    lengths = torch.tensor([20 + len(start), 10 + len(start)])
    read, kept = drafter.shortened(prompts, lengths)
    rows = [row[:n] for row, n in zip(read.tolist(), kept.tolist(), strict=True)]
    assert rows == [[*range(9, 25), *start], [*range(9, 19), *start]]
    sources = [[*range(9, 29)], [*range(9, 19)]]
    answers = Decoder(target, drafter, Budget(4, 3)).generate(sources, max_new_tokens=12).sequences
    assert answers == [generated(target.model, source, 12) for source in sources]
