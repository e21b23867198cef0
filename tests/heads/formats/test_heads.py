"""Medusa, Hydra, EAGLE and MLP speculators of other projects compute here what they do there."""

from itertools import product

import pytest
import torch
from golden import Case, cases, loaded, name_of
from written import Outputs

from drafthead.core.drafting.drafter import Committed
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.features import Features, FeatureSpec
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import TreeShape
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.families.medusa.head import MedusaHeads
from drafthead.heads.families.recurrent.drafter import DraftReader
from drafthead.heads.families.recurrent.head import RecurrentHead
from drafthead.heads.families.sequential.hydra import HydraHeads
from drafthead.heads.families.sequential.mlp_speculator import MlpSpeculator
from drafthead.heads.formats import load_head, read_foreign
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.formats.exporting import StandIn
from drafthead.heads.growing.levels import Nodes
from drafthead.heads.layers.cache import DraftCache


def assert_as_recorded(case: Case, found: Outputs) -> None:
    assert found
    for name, tensor in found.items():
        case.assert_close(tensor, name)


def target_of(case: Case) -> Target:
    """Some cases are the whole model, and some come without one, which they do not need."""
    if case.path.parent.name == "medusa_merged":
        return loaded(case.path)
    if (case.path / "target").exists():
        return case.target
    _, foreign = read_foreign(case.path, TargetFacts())
    return StandIn(foreign.target)


# Medusa


def medusa_outputs(head: MedusaHeads, target: Target, io: Outputs) -> Outputs:
    """Of given hidden states, and of the target's own behind given tokens."""
    found = {}
    if "hidden_states" in io:
        for i in range(head.depth):
            found[f"expected_logits_head{i}"] = head.token_logits(i, io["hidden_states"], target)
    if "input_ids" in io:
        places = torch.arange(io["input_ids"].shape[1])[None]
        last = target.run(io["input_ids"], places, None, FeatureSpec()).features.last
        found["target_last_hidden"] = last
        for i in range(head.depth):
            found[f"expected_logits_from_ids_head{i}"] = head.token_logits(i, last, target)
    return found


@pytest.mark.parametrize("case", cases("medusa_*/*", "vllm_medusa/*"), ids=name_of)
@torch.no_grad()
def test_medusa_heads_are_those_of_the_authors(case: Case) -> None:
    if case.path.parent.name == "medusa_algorithms":
        pytest.skip("no checkpoint: see test_decoding.py")
    target = target_of(case)
    head = load_head(case.path, target)
    expected = [name for name in case.io if name.startswith("expected_logits_head")]
    assert not expected or len(expected) == head.depth, "heads are counted, not believed"
    assert_as_recorded(case, medusa_outputs(head, target, case.io))


# Hydra


def hydra_outputs(head: HydraHeads, target: Target, io: Outputs) -> Outputs:
    """Along true tokens. Theirs wrap around at the end (torch.roll), where ours has no label."""
    hidden, ids = io["hidden_states"], io["input_ids"]
    state, found = head.contexts(hidden, torch.ones_like(ids)), {}
    if head.prefix is not None:
        found["expected_prefix_embedding"] = state
    for i in range(head.depth):
        count = ids.shape[1] - i - 1  # those with a token i + 1 places on
        state = head.advance(state[:, :count], ids[:, i + 1 :], i, target)
        found[f"expected_logits_head{i}"] = head.token_logits(i, state, target)
    return found


@pytest.mark.parametrize("case", cases("hydra/*"), ids=name_of)
@torch.no_grad()
def test_hydra_heads_are_those_of_the_authors(case: Case) -> None:
    head = load_head(case.path, case.target)
    for name, tensor in hydra_outputs(head, case.target, case.io).items():
        case.assert_close(tensor, case.io[name][:, : tensor.shape[1]])


@pytest.mark.parametrize("case", cases("hydra/hydra*"), ids=name_of)
@torch.no_grad()
def test_hydra_proposes_the_tree_of_the_authors(case: Case) -> None:
    head, io = load_head(case.path, case.target), case.io
    ids, hidden = io["proposal_input_ids"], io["proposal_hidden"]
    root = io["proposal_base_logits"][:, -1].argmax(-1)
    drafter = drafter_for(head, case.target, TreeShape.from_paths(case.about["proposal_tree"]))
    session = drafter.start(ids, torch.tensor([ids.shape[1]]))
    tokens = torch.cat([ids[:, 1:], root[:, None]], dim=1)
    session.commit(Committed(tokens, Features(hidden), torch.tensor([ids.shape[1]])))
    tree = session.propose(drafter.budgets[-1], SamplingConfig(), None)
    names = ("tree_candidates", "position_ids", "attn_mask")
    case.assert_tree(tree, *(f"proposal_{name}" for name in names))


# EAGLE


def eagle_outputs(head: RecurrentHead, target: Target, io: Outputs) -> Outputs:
    """A causal pass, the same in pieces on a cache, and steps on the head's own outputs."""
    features, ids = io["features"], io["next_input_ids"]
    count = ids.shape[1]
    causal = torch.ones(1, 1, count, count, dtype=torch.bool).tril()
    rotation, cache = head.rotary(torch.arange(count)[None]), DraftCache(head.layers, len(ids))
    cached = cache.view(count).opened()
    embeds = head.embed(ids, target)
    everywhere = head.run_layers(embeds, features, rotation, causal, cached.of_layer)
    found = {
        "expected_out_full": everywhere,
        "expected_logits_full": head.logits(everywhere, target),
    }
    reader = DraftReader(drafter_for(head, target), len(ids))
    for name, part in (("prefill", slice(12)), ("inc1", slice(12, 13)), ("inc3", slice(13, 16))):
        lengths = torch.full((len(ids),), ids[:, part].shape[1])
        new = Committed(ids[:, part], Features(features[:, part]), lengths)
        found[f"expected_out_{name}"] = reader.read(new).states
    return {**found, **eagle_chain(head, target, io)}


def eagle_chain(head: RecurrentHead, target: Target, io: Outputs) -> Outputs:
    """Greedy steps behind the target."""
    ids, following = io["chain_target_input_ids"], io["chain_target_next_token"]
    tokens = torch.cat([ids[:, 1:], following], dim=1)
    features = Features(io["chain_target_last_hidden"])
    reader, found, drafted = DraftReader(drafter_for(head, target), len(ids)), {}, []
    state = reader.read(Committed(tokens, features, torch.tensor([ids.shape[1]])))
    for step in range(3):
        logits = head.logits(state.states, target)
        found[f"chain_expected_logits_step{step}"] = logits
        drafted.append(logits.argmax(-1))
        visible = torch.ones(1, 1, step + 1, dtype=torch.bool)
        state = reader.expand(Nodes(drafted[-1], state.states, visible, step + 1))
        found[f"chain_expected_out_step{step}"] = state.states
    return {**found, "chain_expected_draft_tokens": torch.cat(drafted, dim=1)}


@pytest.mark.parametrize("case", cases("eagle1/*"), ids=name_of)
@torch.no_grad()
def test_eagle_features_are_those_of_the_authors(case: Case) -> None:
    head = load_head(case.path, case.target)
    for name, tensor in eagle_outputs(head, case.target, case.io).items():
        # Pieces are known by their last position.
        case.assert_close(tensor, case.io[name][:, -tensor.shape[1] :])


# MLP speculators


def mlp_outputs(head: MlpSpeculator, target: Target, io: Outputs) -> Outputs:
    """Step i at position t takes in token t + i."""
    state, found = head.start(io["states"]), {}
    for i in range(head.depth):
        tokens = io["tokens"][:, i : i + state.shape[1]]
        state = head.advance(state, tokens, i, target)
        found[f"expected_logits_head{i}"] = head.token_logits(i, state, target)
    return found


@pytest.mark.parametrize("case", cases("mlp_speculator/*"), ids=name_of)
@torch.no_grad()
def test_mlp_speculators_are_those_of_the_authors(case: Case) -> None:
    target = target_of(case)
    head = load_head(case.path, target)
    assert_as_recorded(case, mlp_outputs(head, target, case.io))


@pytest.mark.parametrize("case", cases("mlp_speculator/*"), ids=name_of)
@torch.no_grad()
def test_the_best_suffixes_of_an_mlp_speculator_are_those_of_the_authors(case: Case) -> None:
    target, io = target_of(case), case.io
    head = load_head(case.path, target)
    widths = case.about["dims"]["top_k_tokens_per_head"]
    paths = {(): (0.0, head.start(io["suffix_state"][0, 0]), io["suffix_token"][0, 0])}
    for i, width in enumerate(widths):
        grown = {}
        for path, rank in product(paths, range(width)):
            score, state, token = paths[path]
            state = head.advance(state, token, i, target)
            best = head.token_logits(i, state, target).log_softmax(-1).topk(width)
            following = best.indices[rank]
            grown[(*path, int(following))] = (score + float(best.values[rank]), state, following)
        paths = grown
    best_first = sorted(paths, key=lambda path: -paths[path][0])
    expected = io["expected_suffixes"][0].tolist()
    assert [list(path) for path in best_first[: len(expected)]] == expected
