"""Drafters for tests by name: heads of every family, small models, lookup, and unions."""

import copy
from dataclasses import replace

import torch
from tiny import BUSHY, END, HIDDEN, VOCAB, letters_tokenizer, tiny_llama

from drafthead.contrib.other_tokenizer.other_tokenizer import OtherTokenizer
from drafthead.contrib.other_tokenizer.translation import Translator
from drafthead.contrib.own_layers import OwnLayers
from drafthead.core.drafting.drafter import Drafter
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import TreeShape
from drafthead.heads.base import HEADS, DraftHead
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.infer.drafters.draft_model import DraftModel
from drafthead.infer.drafters.frequent_tokens import FrequentTokens
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.drafters.model_drafter import model_drafter
from drafthead.infer.drafters.ngram_table import NgramTable
from drafthead.infer.drafters.store_lookup import StoreLookup
from drafthead.infer.drafters.with_lookup import WithLookup

SMALL_MODELS = (
    "by-text",
    "draft-model",
    "frequent-tokens",
    "other-vocabulary",
    "own-layers",
    "self",
    "unsure",
)
FORMS = ("tree", "chain", "own")
NO_HEADS = [*SMALL_MODELS, "prompt-lookup", "ngrams"]
BRANCHED = [
    "medusa:tree+lookup", "parallel:own+lookup", "parallel:own+store", "draft-model+lookup",
]  # fmt: skip
DRAFTERS = [
    *(f"{family}:{form}" for family in sorted(HEADS) for form in FORMS),
    *NO_HEADS,
    *BRANCHED,
]


def make_target(seed: int = 0, layers: int = 2, vocab: int = VOCAB, hidden: int = HIDDEN) -> Target:
    """A random float32 Llama; large weights make its greedy text varied."""
    end = END if vocab > END else None
    return Target(
        tiny_llama(
            seed,
            vocab_size=vocab,
            hidden_size=hidden,
            num_hidden_layers=layers,
            eos_token_id=end,
            pad_token_id=0,
        )
    )


def make_head(family: str, target: Target, seed: int = 0, **options: object) -> DraftHead:
    """A head of any family with random weights, for a target."""
    cls = HEADS[family]
    torch.manual_seed(seed)
    head = cls(cls.sized(cls.config_class(**options), target))
    head.initialize(target)
    for parameter in head.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return head.eval().requires_grad_(False)


def random_texts(target: Target) -> list[list[int]]:
    """Four texts for a table of n-grams."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(target.vocab_size, (4, 400), generator=generator).tolist()


def store_for(target: Target) -> StoreLookup:
    """Lookup by a table of random text."""
    return StoreLookup(NgramTable.of(random_texts(target), "", 3))


def unsure(target: Target) -> DraftModel:
    """A draft model that stops after one, two or three tokens: the target with a little noise."""
    noisy = copy.deepcopy(target.model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
    drafter = DraftModel(Target(noisy), target, depth=3)
    drafter.budgets = tuple(replace(budget, least_chance=0.15) for budget in drafter.budgets)
    return drafter


def make_small_model(kind: str, target: Target) -> Drafter:
    """A draft model by name, of those in SMALL_MODELS."""
    if kind == "self":
        return DraftModel(target, target, depth=3)
    if kind == "own-layers":
        return OwnLayers(target, [target.num_layers - 1], depth=3)
    vocab = target.vocab_size
    if kind in ("other-vocabulary", "by-text"):
        letters = "".join(map(chr, range(0x4E00, 0x4E00 + vocab)))
        few = letters_tokenizer(letters[:0:-1], (letters[2:4],))
        small = make_target(seed=1, layers=1, vocab=len(few), hidden=target.hidden_size)
        theirs = Target(target.model, letters_tokenizer(letters))
        if kind == "other-vocabulary":
            return model_drafter(Target(small.model, few), theirs, depth=3)
        translator = Translator(theirs.tokenizer, few)
        return OtherTokenizer(Target(small.model, few), theirs, 3, translator)
    if kind == "unsure":
        return unsure(target)
    small = make_target(seed=1, layers=1, vocab=vocab, hidden=target.hidden_size)
    if kind == "frequent-tokens":
        return FrequentTokens(small, target, 3, torch.arange(0, vocab, 2))
    return DraftModel(small, target, depth=3)


def make_drafter(name: str, target: Target) -> Drafter:
    """A drafter by name: every head family as tree and as chain, and what is not a head."""
    name, _, branch = name.partition("+")
    if not branch:
        return _alone(name, target)
    return WithLookup(_alone(name, target), store_for(target) if branch == "store" else None)


def _alone(name: str, target: Target) -> Drafter:
    kind, _, form = name.partition(":")
    if kind in SMALL_MODELS:
        return make_small_model(kind, target)
    if kind == "ngrams":
        return store_for(target)
    if kind == "prompt-lookup":
        return PromptLookup(depth=3)
    head = make_head(kind, target)
    if form == "own":  # trees of the head's own choice, by budget
        head.path_counts = {(): 100} | {path: 40 - n for n, path in enumerate(BUSHY.paths)}
        return drafter_for(head, target)
    return drafter_for(head, target, BUSHY if form == "tree" else TreeShape.chain(3))
