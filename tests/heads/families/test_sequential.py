"""Hydra and MLP speculator: their formulas, and that each guess knows the real path before it."""

import math

import pytest
import torch
from tiny import BUSHY

from drafthead.core.drafting.drafter import Committed
from drafthead.core.errors import UserError
from drafthead.core.kv_cache.cache_memory import CacheMemory
from drafthead.core.sampling import RowRandom, SamplingConfig
from drafthead.core.target.features import Features
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget, TokenTree, TreeShape
from drafthead.heads.families import head_drafter
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.families.sequential.head import SequentialHead
from drafthead.heads.families.sequential.hydra import HydraConfig, HydraHeads
from drafthead.heads.families.sequential.mlp_speculator import MlpSpeculatorConfig
from drafthead.heads.growing.levels import levels_of
from drafthead.heads.objectives.batch import MAX_RANK, HeadBatch

VARIANTS = {
    "hydra": ("hydra", {"prefix_layer": False, "num_blocks": 1}),
    "hydra++": ("hydra", {}),
    "hydra, ungrounded": ("hydra", {"prefix_layer": False, "num_blocks": 2, "grounded": False}),
    "mlp": ("mlp_speculator", {}),
    "mlp, tied, scaled, narrow": (
        "mlp_speculator",
        {"tie_weights": True, "scale_input": True, "inner_size": 24},
    ),
}


@pytest.fixture(params=VARIANTS)
def head(request, target: Target, make_head) -> SequentialHead:
    family, options = VARIANTS[request.param]
    return make_head(family, target, **options)


# Formulas


def test_hydra_head_k_reads_the_hidden_state_and_k_tokens(target: Target, make_head):
    head = make_head("hydra", target, prefix_layer=False, num_blocks=3)
    hidden, tokens = torch.randn(target.hidden_size), torch.tensor([9, 4, 30])
    state = head.start(hidden)
    for index in range(3):
        state = head.advance(state, tokens[index], index, target)
    weights = {name: t.double() for name, t in head.branches[2].state_dict().items()}

    def linear(name: str, inputs: torch.Tensor) -> torch.Tensor:
        return weights[f"{name}.weight"] @ inputs + weights[f"{name}.bias"]

    inputs = torch.cat([hidden, *target.embed(tokens)]).double()
    inner = linear("shortcut", inputs) + torch.nn.functional.silu(linear("first", inputs))
    for _ in range(2):  # the same block twice
        inner = inner + torch.nn.functional.silu(linear("block", inner))
    expected = linear("output", inner)
    torch.testing.assert_close(
        head.token_logits(2, state, target).double(), expected, atol=1e-4, rtol=0
    )


def test_mlp_speculator_is_a_recurrence_on_a_normalised_state(target: Target, make_head):
    steps, inner = 3, 24
    head = make_head("mlp_speculator", target, num_heads=steps, inner_size=inner, scale_input=True)
    weights = {name: t.double() for name, t in head.state_dict().items()}
    hidden, tokens = torch.randn(target.hidden_size), [9, 4, 30]
    state_weight = 0.5 ** (0.5 / steps)
    scale = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight

    def normalised(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean() + 1e-6).sqrt()

    state = head.start(hidden)
    expected = normalised(hidden.double()) / math.sqrt(2)
    for k, token in enumerate(tokens):
        state = head.advance(state, torch.tensor(token), k, target)
        mixed = weights[f"projections.{k}.weight"] @ expected
        mixed = normalised(mixed + scale * weights[f"embeddings.{k}.weight"][token])
        mixed = weights[f"norms.{k}.weight"] * mixed + weights[f"norms.{k}.bias"]
        expected = mixed * (1 + torch.erf(mixed / math.sqrt(2))) / 2
        logits = weights[f"outputs.{k}.weight"] @ expected
        found = head.token_logits(k, state, target).double()
        torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)


def test_tied_steps_share_all_but_the_first_projection(target: Target, make_head):
    head = make_head("mlp_speculator", target, tie_weights=True, inner_size=24)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    vocab, hidden = target.vocab_size, target.hidden_size
    assert shapes == {
        "embeddings.0.weight": (vocab, 24),
        "projections.0.weight": (24, hidden),
        "projections.1.weight": (24, 24),
        "norms.0.weight": (24,),
        "norms.0.bias": (24,),
        "outputs.0.weight": (vocab, 24),
    }


def test_a_fresh_hydra_head_says_what_the_targets_output_head_says(target: Target):
    config = HydraConfig(prefix_layer=False)
    head = HydraHeads(HydraHeads.sized(config, target))
    head.initialize(target)
    hidden = torch.randn(5, target.hidden_size)
    state = head.start(hidden)
    for index in range(head.depth):
        state = head.advance(state, torch.arange(5), index, target)
        torch.testing.assert_close(head.token_logits(index, state, target), target.project(hidden))


def test_a_fresh_prefix_layer_passes_on_the_direction_of_its_input(target: Target):
    head = HydraHeads(HydraHeads.sized(HydraConfig(), target))
    hidden = torch.randn(2, 7, target.hidden_size)
    found = head.contexts(hidden, torch.ones(2, 7, dtype=torch.long))
    assert torch.cosine_similarity(found, hidden, dim=-1).min() > 0.9999


# Trees


def test_levels_of_a_tree_say_where_children_are():
    shape = TreeShape.from_paths([(0,), (1,), (1, 0), (1, 1)])
    root, below = levels_of(shape, torch.device("cpu"))
    tables = ("nodes", "own", "above", "parents", "ranks")
    assert [getattr(root, name).tolist() for name in tables] == [[0], [0], [0], [0, 0], [0, 1]]
    assert [getattr(below, name).tolist() for name in tables] == [[2], [1], [0], [0, 0], [0, 1]]
    assert root.width == below.width == 2


HIDDEN = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
LENGTHS, ROOTS = torch.tensor([8, 5]), [11, 12]


def proposal(head: SequentialHead, target: Target, sampling: SamplingConfig) -> TokenTree:
    """BUSHY behind two rows of made-up hidden states."""
    drafter = drafter_for(head, target, BUSHY)
    session = drafter.start(torch.zeros(2, 8, dtype=torch.long), LENGTHS)
    following = torch.tensor([[0] * 7 + [ROOTS[0]], [0] * 4 + [ROOTS[1]] + [0] * 3])
    session.commit(Committed(following, Features(HIDDEN), LENGTHS))
    random = None if sampling.greedy else RowRandom([1, 2], torch.device("cpu"))
    return session.propose(drafter.budgets[0], sampling, random)


def logits_behind(head: SequentialHead, target: Target, row: int, path: list[int]) -> torch.Tensor:
    """Logits [V] behind a path of tokens, the root first, taken in one after the other."""
    hidden = HIDDEN[row : row + 1, : LENGTHS[row]]
    state = head.contexts(hidden, torch.ones(hidden.shape[:2], dtype=torch.long))[0, -1]
    for index, token in enumerate(path):
        state = head.advance(state, torch.tensor(token), index, target)
    return head.token_logits(len(path) - 1, state, target)


def path_tokens(tree: TokenTree, row: int, node: int) -> list[int]:
    return tree.tokens[row][tree.ancestors[row, node]].tolist()


def test_children_are_the_best_guesses_behind_the_real_path(head: SequentialHead, target: Target):
    tree = proposal(head, target, SamplingConfig())
    assert tree.tokens[:, 0].tolist() == ROOTS
    for row in range(2):
        for node in range(tree.num_nodes):
            children = tree.tokens[row][tree.parents[row] == node]
            if len(children):
                logits = logits_behind(head, target, row, path_tokens(tree, row, node))
                assert torch.equal(children, logits.topk(len(children)).indices)


def test_drawn_children_carry_the_distribution_behind_the_real_path(
    head: SequentialHead, target: Target
):
    tree = proposal(head, target, SamplingConfig(temperature=0.7))
    assert tree.draft_ids is not None and tree.draft_probs is not None
    for row in range(2):
        for node in range(tree.num_nodes):
            table = torch.zeros(target.vocab_size)
            table[tree.draft_ids[row, node]] = tree.draft_probs[row, node].float()
            if (tree.parents[row] == node).any():
                logits = logits_behind(head, target, row, path_tokens(tree, row, node))
                expected = (logits / 0.7).softmax(-1)
            else:
                expected = torch.zeros(target.vocab_size)
                expected[0] = 1  # a leaf's row is never used
            torch.testing.assert_close(table, expected, atol=1e-6, rtol=1e-4)


def test_a_tree_deeper_than_the_head_is_refused(target: Target, make_head):
    with pytest.raises(UserError, match=r"depth 5 does not fit a hydra head that drafts 4 tokens"):
        drafter_for(make_head("hydra", target), target, TreeShape.chain(5))


def test_chances_are_those_measured_after_training(target: Target, make_head):
    head = make_head("hydra", target)
    head.path_counts = {(): 10, (0,): 6, (1,): 2, (0, 0): 3, (1, 0): 1}
    drafter = drafter_for(head, target)
    assert drafter.trees.chances(Budget(5, 2)) == (0.8, 0.4)
    assert drafter.trees.chances(Budget(3, 2)) == (0.6, 0.3)
    head.path_counts = None
    unmeasured = drafter_for(head, target)  # its trees are the authors', a guess is right in 0.6
    assert unmeasured.trees.chances(Budget(3, 2)) == pytest.approx((0.6, 0.36))
    assert unmeasured.budgets[1].chances == unmeasured.trees.chances(unmeasured.budgets[1])


def test_many_later_positions_of_a_prompt_are_read_as_its_first_ones(
    target: Target, make_head, monkeypatch
):
    """Where calls are recorded, a part of any length would be recorded to be used once."""
    monkeypatch.setattr(head_drafter, "LONG", 3)
    drafter = drafter_for(make_head("hydra", target), target)
    drafter.memory = CacheMemory()
    session, found = drafter.session(1), list[bool]()

    def noted(function, is_prompt: bool):
        found.append(is_prompt)
        return function

    monkeypatch.setattr(drafter, "reading", noted)
    for count in (2, 4, 3):
        tokens, lengths = torch.zeros(1, count, dtype=torch.long), torch.tensor([count])
        session.read(Committed(tokens, Features(HIDDEN[:1, :count]), lengths))
    assert found == [True, True, False]


# Training


def test_the_loss_follows_the_true_tokens_behind_each_anchor(head: SequentialHead, target: Target):
    """Two segments in a row and padding, against a loop over anchors and depths."""
    segments = torch.tensor([1] * 7 + [2] * 5 + [0] * 2)
    supervised = torch.tensor([0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0]).bool()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.vocab_size, (14,), generator=generator)
    hidden = torch.randn(14, target.hidden_size, generator=generator)
    batch = HeadBatch(ids[None], segments[None], supervised[None], Features(hidden[None]))
    depth_losses, ranks = [0.0] * head.depth, []
    for begin, end in ((0, 7), (7, 12)):
        here = hidden[None, begin:end]
        contexts = head.contexts(here, torch.ones(here.shape[:2], dtype=torch.long))[0]
        for anchor in range(begin, end - 1):
            if not supervised[anchor + 1]:
                continue
            ranks.append([MAX_RANK] * head.depth)
            state = contexts[anchor - begin]
            for k in range(head.depth):
                there = anchor + k + 2
                if there >= end:
                    break
                state = head.advance(state, ids[there - 1], k, target)
                if not supervised[there]:
                    continue
                logits = head.token_logits(k, state, target)
                wanted = target.project(hidden[there - 1]).softmax(-1)
                log_probs = logits.log_softmax(-1)
                hard = head.config.loss == "hard"
                gain = log_probs[ids[there]] if hard else (wanted * log_probs).sum()
                depth_losses[k] -= gain.item()
                ranks[-1][k] = min(MAX_RANK, int((logits > logits[ids[there]]).sum()))
    judged = head.loss(batch, target)
    assert judged.depth_losses.tolist() == pytest.approx(depth_losses, rel=1e-4)
    assert judged.ranks.tolist() == ranks
    assert judged.total.item() == pytest.approx(sum(depth_losses), rel=1e-4)


def test_dropout_acts_in_training_alone(target: Target):
    head = HydraHeads(HydraHeads.sized(HydraConfig(prefix_layer=False, dropout=0.5), target))
    head.initialize(target)
    state = head.advance(head.start(torch.randn(target.hidden_size)), torch.tensor(5), 0, target)

    def says_the_same_twice() -> bool:
        return torch.equal(head.token_logits(0, state, target), head.token_logits(0, state, target))

    assert not says_the_same_twice()
    head.eval()
    assert says_the_same_twice()


@pytest.mark.parametrize(
    ("config_class", "option", "complaint"),
    [
        (HydraConfig, {"num_heads": 0}, "num_heads must be at least 1, got 0"),
        (HydraConfig, {"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        (HydraConfig, {"dropout": 1.0}, "dropout must be below 1, got 1.0"),
        (HydraConfig, {"depth_decay": 0.0}, "depth_decay must be above 0"),
        (MlpSpeculatorConfig, {"num_heads": 0}, "num_heads must be at least 1"),
        (MlpSpeculatorConfig, {"inner_size": -1}, "inner_size must be at least 0, got -1"),
        (MlpSpeculatorConfig, {"depth_decay": 2.0}, "depth_decay must be at most 1"),
    ],
)
def test_impossible_configurations_are_refused(config_class, option, complaint):
    with pytest.raises(ValueError, match=complaint):
        config_class(**option)
