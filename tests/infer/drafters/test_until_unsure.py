"""Drafts of draft models end where one more pass would bring less than its time is worth."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tiny import random_prompts

from drafthead.core.drafting.drafter import Committed, DraftSession
from drafthead.core.sampling import RowRandom, SamplingConfig
from drafthead.core.target.features import Features
from drafthead.core.target.logit_finish import Finish
from drafthead.core.target.target import Target, TargetOutput
from drafthead.core.trees.guesses import Proposal
from drafthead.core.trees.tree import Budget
from drafthead.infer import Decoder
from drafthead.infer.drafters.draft_model import DraftModel
from drafthead.infer.drafters.until_unsure import OneDraft, Sureness
from drafthead.infer.drafters.with_lookup import WithLookup
from drafthead.infer.planning.planner import FixedPlan, Propose

ROOT = 10
CHAIN = Budget(9, 8, least_chance=0.3)
GREEDY = SamplingConfig()


class SureUntil(Target):
    """A model that is sure of token t + 1 after token t, up to some token, and then of none."""

    def __init__(self, model: Target, last: int):
        super().__init__(model.model)
        self.last, self.passes = last, 0

    def find_finish(self) -> Finish:
        return Finish()  # its logits are not those of its output head

    def run(self, tokens: torch.Tensor, *rest: object) -> TargetOutput:
        self.passes += 1
        output = super().run(tokens, *rest)
        logits = torch.zeros_like(output.logits)
        sure = 30.0 * (tokens < self.last)[..., None]
        return replace(output, logits=logits.scatter(-1, tokens[..., None] + 1, sure))


def session_after(model: Target, target: Target, roots: list[int]) -> DraftSession:
    """A session of a draft model of 8 levels at roots that follow prompts of two tokens."""
    lengths = torch.full((len(roots),), 2)
    session = DraftModel(model, target, 8).start(torch.full((len(roots), 2), 5), lengths)
    following = torch.tensor([[5, root] for root in roots])
    session.commit(Committed(following, Features(last=None), lengths))
    return session


@pytest.mark.parametrize("sure", [0, 1, 3, 6, 7, 20])
@pytest.mark.parametrize("nodes", [1, 3])
@torch.no_grad()
def test_a_draft_ends_with_the_first_token_of_which_the_model_is_unsure(
    target, make_target, sure, nodes
) -> None:
    """To find that token takes a pass; a further one is not made."""
    model = SureUntil(make_target(seed=1, layers=1), ROOT + sure)
    session, levels = session_after(model, target, [ROOT]), min(sure + 1, 8)
    budget = Budget(1 + 8 * nodes, 8, least_chance=0.3)
    model.passes = 0
    tree = session.propose(budget, GREEDY, None)
    assert tree.max_depth == model.passes == levels
    assert tree.num_nodes == 1 + levels * nodes
    path = [ROOT + level for level in range(min(sure, 8) + 1)]
    assert set(path) <= {*tree.tokens[0].tolist()}


@pytest.mark.parametrize(
    ("budget", "choice", "sampling"),
    [
        (replace(CHAIN, least_chance=0.0), None, GREEDY),
        (CHAIN, RowRandom([1], torch.device("cpu")), SamplingConfig(temperature=1.0)),
        (CHAIN, None, SamplingConfig(temperature=1.0)),
    ],
    ids=["no price", "drawn", "typical"],
)
@torch.no_grad()
def test_where_the_text_depends_on_the_tree_it_has_its_whole_size(
    target, make_target, budget, choice, sampling
) -> None:
    """What stops a draft is learnt, and depends on other rows; a seed's text must not."""
    session = session_after(SureUntil(make_target(seed=1, layers=1), ROOT), target, [ROOT])
    if isinstance(choice, RowRandom):
        choice.begin_step([0])
    assert session.propose(budget, sampling, choice).max_depth == 8


@pytest.mark.parametrize(("least", "levels"), [(0.25, 4), (0.35, 1)])
@torch.no_grad()
def test_a_batch_goes_on_while_a_pass_pays_for_its_rows_on_average(
    target, make_target, least, levels
) -> None:
    """One row is sure of three tokens, one of none: a level brings each 0.6 x (1 + 0) / 2."""
    session = session_after(SureUntil(make_target(seed=1, layers=1), 33), target, [30, 40])
    tree = session.propose(replace(CHAIN, least_chance=least), GREEDY, None)
    assert tree.max_depth == levels


@torch.no_grad()
def test_a_model_that_is_sure_and_wrong_is_trusted_less_until_it_is_right_again(
    target, make_target
) -> None:
    session = session_after(SureUntil(make_target(seed=1, layers=1), 60), target, [ROOT])
    levels = []
    for right in [False] * 60 + [True] * 150:
        tree = session.propose(CHAIN, GREEDY, None)
        levels.append(tree.max_depth)
        path = tree.tokens[0, 1:].tolist() if right else []
        tokens, lengths = torch.tensor([[*path, ROOT]]), torch.tensor([len(path) + 1])
        session.commit(Committed(tokens, Features(last=None), lengths))
        session.cut(2)
    assert (levels[0], levels[59], levels[-1]) == (8, 1, 8)


def test_a_second_token_that_was_wrong_for_long_is_tried_again() -> None:
    """Of what is not drafted nothing is seen, so the belief fades to the first one, 0.6."""
    sureness = Sureness()
    for _ in range(500):
        sureness.add([1.0], levels=2, accepted=1)
    assert sureness.next_chance(1.0) < 0.1
    for _ in range(500):
        sureness.add([1.0], levels=1, accepted=1)
    assert 0.3 < sureness.next_chance(1.0) < 0.6


def test_levels_that_were_not_drafted_were_not_refused() -> None:
    """Drafts whose guesses are true, of which half end after the first level by choice."""
    chances = []
    for seed in range(20):
        sureness, coin = Sureness(), random.Random(seed)
        for step in range(1000):
            guesses, accepted = [0.8, 0.64, 0.512][: 1 + step % 2 * 2], 0
            while accepted < len(guesses) and coin.random() < 0.8:
                accepted += 1
            seen = guesses[:2]  # the third level ends the budget
            sureness.add(seen, len(guesses), accepted)
        chances.append([sureness.chance(0.8), sureness.chance(0.64), sureness.next_chance(0.64)])
    means = [sum(column) / 20 for column in zip(*chances, strict=True)]
    assert means == pytest.approx([0.8, 0.64, 0.8 * 0.64], rel=0.05)


def rate_of(goes_on: Callable[[float, int], bool]) -> float:
    """Tokens per pass of the target of a rule that sees a draft's guess and its level.

    Half of the drafts are right in 19 of 20 tokens, the others in one of five, and know it; a pass
    of the draft model takes a tenth of the target's.
    """
    tokens = seconds = 0.0
    for alpha in (0.95, 0.2):
        levels = 1
        while levels < 8 and goes_on(alpha**levels, levels):
            levels += 1
        tokens += 1 + sum(alpha**level for level in range(1, levels + 1))
        seconds += 1 + 0.1 * levels
    return tokens / seconds


def test_the_rule_brings_more_per_second_than_any_fixed_length_or_threshold() -> None:
    sureness, coin, rate = Sureness(), random.Random(0), 1.0

    def goes_on(guess: float, level: int) -> bool:
        draft = OneDraft(sureness, least_chance=0.1 * rate)
        return draft.goes_on(torch.tensor([[guess]]).log())

    for step in range(400):
        alpha, levels, accepted = (0.95, 0.2)[step % 2], 1, 0
        while levels < 8 and goes_on(alpha**levels, levels):
            levels += 1
        while accepted < levels and coin.random() < alpha:
            accepted += 1
        sureness.add([alpha**level for level in range(1, levels + 1)], levels, accepted)
        rate = rate_of(goes_on)
    fixed = max(rate_of(lambda _, level, most=most: level < most) for most in range(1, 9))
    other = max(rate_of(lambda guess, _, h=h / 100: guess > h) for h in range(100))
    assert rate > 1.1 * fixed
    assert rate == pytest.approx(other, rel=0.01)


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_the_planner_is_told_what_was_drafted(target, make_drafter, temperature) -> None:
    """Where drafts stop, steps are smaller and the draft model makes fewer passes."""

    class Watching(FixedPlan):
        def draft(self, propose: Propose, ahead: bool = False) -> Proposal | None:
            made.append(super().draft(propose))
            return made[-1]

    made: list[Proposal] = []
    drafter = make_drafter("unsure", target)
    decoder = Decoder(target, drafter)
    decoder._planner = lambda run, rule: Watching(drafter.budgets[-1])
    passes, real = [0], drafter.model.run

    def counted(*args: object) -> TargetOutput:
        passes[0] += 1
        return real(*args)

    drafter.model.run = counted
    prompts = random_prompts(6)
    ask = {"max_new_tokens": 24, "temperature": temperature, "verifier": "auto", "seed": 1}
    if temperature:
        ask["verifier"] = "match"
    stats = [decoder.generate(prompt, **ask).stats for prompt in prompts]
    levels = [proposal.max_depth for proposal in made]
    assert {1, 2, 3} == {*levels}
    assert sum(levels) == passes[0]
    assert sum(one.verified_nodes for one in stats) == len(levels) + sum(levels)


def test_beside_lookup_a_draft_stops_where_lookup_finds_nothing(target, make_drafter) -> None:
    drafter = WithLookup(make_drafter("unsure", target))
    budget = drafter.budgets[-1]
    repeated, new = [9, 10, 11, 12, 9, 10, 11], [9, 10, 11, 12, 13, 14, 15]
    made = []
    for prompt in (repeated, new):
        session = drafter.start(torch.tensor([prompt]), torch.tensor([7]))
        following = torch.tensor([[*prompt[1:], 12]])
        session.commit(Committed(following, Features(last=None), torch.tensor([7])))
        session.propose(replace(budget, least_chance=1.0), GREEDY, None)
        made.append(session.session.levels)
    assert made == [3, 1]


@pytest.mark.parametrize("name", ["frequent-tokens", "other-vocabulary"])
def test_every_kind_of_draft_model_stops_and_learns(target, make_drafter, name) -> None:
    drafter, prompts = make_drafter(name, target), random_prompts(3)
    trees = [size for size in drafter.budgets if size.nodes > size.depth + 1]
    budget = replace(trees[-1], least_chance=0.1)
    result = Decoder(target, drafter, budget).generate(prompts, max_new_tokens=24)
    assert result.sequences == Decoder(target).generate(prompts, max_new_tokens=24).sequences
    assert result.stats.verified_nodes < budget.nodes * result.stats.steps
    (sureness,) = drafter.sureness.values()
    assert sureness.chance.guessed != Sureness().chance.guessed
