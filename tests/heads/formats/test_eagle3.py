"""EAGLE-3 and P-EAGLE of other projects: what their code computed is what our head computes."""

import json
from pathlib import Path

import pytest
import torch
from golden import Case, cases, features_of, name_of
from tiny import HIDDEN, VOCAB
from written import EAGLE3, Outputs, random_head

from drafthead.core.drafting.drafter import Committed
from drafthead.core.errors import UserError
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.features import Features, FeatureSpec
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.families.recurrent import passes as recurrent_passes
from drafthead.heads.families.recurrent.drafter import DraftReader
from drafthead.heads.families.recurrent.eagle3 import Eagle3Head
from drafthead.heads.families.recurrent.head import Unrolled
from drafthead.heads.formats import load_head, read_foreign
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.formats.exporting import export_head
from drafthead.heads.growing.levels import Nodes
from drafthead.heads.layers.cache import DraftCache
from drafthead.heads.objectives.batch import HeadBatch
from drafthead.infer import Decoder

OF_TREES = ("draft_tokens", "position_ids", "tree_mask")
BLIND = {"mask_token": 5, "num_layers": 2}  # P-EAGLE


def outputs_at_all(head: Eagle3Head, target: Target, taps: Features, ids: torch.Tensor):
    """A causal pass over pairs of features and tokens [B, T]."""
    count = ids.shape[1]
    causal = torch.ones(1, 1, count, count, dtype=torch.bool).tril()
    rotation, cache = head.rotary(torch.arange(count)[None]), DraftCache(head.layers, len(ids))
    cached = cache.view(count).opened()
    embeds = head.embed(ids, target)
    return head.run_layers(embeds, head.encode(taps), rotation, causal, cached.of_layer)


def all_positions(ids: torch.Tensor, taps: Features) -> Committed:
    return Committed(ids, taps, torch.full((len(ids),), ids.shape[1]))


def guesses(head: Eagle3Head, logits: torch.Tensor) -> torch.Tensor:
    best = logits.argmax(-1)
    return best if head.draft_ids is None else head.draft_ids[best]


# The authors' code: a causal pass, then steps on the head's own outputs


def recurrent_outputs(head: Eagle3Head, target: Target, io: Outputs) -> Outputs:
    ids, taps = io["next_input_ids"], features_of(io["features3"], head)
    everywhere = outputs_at_all(head, target, taps, ids)
    found = {
        "expected_fc_out": head.encode(taps),
        "expected_out_full": everywhere,
        "expected_draft_logits_full": head.logits(everywhere, target),
    }
    reader, tokens = DraftReader(drafter_for(head, target), len(ids)), []
    state = reader.read(all_positions(ids, taps))
    for step in range(3):
        logits = head.logits(state.states, target)
        found[f"rec_expected_draft_logits_step{step}"] = logits
        tokens.append(guesses(head, logits))
        visible = torch.ones(1, 1, step + 1, dtype=torch.bool)
        state = reader.expand(Nodes(tokens[-1], state.states, visible, step + 1))
        found[f"rec_expected_out_step{step}"] = state.states
    return {**found, "rec_expected_draft_tokens_target_ids": torch.cat(tokens, dim=1)}


@pytest.mark.parametrize("case", cases("eagle3/*"), ids=name_of)
@torch.no_grad()
def test_recurrent_steps_are_those_of_the_authors(case: Case) -> None:
    head = load_head(case.path, case.target)
    for name, found in recurrent_outputs(head, case.target, case.io).items():
        case.assert_close(found, name)


@pytest.mark.parametrize("case", cases("eagle3/*"), ids=name_of)
@torch.no_grad()
def test_without_ids_the_layers_whose_input_the_authors_read_are_tapped(case: Case) -> None:
    head = load_head(case.path, case.target)
    assert head.config.taps == tuple(case.about["dims"]["tap_layer_outputs"])
    ids = case.io["target_input_ids"]
    positions = torch.arange(ids.shape[1])[None]
    spec = FeatureSpec(head.config.taps, last=False)
    output = case.target.run(ids, positions, None, spec)
    case.assert_close(torch.cat(output.features.taps, dim=-1), "target_features3")
    following = torch.cat([ids[:, 1:], case.io["target_next_token"]], dim=1)
    drafted = outputs_at_all(head, case.target, output.features, following)
    case.assert_close(drafted, "target_expected_draft_out")


@pytest.mark.parametrize("case", cases("eagle3/*"), ids=name_of)
@torch.no_grad()
def test_dynamic_trees_are_those_of_the_authors(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = load_head(case.path, case.target)
    io, ids = case.io, case.io["target_input_ids"]
    following = torch.cat([ids[:, 1:], io["target_next_token"]], dim=1)
    first = all_positions(following, features_of(io["target_features3"], head))
    for number, setting in enumerate(case.about["tree_settings"]):
        monkeypatch.setattr(recurrent_passes, "DYNAMIC_WIDTH", setting["top_k"])
        # Their depth counts the levels below the first.
        budget = Budget(setting["total_token"], setting["depth"] + 1)
        session = drafter_for(head, case.target).start(ids, torch.tensor([ids.shape[1]]))
        session.commit(first)
        tree = session.propose(budget, SamplingConfig(), None)
        case.assert_tree(tree, *(f"tree{number}_{part}" for part in OF_TREES))
        if number == 0:
            new = io["second_call_features3_new"]
            tokens = io["second_call_input_ids"][:, -new.shape[1] :]
            session.commit(all_positions(tokens, features_of(new, head)))
            tree = session.propose(budget, SamplingConfig(), None)
            case.assert_tree(tree, *(f"second_call_{part}" for part in OF_TREES))


# Training-time test, as speculators runs it


def unrolled_outputs(head: Eagle3Head, target: Target, io: Outputs, steps: int = 3) -> Outputs:
    """Steps of all positions, less the last ones, for which later steps lack tokens.

    Features are paired with tokens that are already shifted, so they are shifted back.
    """
    ids, taps = io["input_ids"].roll(1, dims=1), features_of(io["hidden_states"], head)
    length, found = ids.shape[1], {}
    batch = HeadBatch(ids, torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool), taps)
    unrolled = Unrolled(head, target, batch, torch.arange(length)[None])
    for step in range(steps):
        lacking = 0 if step == 0 else step + (not head.drafts_blindly)
        outputs = unrolled.next_outputs()[:, : length - lacking]
        found[f"expected_prenorm_hidden_ttt{step}"] = outputs
        found[f"expected_logits_ttt{step}"] = head.logits(outputs, target)
    return found


@pytest.mark.parametrize("case", cases("speculators_eagle3/*"), ids=name_of)
@torch.no_grad()
def test_training_time_steps_are_those_of_speculators(case: Case) -> None:
    head = load_head(case.path, case.target)
    case.assert_close(head.encode(features_of(case.io["hidden_states"], head)), "fc_out")
    for name, found in unrolled_outputs(head, case.target, case.io).items():
        case.assert_close(found, case.io[name][:, : found.shape[1]])


@pytest.mark.parametrize("case", cases("speculators_eagle3/*"), ids=name_of)
@torch.no_grad()
def test_ids_of_speculators_count_the_embeddings_as_0(case: Case) -> None:
    head = load_head(case.path, case.target)
    ids = case.io["target_input_ids"]
    spec = FeatureSpec(head.config.taps, last=False)
    output = case.target.run(ids, torch.arange(ids.shape[1])[None], None, spec)
    for layer, tap in zip(head.config.taps, output.features.taps, strict=True):
        case.assert_close(tap, f"target_hf_hidden_states_{layer + 1}")


# P-EAGLE


@pytest.mark.parametrize("case", cases("speculators_peagle/*"), ids=name_of)
@torch.no_grad()
def test_drafting_ahead_of_any_token_is_that_of_p_eagle(case: Case) -> None:
    head = load_head(case.path, case.target)
    anchors, depths = case.io["anchor_pos"], case.io["depth"]
    steps = unrolled_outputs(head, case.target, case.io, int(depths.max()) + 1)
    compared = 0
    for row, (anchor, depth) in enumerate(zip(anchors.tolist(), depths.tolist(), strict=True)):
        if anchor < 0:  # drafting before the first feature, which only training does
            continue
        for kind in ("prenorm_hidden", "logits"):
            found = steps[f"expected_{kind}_ttt{depth}"][0, anchor]
            case.assert_close(found, case.io[f"expected_{kind}"][0, row])
        compared += 1
    assert compared > 20


@pytest.fixture
def blind(target8: Target) -> tuple[Eagle3Head, Target]:
    """A P-EAGLE head and its target."""
    return random_head("eagle3", target8, {**BLIND, "draft_vocab_size": 40}), target8


@torch.no_grad()
def test_a_blind_head_drafts_in_one_pass_what_it_would_step_by_step(blind) -> None:
    head, target = blind
    ids = torch.randint(VOCAB, (2, 6))
    taps = Features(None, tuple(torch.randn(2, 6, HIDDEN) for _ in head.config.taps))
    committed = Committed(ids, taps, torch.tensor([6, 4]))
    at_once, stepwise = (DraftReader(drafter_for(head, target), len(ids)) for _ in range(2))
    ahead = at_once.draft_blindly(ids[:, 0], at_once.read(committed), 4)
    state = stepwise.read(committed)
    for depth in (1, 2, 3):
        visible = torch.ones(1, 1, depth, dtype=torch.bool)
        state = stepwise.expand(Nodes(ids[:, :1], state.states, visible, depth))
        torch.testing.assert_close(ahead.states[:, depth - 1 : depth], state.states)


def test_a_blind_head_decodes_exactly(blind) -> None:
    head, target = blind
    prompts = [[3, 9, 4], [8, 8, 1, 5, 30]]
    plain = Decoder(target).generate(prompts, max_new_tokens=20).sequences
    for shape in (Budget(16, 4), Budget(4, 3)):
        decoder = Decoder(target, drafter_for(head, target), shape)
        assert decoder.generate(prompts, max_new_tokens=20).sequences == plain


def test_a_blind_head_learns_its_mask(blind) -> None:
    head, target = blind
    ids = torch.randint(VOCAB, (2, 12))
    spec = head.features_needed
    features = target.run(ids, torch.arange(12).expand(2, -1), None, spec).features
    supervised = torch.ones_like(ids, dtype=torch.bool)
    batch = HeadBatch(ids, torch.ones_like(ids), supervised, features)
    head.train().requires_grad_(True)
    head.loss(batch, target).total.backward()
    assert head.mask_hidden is not None and head.mask_hidden.grad is not None
    assert float(head.mask_hidden.grad.abs().sum()) > 0


# What a format cannot say


def exported(head: Eagle3Head, target: Target, name: str, folder: Path) -> dict:
    export_head(head, TargetFacts.of(target, "some/target"), target, name, folder)
    return json.loads((folder / "config.json").read_text())


def test_each_runtime_is_told_the_layers_in_its_own_convention(target8, tmp_path) -> None:
    head = random_head("eagle3", target8, EAGLE3)
    assert head.config.taps == (1, 3, 4)
    key = "eagle_aux_hidden_state_layer_ids"
    sglang = exported(head, target8, "eagle3-sglang", tmp_path / "sglang")
    assert sglang["eagle_config"][key] == [1, 3, 4]
    assert sglang[key] == [2, 4, 5]  # vLLM and llama.cpp know no others
    assert exported(head, target8, "eagle3-vllm", tmp_path / "vllm")[key] == [2, 4, 5]
    assert exported(head, target8, "speculators", tmp_path / "speculators")[key] == [2, 4, 5]


@pytest.mark.parametrize("taps", [(0, 3, 4), (2, 4), (1, 2, 4, 6)])
def test_sglang_reads_any_number_of_taps(taps, target8, tmp_path) -> None:
    config = exported(
        random_head("eagle3", target8, {"taps": taps}), target8, "eagle3-sglang", tmp_path / "head"
    )
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(taps)
    assert load_head(tmp_path / "head", target8).config.taps == taps


def test_of_deepseek_sglang_reads_others(target8, tmp_path) -> None:
    head = random_head("eagle3", target8, {"taps": (0, 3, 4)})
    target8.config.model_type = "deepseek_v3"
    with pytest.raises(UserError, match="on deepseek_v3: of this target SGLang reads them as"):
        exported(head, target8, "eagle3-sglang", tmp_path / "head")


@pytest.mark.parametrize(
    ("ids", "taps"),
    [
        ([1, 3, 4], (1, 3, 4)),  # outputs, as Model-Optimizer writes them
        ([2, 4, 5], (1, 3, 4)),  # inputs, as vLLM reads them
        ([3, 4, 5], (2, 3, 4)),
        (None, (1, 3, 4)),
    ],
)
def test_layer_ids_of_unknown_convention_are_read_as_sglang_reads_them(
    ids, taps, target8, tmp_path
) -> None:
    head = random_head("eagle3", target8, EAGLE3)
    config = exported(head, target8, "eagle3-vllm", tmp_path / "head")
    for key in ("eagle_config", "eagle_aux_hidden_state_layer_ids", "drafthead_layer_convention"):
        del config[key]
    if ids is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    _, foreign = read_foreign(tmp_path / "head", TargetFacts.of(target8))
    assert foreign.config.taps == taps
    assert foreign.notes


def test_without_ids_and_target_the_target_is_asked_for(target8, tmp_path) -> None:
    head = random_head("eagle3", target8, EAGLE3)
    config = exported(head, target8, "eagle3-sglang", tmp_path / "head")
    for key in ("eagle_config", "eagle_aux_hidden_state_layer_ids"):
        del config[key]
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    _, foreign = read_foreign(tmp_path / "head", TargetFacts())
    assert "which layers" in foreign.needs_target


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {
            "rope_theta": 5e5,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        },
    ],
)
def test_rotary_keys_of_transformers_4_and_5_are_read(rope, target8, tmp_path) -> None:
    head = random_head("eagle3", target8, EAGLE3)
    config = exported(head, target8, "eagle3-sglang", tmp_path / "head")
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e4
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        del config[key]
    (tmp_path / "head" / "config.json").write_text(json.dumps({**config, **rope}))
    found = load_head(tmp_path / "head", target8).config.rope_parameters
    assert found["rope_theta"] == 5e5
    assert found.get("factor") == (2.0 if "linear" in str(rope) else None)


def test_rotary_keys_that_disagree_are_refused(target8, tmp_path) -> None:
    head = random_head("eagle3", target8, EAGLE3)
    config = exported(head, target8, "eagle3-sglang", tmp_path / "head")
    (tmp_path / "head" / "config.json").write_text(json.dumps({**config, "rope_theta": 5e5}))
    with pytest.raises(UserError, match="rope_theta is 500000.0 here and 10000.0 there"):
        load_head(tmp_path / "head", target8)
