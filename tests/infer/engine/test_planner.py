"""The planner against a simulated machine: known seconds, known acceptance."""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count

import pytest

from drafthead.heads.trees.static import StaticTrees, tree_budgets
from drafthead.heads.trees.tree import Budget
from drafthead.infer import Decoder
from drafthead.infer.drafters.scripted import Scripted
from drafthead.infer.engine.acceptance_tracker import AcceptanceTracker
from drafthead.infer.engine.pace_tracker import PaceTracker
from drafthead.infer.engine.planner import AdaptivePlan, Mode, next_mode
from drafthead.infer.timing.step_timing import (
    Round,
    TimingSettings,
    Visit,
    monotone,
    seconds_by_budget,
    time_in_rounds,
)

BUDGETS = tree_budgets(3)
CHANCES = {b: tuple(min(0.7, 0.1 * b.nodes) ** d for d in range(1, b.depth + 1)) for b in BUDGETS}


def seconds(node: float, draft: float = 0.1) -> dict[Budget | None, float]:
    """A plain step takes 1, every further node `node`, and every draft `draft`."""
    return {None: 1.0} | {b: 1 + draft + node * (b.nodes - 1) for b in BUDGETS}


class Text:
    """Simulated decoding: at each depth a draft is accepted with the given probability."""

    def __init__(self, plan: AdaptivePlan):
        self.plan, self.tokens, self.time = plan, 0, 0.0
        self.slower = {False: 1.0, True: 1.0}  # than was timed before, by whether there is a draft
        self.choices: list[Budget | None] = []
        self.coin = random.Random(0)

    def decode(self, tokens: int, alpha: float) -> float:
        """Decode `tokens` more tokens; returns tokens per unit of time of this stretch."""
        tokens_before, time_before = self.tokens, self.time
        while self.tokens < tokens_before + tokens:
            budget = self.plan.choose()
            length = 1
            for _ in range(budget.depth if budget else 0):
                if self.coin.random() >= alpha:
                    break
                length += 1
            took = self.plan.seconds[budget] * self.slower[budget is not None]
            self.plan.learn(budget, [length], took)
            self.choices.append(budget)
            self.tokens += length
            self.time += took
        return (self.tokens - tokens_before) / (self.time - time_before)


@pytest.mark.parametrize("node", [0.0, 0.02, 0.1])
def test_a_drafter_that_is_always_wrong_costs_at_most_three_percent(node: float) -> None:
    assert Text(AdaptivePlan(seconds(node), CHANCES)).decode(512, alpha=0.0) > 0.97


TIMING = TimingSettings()


def timed_visits(
    tokens: Mapping[Budget, float], took: Callable[[Budget | None, int], float]
) -> list[Visit]:
    """Visits to simulated steps; `took(budget, step)` returns the seconds of the numbered step."""
    steps = count()

    def run_round(this_round: Round) -> None:
        for _ in range(this_round.steps):
            budget = this_round.choose()
            this_round.learn(budget, [1], took(budget, next(steps)))

    return time_in_rounds(tokens, run_round, TIMING)


def test_sizes_that_promise_much_less_than_the_best_are_timed_at_one_visit_only() -> None:
    """1.5 tokens in 1.2 times a plain step's time, and 1.9 in twice that time."""
    small, large = Budget(3, 2), Budget(64, 2)
    seconds = {None: 0.01, small: 0.012, large: 0.02}
    visits = timed_visits({small: 1.5, large: 1.9}, lambda budget, step: seconds[budget])
    visited = Counter(visit.budget for visit in visits)
    assert visited == {None: TIMING.rounds + 1, small: TIMING.rounds, large: 1}
    assert seconds_by_budget(visits) == pytest.approx(seconds)


def test_where_no_size_comes_near_to_plain_decoding_the_best_is_timed_all_the_same() -> None:
    small, large = Budget(2, 1), Budget(8, 2)
    seconds = {None: 0.01, small: 0.02, large: 0.03}
    visits = timed_visits({small: 1.2, large: 1.4}, lambda budget, step: seconds[budget])
    assert Counter(visit.budget for visit in visits)[small] == TIMING.rounds


def test_slow_models_are_timed_for_as_many_rounds_as_there_is_time_for() -> None:
    small, large = Budget(2, 1), Budget(4, 2)
    seconds = {
        None: TIMING.enough_seconds / 10,
        small: TIMING.enough_seconds / 9,
        large: TIMING.enough_seconds / 8,
    }
    visits = timed_visits({small: 1.2, large: 1.4}, lambda budget, step: seconds[budget])
    assert Counter(visit.budget for visit in visits) == {None: 2, small: 1, large: 1}
    assert seconds_by_budget(visits) == pytest.approx(seconds)


def test_a_machine_that_changes_its_speed_is_timed_as_one_that_does_not() -> None:
    """It is half as slow again at times, and three steps in a hundred take far longer."""
    coin = random.Random(0)
    ratios = {None: 1.0} | {budget: 1 + 0.07 * budget.nodes for budget in BUDGETS}

    def took(budget: Budget | None, step: int) -> float:
        drift = 1.25 + 0.25 * math.sin(step / 100)
        return 0.002 * ratios[budget] * drift * (5 if coin.random() < 0.03 else 1)

    tokens = {budget: ratios[budget] for budget in BUDGETS}  # so that all remain contenders
    found = seconds_by_budget(timed_visits(tokens, took))
    for budget, ratio in ratios.items():
        assert found[budget] / found[None] == pytest.approx(ratio, rel=0.03)


def test_nodes_that_cost_nothing_are_all_used_and_dear_ones_are_not() -> None:
    assert AdaptivePlan(seconds(0.0), CHANCES).choose() == max(
        BUDGETS, key=lambda b: sum(CHANCES[b])
    )
    assert AdaptivePlan(seconds(0.1), CHANCES).choose() == Budget(8, 3)
    assert AdaptivePlan(seconds(5.0), CHANCES).choose() is None


@pytest.mark.parametrize(("step", "drafts"), [(1.37, False), (1.33, True)])
def test_drafts_must_promise_clearly_more_than_plain_decoding(step: float, drafts: bool) -> None:
    """1.4 tokens in 1.37 times the time would be 2 % more."""
    budget = Budget(2, 1)
    plan = AdaptivePlan({None: 1.0, budget: step}, {budget: (0.4,)})
    assert plan.choose() == (budget if drafts else None)


@pytest.mark.parametrize(("step", "nodes"), [(1.18, 2), (1.12, 4)])
def test_larger_trees_must_promise_clearly_more_than_smaller_ones(step: float, nodes: int) -> None:
    """1.6 tokens in 1.18 times the time are 1 % more than 1.4 in 1.04 times."""
    small, large = Budget(2, 1), Budget(4, 1)
    plan = AdaptivePlan({None: 1.0, small: 1.04, large: step}, {small: (0.4,), large: (0.6,)})
    assert plan.choose().nodes == nodes


def test_drafts_that_become_good_are_used_again() -> None:
    text = Text(AdaptivePlan(seconds(0.02), CHANCES))
    text.decode(300, alpha=0.0)
    assert text.plan.choose() is None
    assert text.decode(600, alpha=0.9) > 1.5


@pytest.mark.parametrize(("plain", "drafted"), [(1.0, 1.8), (1.0, 1.0), (1.8, 1.8), (1.8, 1.0)])
def test_steps_that_take_longer_than_was_timed_are_found_out(plain, drafted) -> None:
    """Drafts bring 1.4 tokens, were timed at 1.15 and pay, unless they alone are slowed down."""
    budget = Budget(2, 1)
    text = Text(AdaptivePlan({None: 1.0, budget: 1.15}, {budget: (0.4,)}))
    text.slower = {False: plain, True: drafted}
    best = max(1 / plain, 1.4 / (1.15 * drafted))
    text.decode(100, alpha=0.4)
    assert text.decode(1000, alpha=0.4) > 0.96 * best


def test_modes_follow_the_table() -> None:
    """Next when a draft is best, when a glance is due as well, when plain decoding is best."""
    found = {
        mode: (
            next_mode(mode, True, False),
            next_mode(mode, True, True),
            next_mode(mode, False, True),
        )
        for mode in Mode
    }
    assert found == {
        Mode.DRAFT: (Mode.DRAFT, Mode.GLANCE, Mode.PLAIN),
        Mode.PROBE: (Mode.DRAFT, Mode.GLANCE, Mode.PLAIN),
        Mode.GLANCE: (Mode.DRAFT, Mode.DRAFT, Mode.PLAIN),
        Mode.PLAIN: (Mode.DRAFT, Mode.DRAFT, Mode.PROBE),
    }


def test_kinds_of_step_are_compared_around_a_change_of_kind() -> None:
    pace = PaceTracker()
    assert pace.plain_over_drafted == 1
    for ratio in (9.0, 9.0, 1.2, 1.3, 1.2):  # unsettled at first
        pace.add(True, ratio)
    for ratio in (9.0, 9.0, 0.9, 0.9):
        pace.add(False, ratio)
    assert pace.plain_over_drafted == pytest.approx(0.95)
    for _ in range(9):  # another machine-wide slowdown changes nothing
        pace.add(True, 2.4)
    for _ in range(9):
        pace.add(False, 1.8)
    assert pace.plain_over_drafted == pytest.approx((4 + 0.75 + 0.9 / 2.4 + 0.75) / 7)


def test_drafts_better_than_expected_get_larger_trees() -> None:
    low = {budget: tuple(c / 4 for c in CHANCES[budget]) for budget in BUDGETS}
    plan = AdaptivePlan(seconds(0.05), low)
    before = plan.choose()
    Text(plan).decode(400, alpha=0.95)
    assert (before.nodes if before else 1) < plan.choose().nodes


def test_expected_tokens_are_scaled_by_what_was_seen() -> None:
    acceptance = AcceptanceTracker([0.0, 0.0])
    assert acceptance.tokens([0.5, 0.2]) == 1  # nothing known, nothing seen
    acceptance = AcceptanceTracker([0.5, 0.25])
    assert acceptance.tokens([0.6, 0.3]) == pytest.approx(1.9)
    for _ in range(10_000):
        acceptance.add([0.5, 0.25], [2, 1])  # depth 1 in one row of two, depth 2 never
    assert acceptance.tokens([0.6, 0.3]) == pytest.approx(1.6)


def test_small_trees_and_large_ones_correct_each_other() -> None:
    """Nodes and depth both count: 3 nodes in a chain may well be slower than 8 side by side."""
    two, three, four = Budget(2, 1), Budget(3, 1), Budget(4, 1)
    assert monotone({two: 1.3, three: 1.2, four: 1.4}) == {two: 1.25, three: 1.25, four: 1.4}
    assert monotone({Budget(3, 2): 1.5, Budget(8, 1): 1.3}) == {
        Budget(3, 2): 1.5,
        Budget(8, 1): 1.3,
    }
    assert monotone({two: 0.9}) == {two: 1}


def test_chances_of_static_trees_are_shares_of_all_positions() -> None:
    trees = StaticTrees({(): 100, (0,): 60, (1,): 20, (0, 0): 30, (0, 1): 5}, max_depth=2)
    assert trees.chances(Budget(4, 2)) == (0.8, 0.3)
    assert trees.chances(Budget(3, 1)) == (0.8,)
    assert StaticTrees(None, max_depth=2).chances(Budget(3, 2)) is None
    hopeless = StaticTrees({(): 100}, max_depth=2)
    assert hopeless.shape(Budget(8, 2)).paths == ((0,),), "a proposal has a node after the root"
    assert hopeless.chances(Budget(8, 2)) == (0.0,)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_a_scripted_drafter_is_right_as_often_as_it_is_told_to_be(target, alpha) -> None:
    prompts = [[9, 10, 11], [12, 13], [14]]
    plain = Decoder(target)
    plain.end_ids = frozenset()
    expected = plain.generate(prompts, max_new_tokens=200).sequences
    drafter = Scripted(expected, alpha, depth=1, vocab_size=target.vocab_size)
    decoder = Decoder(target, drafter, Budget(6, 1))
    decoder.end_ids = frozenset()
    result = decoder.generate(prompts, max_new_tokens=200)
    assert result.sequences == expected
    assert result.stats.tau == pytest.approx(1 + alpha, abs=0.1)


def test_a_drafter_that_pays_a_little_is_kept_whatever_the_luck_of_its_first_steps() -> None:
    """Expected gain 1.18: plain decoding by mistake must stay the exception."""
    budget = Budget(6, 3)
    costs = {None: 3.0, budget: 5.0}
    drafted = []
    for seed in range(20):
        plan = AdaptivePlan(costs, {budget: (0.6, 0.3, 0.1)})
        coin = random.Random(seed)
        for _ in range(400):
            choice, draw = plan.choose(), coin.random()
            accepted = sum(draw < c for c in (0.6, 0.3, 0.1)) if choice else 0
            plan.learn(choice, [1 + accepted], costs[choice])
            drafted.append(choice is not None)
    assert sum(drafted) > 0.85 * len(drafted)


def test_a_drafter_that_pays_is_kept_on_a_machine_that_changes_its_speed_all_the_time() -> None:
    """Expected gain 1.15; every 8 steps the machine becomes slower or faster, by half at most."""
    budget = Budget(2, 1)
    costs = {None: 2.0, budget: 2.5}
    drafted = []
    for seed in range(20):
        plan = AdaptivePlan(costs, {budget: (0.44,)})
        coin = random.Random(seed)
        for step in range(600):
            if step % 8 == 0:
                slower = 1 + coin.random() / 2
            choice = plan.choose()
            plan.learn(
                choice, [1 + (choice is not None and coin.random() < 0.44)], costs[choice] * slower
            )
            drafted.append(choice is not None)
    assert sum(drafted) > 0.85 * len(drafted)


def test_a_draft_that_would_never_be_made_is_not_prepared_for(target, monkeypatch) -> None:
    """Under a rule whose plan stays as it is."""
    drafter = Scripted([[]], alpha=0.0, depth=1, vocab_size=target.vocab_size)
    monkeypatch.setattr(drafter, "start", None)
    decoder, budget = Decoder(target, drafter, adaptive=True), drafter.budgets[0]
    decoder.plans["rejection", 1.0, 1] = AdaptivePlan({None: 1.0, budget: 9.0}, {budget: (0.5,)})
    ask = {"max_new_tokens": 8, "temperature": 1.0, "seed": 3}
    expected = Decoder(target).generate([9, 10, 11], **ask).sequences
    assert decoder.generate([9, 10, 11], verifier="rejection", **ask).sequences == expected
