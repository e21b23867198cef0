"""The EAGLE family: dynamic trees, the training-time test, draft vocabularies.

The yardstick is always the same: the head read afresh, one true token after the other, without
cache, batch, tree or mask.
"""

import heapq
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from laws import law_of_three_tokens, p_value
from tiny import VOCAB, random_prompts
from torch.nn.attention.bias import CausalBias
from torch.nn.functional import smooth_l1_loss

from drafthead.core.drafting.drafter import Committed
from drafthead.core.errors import UserError
from drafthead.core.kv_cache.cache_memory import CacheMemory
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.features import Features
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget, TokenTree, TreeShape
from drafthead.heads.base import HEADS
from drafthead.heads.families import head_drafter
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.families.recurrent import passes as recurrent_passes
from drafthead.heads.families.recurrent.drafter import DraftReader
from drafthead.heads.families.recurrent.eagle3 import default_taps
from drafthead.heads.growing.dynamic import Growth, best_tree, open_level, with_children
from drafthead.heads.growing.levels import Nodes
from drafthead.heads.layers import decoder_layer
from drafthead.heads.layers.draft_vocabulary import most_frequent, translated
from drafthead.heads.objectives.batch import MAX_RANK, HeadBatch
from drafthead.infer import Decoder
from drafthead.lab.exactness.oracle import OracleDecoder
from drafthead.train.run.trainables import new_head

VARIANTS = {
    "eagle": ("eagle", {}),
    "eagle-deep": ("eagle", {"num_layers": 2, "fc_bias": False, "loss": "hard", "ttt_steps": 3}),
    "eagle3": ("eagle3", {"depth": 4, "ttt_steps": 3}),
    "eagle3-plain": (
        "eagle3",
        {"tap_norm": "none", "norm_feedback": False, "num_layers": 2, "draft_vocab_size": 20},
    ),
    "eagle3-joint": (
        "eagle3",
        {"tap_norm": "joint", "norm_before_residual": True, "output": "sliced", "loss": "hard"},
    ),
    "eagle3-window": ("eagle3", {"window": 4, "num_layers": 2}),
    "eagle3-narrow": ("eagle3", {"hidden_size": 16, "draft_vocab_size": 20, "loss": "hard"}),
}


@pytest.fixture(params=sorted(VARIANTS))
def head(request, target, make_head):
    family, options = VARIANTS[request.param]
    return make_head(family, target, **options)


def features_of(target, ids: torch.Tensor, spec) -> Features:
    """The target's features of ids [T], as a batch of one."""
    return target.run(ids[None], torch.arange(len(ids))[None], None, spec).features


def drafted_afresh(
    head, target, ids: torch.Tensor, given: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, Vd] and outputs [n, D] of depths 1 to n behind the root ids[given].

    The target has been at `given` positions; the n - 1 ids behind the root are taken as drafted.
    """
    features = features_of(target, ids[:given], head.features_needed)
    reader = DraftReader(drafter_for(head, target), rows=1)
    read = Committed(ids[None, 1 : given + 1], features, torch.tensor([given]))
    states = [reader.read(read)]
    for depth, token in enumerate(ids[given + 1 :], 1):
        above = torch.ones(1, 1, depth, dtype=torch.bool)
        nodes = Nodes(token[None, None], states[-1].states, above, depth)
        states.append(reader.expand(nodes))
    both = torch.cat([at.states for at in states], dim=1)
    return head.logits(both, target)[0], both[0]


def some_ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(8, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


# Training


def judged_afresh(head, logits, wanted, label: int) -> tuple[float, int]:
    """Loss and rank of one guess by plain formulas; logits [Vd], the target's logits [V]."""
    guessable = torch.arange(len(wanted)) if head.draft_ids is None else head.draft_ids
    log_probs = torch.full_like(wanted, -torch.inf)
    log_probs[guessable] = logits.log_softmax(-1)
    rank = int((log_probs > log_probs[label]).sum()) if label in guessable else MAX_RANK
    if head.config.loss == "hard":
        loss = -float(log_probs[label]) if label in guessable else 0.0
    else:
        probs = wanted[guessable].softmax(-1)
        taught = label in guessable
        loss = -float((probs * log_probs[guessable]).sum()) if taught else 0.0
    return loss, min(rank, MAX_RANK)


def guesses_afresh(head, target, ids: torch.Tensor, supervised: torch.Tensor) -> list:
    """For each anchor of one conversation, (depth, loss, distance, rank) of each guess."""
    final = features_of(target, ids, head.features_needed).last[0]
    anchors = []
    for anchor in range(len(ids) - 1):
        if not supervised[anchor + 1]:
            continue
        behind = ids[: anchor + 1 + head.depth]
        logits, outputs = drafted_afresh(head, target, behind, given=anchor + 1)
        guesses = []
        for depth in range(1, min(head.depth, len(ids) - anchor - 2) + 1):
            place = anchor + 1 + depth
            if supervised[place]:
                wanted = target.project(final[place - 1])
                loss, rank = judged_afresh(head, logits[depth - 1], wanted, int(ids[place]))
                distance = 0.0
                if head.family == "eagle":
                    distance = float(smooth_l1_loss(outputs[depth - 1], final[place - 1]))
                guesses.append((depth, loss, distance, rank))
        anchors.append(guesses)
    return anchors


def packed_features(target, conversations: list, shape: tuple[int, int], spec) -> Features:
    """Features [B, T, D] of conversations (row, start, ids), each run by itself."""
    packed = Features(None, ())
    for row, start, ids in conversations:
        found = features_of(target, ids, spec)
        if packed.last is None:
            packed = found.map(lambda hidden: hidden.new_zeros(*shape, hidden.shape[-1]))
        for whole, alone in zip(
            (packed.last, *packed.taps), (found.last, *found.taps), strict=True
        ):
            whole[row, start : start + len(ids)] = alone[0]
    return packed


def test_loss_and_ranks_are_those_of_drafting_behind_the_true_tokens(head, target) -> None:
    """Two rows, conversations sharing one, padding, and a stretch that is not to be learnt."""
    config = head.config
    segments = torch.tensor([[1] * 9 + [2] * 6 + [0], [1] * 16])
    supervised = torch.ones(2, 16, dtype=torch.bool)
    supervised[0, :4] = supervised[0, 15] = supervised[1, 8:11] = False
    ids = torch.stack([some_ids(16, 0), some_ids(16, 1)])
    conversations = [(0, 0, ids[0, :9]), (0, 9, ids[0, 9:15]), (1, 0, ids[1])]
    anchors = [
        guesses
        for row, start, alone in conversations
        for guesses in guesses_afresh(
            head, target, alone, supervised[row, start : start + len(alone)]
        )
    ]
    counts = [0] * head.depth
    losses, distances = torch.zeros(2, head.depth)
    ranks = torch.full((len(anchors), head.depth), MAX_RANK)
    for anchor, guesses in enumerate(anchors):
        for depth, loss, distance, rank in guesses:
            counts[depth - 1] += 1
            losses[depth - 1] += loss
            distances[depth - 1] += distance
            ranks[anchor, depth - 1] = rank
    features = packed_features(target, conversations, (2, 16), head.features_needed)
    judged = head.loss(HeadBatch(ids, segments, supervised, features), target)
    assert judged.depth_counts.tolist() == counts
    assert judged.ranks.equal(ranks)
    torch.testing.assert_close(judged.depth_losses, losses, rtol=1e-4, atol=1e-4)
    if head.family == "eagle":
        losses = config.token_weight * losses + config.feature_weight * distances
    weights = torch.tensor([config.depth_decay**step for step in range(config.ttt_steps)])
    expected = (weights * losses[: config.ttt_steps]).sum()
    torch.testing.assert_close(judged.total, expected, rtol=1e-4, atol=1e-4)


def test_training_unrolls_no_further_than_it_is_told(target, make_head) -> None:
    head = make_head("eagle3", target, ttt_steps=2, depth=4)
    ids = some_ids(12)
    features = features_of(target, ids, head.features_needed)
    batch = HeadBatch(ids[None], torch.ones(1, 12).long(), torch.ones(1, 12).bool(), features)
    measured = head.loss(batch, target)
    trained = head.train().loss(batch, target)
    head.eval()
    torch.testing.assert_close(trained.total, measured.total)
    assert trained.depth_counts.tolist() == [10, 9, 0, 0]
    assert measured.depth_counts.tolist() == [10, 9, 8, 7]
    assert (trained.ranks[:, 2:] == MAX_RANK).all()
    assert trained.ranks[:, :2].equal(measured.ranks[:, :2])


def test_noise_on_the_features_is_for_training_alone(target, make_head) -> None:
    head = make_head("eagle", target, feature_noise=0.5)
    features = Features(torch.zeros(1, 50, target.hidden_size))
    assert head.encode(features).eq(0).all()
    noise = head.train().encode(features)
    head.eval()
    assert noise.abs().max() <= 0.5 and noise.std().item() == pytest.approx(0.5 / 3**0.5, rel=0.1)


@pytest.mark.parametrize("scale", [0.1, 8.0])
def test_a_fresh_eagle3_head_has_the_targets_output_head_and_guesses_evenly(
    make_target, scale
) -> None:
    target = make_target()
    target.model.get_output_embeddings().weight.data.mul_(scale)
    config = HEADS["eagle3"].config_class(draft_vocab_size=5)
    counts = torch.zeros(target.vocab_size)
    counts[[3, 9, 20, 21, 60]] = 1
    head = new_head("eagle3", config, target, counts)
    torch.testing.assert_close(head.lm_head.weight.data, target.output_weight()[[3, 9, 20, 21, 60]])
    logits = head.logits(100 * torch.randn(400, target.hidden_size), target)
    assert logits.std().item() == pytest.approx(1, rel=0.1)


# Trees


@dataclass(order=True)
class Candidate:
    """A node of the slow tree; the most valuable, then the earliest, compares lowest."""

    cost: float
    number: int
    token: int = field(compare=False)
    parent: "Candidate | None" = field(compare=False)
    children: "list[Candidate]" = field(compare=False, default_factory=list)

    @property
    def path(self) -> tuple[int, ...]:
        """The tokens from the root down."""
        return (*(self.parent.path if self.parent else ()), self.token)


def slow_tree(root: int, levels: list, width: int, num_nodes: int) -> set[tuple[int, ...]]:
    """EAGLE-2's tree by a heap; levels[d](paths) gives each open path's [(log_prob, token), ..]."""
    top = Candidate(0.0, -1, root, None)
    count, opened = 0, [top]
    for children_of in levels:
        new = []
        for node, children in zip(opened, children_of([n.path for n in opened]), strict=True):
            for log_prob, token in children:
                node.children.append(Candidate(node.cost - log_prob, count, token, node))
                count += 1
            new += node.children
        opened = sorted(new)[:width]
    heap, paths = [top], set()
    while heap and len(paths) < num_nodes:
        node = heapq.heappop(heap)
        paths.add(node.path)
        for child in node.children:
            heapq.heappush(heap, child)
    return paths


def paths_of(tree: TokenTree, row: int) -> list[tuple[int, ...]]:
    """The tokens from the root to each node; fails where a node stands before its parent."""
    paths: list[tuple[int, ...]] = []
    nodes = zip(tree.parents[row].tolist(), tree.tokens[row].tolist(), strict=True)
    for node, (parent, token) in enumerate(nodes):
        assert parent < node
        paths.append((*(paths[parent] if node else ()), token))
    return paths


def level_of(log_probs: torch.Tensor, tokens: torch.Tensor):
    """A level of `slow_tree` from what each open node's children have, both [F, k]."""
    children = [
        list(zip(*both, strict=True))
        for both in zip(log_probs.tolist(), tokens.tolist(), strict=True)
    ]
    return lambda paths: children


def root_of(roots: torch.Tensor) -> Growth:
    return Growth.of(roots, torch.zeros(len(roots), 1, 0))


def grown(growth: Growth, log_probs: torch.Tensor, tokens: torch.Tensor) -> Growth:
    """The growth with a level of children, [B, n, k] of the n best nodes of the level before."""
    if growth.scores.shape[1] == 1:
        return with_children(growth, growth.opened, log_probs, tokens)
    count = log_probs.shape[1]
    opened = open_level(growth, torch.arange(count), tokens.shape[2])
    after = with_children(growth, opened.numbers, log_probs, tokens)
    return after._replace(states=torch.zeros(len(tokens), count, 0))


def tree_of(growth: Growth, num_nodes: int) -> TokenTree:
    slots = torch.arange(min(num_nodes, growth.scores.shape[1]))
    return best_tree(growth, slots, 5).tree(5, 4)


@pytest.mark.parametrize("values", [1, 6, 5000], ids=["all equal", "many ties", "few ties"])
def test_a_dynamic_tree_is_the_best_one_among_the_candidates(values: int) -> None:
    """Log-probabilities are multiples of 1/1024, 0 among them: a child may equal its parent."""
    batch, width, depth = 20, 4, 5
    generator = torch.Generator().manual_seed(0)
    growth, levels = root_of(torch.arange(batch)), []
    for depth_before in range(depth):
        opened = 1 if depth_before == 0 else width
        log_probs = -torch.randint(0, values, (batch, opened, width), generator=generator) / 1024
        tokens = torch.rand(batch, opened, 50, generator=generator).argsort(-1)[..., :width]
        levels.append([level_of(*row) for row in zip(log_probs, tokens, strict=True)])
        growth = grown(growth, log_probs, tokens)
    for num_nodes in (2, 9, 30):
        tree = tree_of(growth, num_nodes)
        assert tree.depths[:, 1:].ge(tree.depths[:, :-1]).all(), "shallow nodes come first"
        for row in range(batch):
            expected = slow_tree(row, [level[row] for level in levels], width, num_nodes)
            paths = paths_of(tree, row)
            assert set(paths) == expected
            assert len(paths) == num_nodes


def children_afresh(head, target, ids: torch.Tensor, path: tuple[int, ...], width: int) -> list:
    """The best guesses [(log_prob, token), ..] behind ids [T] and a drafted path."""
    read = torch.cat([ids, torch.tensor(path, dtype=torch.long)])
    logits, _ = drafted_afresh(head, target, read, given=len(ids) - 1)
    best = logits[-1].log_softmax(-1).topk(width)
    tokens = best.indices if head.draft_ids is None else head.draft_ids[best.indices]
    return list(zip(best.values.tolist(), tokens.tolist(), strict=True))


@pytest.fixture
def attentive(head):
    """The head with an attention that decides what is drafted."""
    for layer in head.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.v_proj):
            projection.weight.data *= 6
    return head


def session_on_two_prompts(drafter, ids: torch.Tensor, lengths: list[int]):
    """A session that has committed lengths[b] of the ids [2, T]; the next id is the root."""
    target, width = drafter.target, max(lengths)
    positions = torch.arange(width).expand(2, -1)
    features = target.run(ids[:, :width], positions, None, drafter.features).features
    session = drafter.start(ids, torch.tensor(lengths))
    session.commit(Committed(ids[:, 1 : width + 1], features, torch.tensor(lengths)))
    return session


@pytest.mark.parametrize("nodes", [3, 5, 7, 14])
def test_a_grown_tree_is_what_reading_each_path_afresh_gives(
    attentive, target, monkeypatch, nodes: int
) -> None:
    """Small trees do not draft nodes that cannot have a child in them."""
    monkeypatch.setattr(recurrent_passes, "DYNAMIC_WIDTH", 3)
    ids, lengths = torch.stack([some_ids(9, 3), some_ids(9, 4)]), [8, 5]
    session = session_on_two_prompts(drafter_for(attentive, target), ids, lengths)
    tree = session.propose(Budget(nodes, min(4, nodes - 1)), SamplingConfig(), None)
    for row, length in enumerate(lengths):

        def children(paths: list, given: torch.Tensor = ids[row, : length + 1]) -> list:
            return [children_afresh(attentive, target, given, path[1:], 3) for path in paths]

        expected = slow_tree(int(ids[row, length]), [children] * min(4, nodes - 1), 3, nodes)
        assert set(paths_of(tree, row)) == expected


def test_parts_of_a_prompt_are_read_alike_without_masks(attentive, target, monkeypatch) -> None:
    """As on a GPU, whose kernels skip what is hidden where there is no mask."""
    if attentive.config.window:
        return  # which needs its mask
    monkeypatch.setattr(head_drafter, "LONG", 3)
    ids, given, masks = some_ids(12, 3), [], []
    attend = decoder_layer.scaled_dot_product_attention

    def noted(queries, keys, values, mask, enable_gqa) -> torch.Tensor:
        masks.append(mask)
        return attend(queries, keys, values, mask, enable_gqa=enable_gqa)

    monkeypatch.setattr(decoder_layer, "scaled_dot_product_attention", noted)
    features = features_of(target, ids[:-1], attentive.features_needed)
    for kernels in (None, SimpleNamespace(most_nodes=0)):
        drafter = drafter_for(attentive, target)
        drafter.kernels, drafter.memory = kernels, CacheMemory()
        reader = DraftReader(drafter, rows=1)
        for start, end in ((0, 5), (5, 11)):
            part = features.map(lambda table, s=start, e=end: table[:, s:e])
            count = torch.tensor([end - start])
            given.append(reader.read(Committed(ids[None, start + 1 : end + 1], part, count)))
    for found, expected in zip(given[2:], given[:2], strict=True):
        torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-4, atol=1e-4)
    half = len(masks) // 2
    assert [isinstance(mask, CausalBias) for mask in masks] == [False] * half + [True] * half


def test_a_filled_tree_is_what_reading_each_path_afresh_gives(attentive, target) -> None:
    shape = TreeShape.from_paths(
        [(0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0), (1, 1, 0), (1, 1, 1), (1, 1, 1, 0)]
    )
    ids, lengths = torch.stack([some_ids(9, 3), some_ids(9, 4)]), [8, 5]
    session = session_on_two_prompts(drafter_for(attentive, target, shape), ids, lengths)
    tree = session.propose(shape.budget, SamplingConfig(), None)
    for row, length in enumerate(lengths):
        given, tokens = ids[row, : length + 1], {(): ()}
        for ranks, path in zip(shape.paths, paths_of(tree, row)[1:], strict=True):
            above = tokens[ranks[:-1]]
            best = children_afresh(attentive, target, given, above, ranks[-1] + 1)
            tokens[ranks] = (*above, best[-1][1])
            assert path[1:] == tokens[ranks]


def test_budgets_offer_every_depth_because_each_costs_a_pass(target, make_head) -> None:
    drafter = drafter_for(make_head("eagle3", target, depth=3, ttt_steps=1), target)
    assert Budget(8, 1) in drafter.budgets and Budget(8, 3) in drafter.budgets
    assert max(budget.depth for budget in drafter.budgets) == 3
    assert list(drafter.budgets) == sorted(drafter.budgets)


def test_few_budgets_serve_a_gpu_which_records_each(target, make_head, monkeypatch) -> None:
    monkeypatch.setattr(Target, "device", torch.device("cuda"))
    drafter = drafter_for(make_head("eagle3", target, depth=6, ttt_steps=1), target)
    assert {(4, 1), (16, 6), (64, 6)} < {(b.nodes, b.depth) for b in drafter.budgets}
    assert len(drafter.budgets) == 10


# Sessions


def test_a_session_of_many_commits_drafts_what_a_fresh_one_drafts(head, target) -> None:
    """Rows advance by different amounts, steps pass without a proposal, a row ends."""
    total = 40
    ids = torch.stack([some_ids(total + 1, seed) for seed in range(3)])
    positions = torch.arange(total + 1).expand(3, -1)
    features = target.run(ids, positions, None, head.features_needed).features
    rows, done = torch.arange(3), torch.zeros(3, dtype=torch.long)

    def part(first: torch.Tensor, counts: torch.Tensor) -> Committed:
        places = first[:, None] + torch.arange(int(counts.max()))
        places = places.clamp_max(total - 1)
        kept = features.map(lambda hidden: hidden[rows[:, None], places])
        return Committed(ids[rows[:, None], places + 1], kept, counts)

    shape = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)])
    drafters = [drafter_for(head, target), drafter_for(head, target, shape)]
    sessions = [drafter.start(ids, done) for drafter in drafters]
    generator = torch.Generator().manual_seed(0)
    for turn in range(8):
        most = 9 if turn == 0 else 4
        counts = torch.randint(1, most + 1, (len(rows),), generator=generator)
        for session in sessions:
            session.commit(part(done, counts))
        done = done + counts
        if turn == 2:
            kept = torch.tensor([2, 0])
            rows, done = rows[kept], done[kept]
            for session in sessions:
                session.keep_rows(kept)
        if turn in (1, 2, 5):
            continue  # a step without a proposal
        for drafter, session in zip(drafters, sessions, strict=True):
            fresh = drafter.start(ids, done)
            fresh.commit(part(torch.zeros_like(done), done))
            for budget in (Budget(6, 3), Budget(12, 4)):
                found = session.propose(budget, SamplingConfig(), None)
                expected = fresh.propose(budget, SamplingConfig(), None)
                assert found.tokens.equal(expected.tokens)
                assert found.parents.equal(expected.parents)
    assert rows.tolist() == [2, 0]


# Draft vocabulary


def test_the_most_frequent_tokens_make_the_draft_vocabulary() -> None:
    d2t, t2d = most_frequent(torch.tensor([5, 0, 9, 9]), 2)
    assert d2t.tolist() == [2, 2]
    assert t2d.tolist() == [False, False, True, True]
    d2t, _ = most_frequent(torch.tensor([1, 1, 1, 4]), 3)  # of equals the first
    assert (torch.arange(3) + d2t).tolist() == [0, 1, 3]


def test_what_a_draft_vocabulary_is_taught() -> None:
    """Four tokens, of which 1 and 3 can be guessed."""
    guesses, known = translated(torch.tensor([1, 3]), 4, torch.tensor([3, 0, 1]))
    assert guesses.tolist() == [1, 0, 0]
    assert known.tolist() == [True, False, True]


def test_a_draft_vocabulary_larger_than_the_vocabulary_is_refused(target) -> None:
    config = HEADS["eagle3"].config_class(draft_vocab_size=VOCAB + 1)
    with pytest.raises(UserError, match=f"draft_vocab_size is {VOCAB + 1}.* {VOCAB} tokens"):
        new_head("eagle3", config, target, torch.ones(VOCAB))


def prepared(target, make_head, counts: torch.Tensor, size: int):
    """A head that guesses among the most frequent tokens."""
    head = make_head("eagle3", target, draft_vocab_size=size)
    head.prepare(counts)
    return head


def test_greedy_decoding_with_a_draft_vocabulary_equals_plain_decoding(target, make_head) -> None:
    prompts, plain = random_prompts(10), OracleDecoder(target)
    expected = plain.generate(prompts, max_new_tokens=40).sequences
    states = torch.tensor([token for sequence in expected for token in sequence])
    head = prepared(target, make_head, torch.bincount(states, minlength=VOCAB), 16)
    result = Decoder(target, drafter_for(head, target)).generate(prompts, max_new_tokens=40)
    assert result.sequences == expected
    assert result.stats.tau > 1


def test_sampling_with_a_draft_vocabulary_follows_the_targets_law(make_target, make_head) -> None:
    target = make_target(seed=3, vocab=4)
    head = prepared(target, make_head, torch.tensor([0, 7, 0, 7]), 2)
    head.path_counts = {(0,): 9, (1,): 5, (0, 0): 4, (1, 0): 2}
    count = 6000
    result = Decoder(target, drafter_for(head, target)).generate(
        [[1, 2, 3]] * count, max_new_tokens=3, temperature=1.0
    )
    law = law_of_three_tokens(target, [1, 2, 3], SamplingConfig(temperature=1.0))
    assert p_value(result.sequences, law) > 1e-5


# Taps


@pytest.mark.parametrize(
    ("num_layers", "taps"),
    [(8, (1, 3, 4)), (32, (1, 15, 28)), (7, (1, 2, 3)), (6, (0, 3, 5)), (2, (0, 1)), (1, (0,))],
)
def test_low_middle_and_high_layers_are_tapped(num_layers: int, taps: tuple[int, ...]) -> None:
    assert default_taps(num_layers) == taps


def test_a_draft_of_nan_still_gives_a_tree_that_begins_with_the_root() -> None:
    """Sorting puts NaN before everything: damaged weights must not cost the answer its root."""
    log_probs = torch.tensor([[[-1.0, float("nan"), -2.0]]])
    growth = grown(root_of(torch.tensor([7])), log_probs, torch.tensor([[[11, 12, 13]]]))
    growth = grown(growth, torch.full((1, 2, 3), float("nan")), torch.arange(20, 26).view(1, 2, 3))
    for num_nodes in (2, 4, 8):
        tree = tree_of(growth, num_nodes)
        assert tree.tokens[0, 0] == 7 and tree.parents[0, 0] == -1
        above = tree.parents[0, 1:]
        assert (above >= 0).all() and (above < torch.arange(1, num_nodes)).all()
    assert tree_of(growth, 3).tokens[0].tolist() == [7, 11, 13]


def test_a_probability_that_is_rounded_above_one_does_not_go_before_its_parent() -> None:
    growth = root_of(torch.tensor([7]))
    growth = grown(growth, torch.tensor([[[-0.5, -2.0]]]), torch.tensor([[[11, 12]]]))
    growth = grown(growth, torch.tensor([[[1e-6, -1.0]]]), torch.tensor([[[13, 14]]]))
    assert tree_of(growth, 2).tokens.tolist() == [[7, 11]]
    assert tree_of(growth, 3).tokens.tolist() == [[7, 11, 13]]
