"""Targets, heads and drafters for the tests; nothing here needs a network or a GPU."""

import os
import sys
from collections.abc import Callable, Iterator

import session_folder  # before transformers is imported, which looks for the user's home

# Before transformers is imported, also by commands that tests start: a name that is no folder is
# looked for nowhere else, instead of on a hub five times in 45 seconds.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("COLUMNS", None)  # pytest's workers have one, and then tables are cut to it

import drafters
import pytest
import torch
from drafters import BRANCHED, DRAFTERS, NO_HEADS
from durations import Durations
from stages import more, moved_by_file
from steady import steady_clock

from drafthead.core.drafting.drafter import Drafter
from drafthead.core.sampling import RowRandom, sample
from drafthead.core.target.target import Target
from drafthead.heads.base import HEADS, DraftHead
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
def drafthead(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: status, output and errors of some words."""

    def run(*words: object) -> tuple[int, str, str]:
        from drafthead.scripts import cli

        monkeypatch.setattr(sys, "argv", ["drafthead", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        return stop.value.code or 0, printed.out, printed.err

    return run


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


@pytest.fixture(scope="session")
def make_target() -> Callable[..., Target]:
    """A random float32 Llama; large weights make its greedy text varied."""
    return drafters.make_target


@pytest.fixture(scope="session")
def target(make_target: Callable[..., Target]) -> Target:
    """The target of most tests."""
    return make_target(seed=0)


@pytest.fixture(scope="session")
def make_head() -> Callable[..., DraftHead]:
    """A head of any family with random weights, for a target."""
    return drafters.make_head


@pytest.fixture(scope="session")
def make_drafter() -> Callable[[str, Target], Drafter]:
    """A drafter by name: every head family as tree and as chain, and what is not a head."""
    return drafters.make_drafter


MOVED = moved_by_file()  # what waits for the second stage
# These prove each claim in the first stage, where `test_every_drafter.py` decodes with all others.
REPRESENTATIVES = [
    "medusa:tree", "hydra:chain", "eagle:own", "draft-model", "other-vocabulary",
    "prompt-lookup", "parallel:own+lookup",
]  # fmt: skip


def by_stage(names: list[str]) -> list:
    """Drafters, of which those that represent no class of session wait for the second stage."""
    return [name if name in REPRESENTATIVES else more(name) for name in names]


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
