"""Targets, heads and drafters for the tests; nothing here needs a network or a GPU."""

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import session_folder  # before transformers is imported, which looks for the user's home

# Before transformers is imported, also by commands that tests start: a name that is no folder is
# looked for nowhere else, instead of on a hub five times in 45 seconds.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from durations import Durations
from stages import moved_by_file
from steady import steady_clock
from tiny import BUSHY, END, HIDDEN, VOCAB, letters_tokenizer, tiny_llama

from drafthead.contrib.other_tokenizer.other_tokenizer import OtherTokenizer
from drafthead.contrib.other_tokenizer.text_writing import TextWriter
from drafthead.contrib.other_tokenizer.translation import Translator
from drafthead.contrib.own_layers.own_layers import OwnLayers
from drafthead.heads.base import HEADS, DraftHead
from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.sampling import RowRandom, sample
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import TreeShape
from drafthead.infer.drafters.draft_model import DraftModel
from drafthead.infer.drafters.frequent_tokens import FrequentTokens
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.drafters.model_drafter import model_drafter
from drafthead.infer.drafters.ngram_table import NgramTable
from drafthead.infer.drafters.store_lookup import StoreLookup
from drafthead.infer.drafters.with_lookup import WithLookup
from drafthead.train.draft_models.student import FAMILY


class ScriptedRandom(RowRandom):
    """Gives the numbers that a test wants."""

    def __init__(self, numbers: torch.Tensor):
        super().__init__([], torch.device("cpu"))
        self.numbers = numbers  # [B, n]

    def uniform(self, *shape: int) -> torch.Tensor:
        return self.numbers[:, 0] if not shape else self.numbers[:, : shape[0]]

    def ahead(self, count: int) -> torch.Tensor:
        return self.numbers[:, :count]

    def token(self, probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """One number a token instead of a race, so that a test can list all outcomes."""
        return sample(probs, keys)


def pytest_unconfigure() -> None:
    """Nothing of the session stays."""
    session_folder.end_session()


@pytest.fixture(autouse=True)
def _few_threads() -> None:
    """Tiny models only lose time to threads."""
    torch.set_num_threads(1)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """No launcher's state is left for the test after."""
    from accelerate.state import AcceleratorState, GradientState  # which takes seconds

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def steady_steps(tmp_path_factory) -> Iterator[None]:
    """For tests of which drafts are expected: `steady_clock`."""
    with steady_clock(tmp_path_factory.mktemp("step_costs")):
        yield


@pytest.fixture
def sizes_rendered(monkeypatch) -> Callable[[str], list[int]]:
    """Of a kernel: the last size of each output that code is rendered for from now on.

    What torch has compiled before is not rendered again, unless its caches are off.
    """

    def watch(kernel: str) -> list[int]:
        # Importing the template takes seconds.
        from drafthead.backends.cpu.kernels.template import KernelTemplate

        sizes: list[int] = []
        render = KernelTemplate.render

        def watched(self, **given) -> str:
            if self.name == kernel:
                sizes.append(self.layout.size[-1])
            return render(self, **given)

        monkeypatch.setattr(KernelTemplate, "render", watched)
        return sizes

    return watch


@pytest.fixture(scope="session")
def make_target() -> Callable[..., Target]:
    """A random float32 Llama; large weights make its greedy text varied."""

    def make(seed: int = 0, layers: int = 2, vocab: int = VOCAB, hidden: int = HIDDEN) -> Target:
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

    return make


@pytest.fixture(scope="session")
def target(make_target: Callable[..., Target]) -> Target:
    """The target of most tests."""
    return make_target(seed=0)


@pytest.fixture(scope="session")
def make_head() -> Callable[..., DraftHead]:
    """A head of any family with random weights, for a target."""

    def make(family: str, target: Target, seed: int = 0, **options: object) -> DraftHead:
        cls = HEADS[family]
        torch.manual_seed(seed)
        head = cls(cls.sized(cls.config_class(**options), target))
        head.initialize(target)
        for parameter in head.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        return head.eval().requires_grad_(False)

    return make


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


SMALL_MODELS = (
    "by-text",
    "draft-model",
    "frequent-tokens",
    "other-vocabulary",
    "own-layers",
    "self",
    "unsure",
)


@pytest.fixture(scope="session")
def make_small_model(make_target: Callable[..., Target]) -> Callable[[str, Target], Drafter]:
    """A draft model by name, of those in SMALL_MODELS."""

    def make(kind: str, target: Target) -> Drafter:
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
            writer = TextWriter(Translator(theirs.tokenizer, few))
            return OtherTokenizer(Target(small.model, few), theirs, depth=3, writer=writer)
        if kind == "unsure":
            return unsure(target)
        small = make_target(seed=1, layers=1, vocab=vocab, hidden=target.hidden_size)
        if kind == "frequent-tokens":
            return FrequentTokens(small, target, 3, torch.arange(0, vocab, 2))
        return DraftModel(small, target, depth=3)

    return make


@pytest.fixture(scope="session")
def make_drafter(
    make_small_model: Callable[[str, Target], Drafter], make_head: Callable[..., DraftHead]
) -> Callable[[str, Target], Drafter]:
    """A drafter by name: every head family as tree and as chain, and what is not a head."""

    def make(name: str, target: Target) -> Drafter:
        name, _, branch = name.partition("+")
        if not branch:
            return alone(name, target)
        return WithLookup(alone(name, target), store_for(target) if branch == "store" else None)

    def alone(name: str, target: Target) -> Drafter:
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

    return make


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
MOVED = moved_by_file()  # what waits for the second stage
# One of each class of session, and of each form of tree: they prove each claim in the first stage.
REPRESENTATIVES = [
    "medusa:tree", "hydra:chain", "eagle:own", "parallel:own", "draft-model", "by-text",
    "other-vocabulary", "own-layers", "prompt-lookup", "parallel:own+lookup",
]  # fmt: skip


def by_stage(names: list[str]) -> list:
    """Drafters, of which those that represent no class of session wait for the second stage."""
    return [
        name if name in REPRESENTATIVES else pytest.param(name, marks=pytest.mark.thorough)
        for name in names
    ]


def pytest_configure(config: pytest.Config) -> None:
    """Every run counts its seconds."""
    config.pluginmanager.register(Durations())


def pytest_itemcollected(item: pytest.Item) -> None:
    """What `stages.yaml` moves is of the second stage."""
    if any(moved.holds(item.nodeid) for moved in MOVED.get(item.nodeid.partition("::")[0], ())):
        item.add_marker(pytest.mark.thorough)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `drafter_name` runs once for each drafter there is."""
    if "drafter_name" in metafunc.fixturenames:
        metafunc.parametrize("drafter_name", by_stage(DRAFTERS))
    if "lawful_drafter" in metafunc.fixturenames:
        # The law of the answers does not depend on where the form of a tree came from. Drafts that
        # stop do so under rules that follow the target, whose texts are compared seed by seed.
        others = [name for name in NO_HEADS if name != "unsure"]
        lawful = [*(f"{f}:tree" for f in sorted(HEADS)), *others, BRANCHED[0]]
        metafunc.parametrize("lawful_drafter", by_stage(lawful))
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", sorted(HEADS))
    if "trainable_family" in metafunc.fixturenames:
        metafunc.parametrize("trainable_family", [*sorted(HEADS), FAMILY])
