"""Every family in every format that can hold it: exported, or refused with one sentence."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import llama_config
from transformers import LlamaForCausalLM
from written import DFLASH, DSPARK, EAGLE3, GQA, LAYERS, Written, random_head

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.heads.base import DraftHead
from drafthead.heads.formats import FORMATS, build_head, load_head, read_foreign
from drafthead.heads.formats.base import TargetFacts, WritableFormat
from drafthead.heads.formats.exporting import draw_chain, export_head

WIDTHS = (24, 32, 40, 48, 56, 64, 72)  # multiples of 32 and others
FEW, MANY = 30, 200
# The key for depth in each family's configuration, and settings that some format can express.
DEPTH_KEYS = {
    "eagle": "depth", "eagle3": "depth", "parallel": "block_size",
    "medusa": "num_heads", "hydra": "num_heads", "mlp_speculator": "num_heads",
}  # fmt: skip
SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "eagle": ({}, {"embeddings": "own"}, {"num_layers": 2}),
    "eagle3": (EAGLE3, {}, {**EAGLE3, "draft_vocab_size": 20}, {"mask_token": 5}),
    "parallel": (DFLASH, DSPARK, {**DFLASH, "draft_vocab_size": 20}, {}),
    "medusa": ({}, {"output": "shared"}, {"num_blocks": 2}, {"bias": False}),
    "hydra": ({}, {"prefix_layer": False, "num_blocks": 1}, {"grounded": False}),
    "mlp_speculator": ({}, {"tie_weights": True}, {"scale_input": True}),
}
PAIRS = [
    (family, name)
    for name, known in FORMATS.items()
    if isinstance(known, WritableFormat) and name != "mtp"  # see test_mtp.py
    for family in known.families
]


def test_every_family_has_settings() -> None:
    assert {family for family, _ in PAIRS} == set(SETTINGS) == set(DEPTH_KEYS)


def target_of(width: int) -> Target:
    torch.manual_seed(width)
    return Target(LlamaForCausalLM(llama_config(hidden_size=width, num_hidden_layers=8)))


def drafted(family: str, depth: int, options: dict[str, Any]) -> dict[str, Any]:
    """Options for a head that drafts `depth` tokens."""
    found = {**options, DEPTH_KEYS[family]: depth}
    if family == "parallel":
        found["block_size"] += not options.get("root_predicts", True)
    if family in ("eagle", "eagle3"):
        found["ttt_steps"] = min(depth, 3)
    return found


def assert_same(head: DraftHead, again: DraftHead, target: Target) -> None:
    """Tensors and drafts of two heads are equal."""
    assert again.depth == head.depth
    ours = head.state_dict()
    for key, tensor in again.state_dict().items():  # without copies of the target's weights
        # A format whose blocks always have a bias gets one of 0.
        expected = ours[key] if key in ours else torch.zeros_like(tensor)
        assert torch.equal(expected, tensor), key
    with torch.no_grad():
        trees = [draw_chain(each, target)[1] for each in (head, again)]
    assert torch.equal(trees[0].tokens, trees[1].tokens)
    torch.testing.assert_close(trees[0].draft_probs, trees[1].draft_probs, atol=1e-6, rtol=1e-5)


SHAPE, SMALL = {**GQA, "num_layers": 1}, {"draft_vocab_size": 40}
OWN = [
    Written("v1", "medusa", "medusa", {"num_heads": 3}),
    Written("v1 without bias", "medusa", "medusa", {"bias": False}),
    Written("v2", "medusa", "medusa", {"output": "shared"}),
    Written("vLLM", "vllm-medusa", "medusa", {"num_blocks": 2, "bias": False}),
    Written("vLLM, shared output", "vllm-medusa", "medusa", {"output": "shared"}),
    Written("Hydra++", "hydra", "hydra", {"num_heads": 3, "num_blocks": 3}),
    Written("Hydra", "hydra", "hydra", {"prefix_layer": False, "num_blocks": 1}),
    Written("ungrounded", "hydra", "hydra", {"prefix_layer": False, "grounded": False}),
    Written("one layer", "eagle", "eagle"),
    Written("no bias", "eagle", "eagle", {"fc_bias": False, "attention_bias": True}),
    Written("two layers", "eagle", "eagle", {"num_layers": 2, "embeddings": "own"}),
    Written("untied", "mlp", "mlp_speculator", {"num_heads": 3, "inner_size": 24}),
    Written("tied", "mlp", "mlp_speculator", {"tie_weights": True, "scale_input": True}),
    Written("plain", "eagle3-sglang", "eagle3", {**EAGLE3, "draft_vocab_size": 40}),
    Written("full vocabulary", "eagle3-sglang", "eagle3", {**EAGLE3, **GQA}),
    Written("wider than the target", "eagle3-sglang", "eagle3", {**EAGLE3, "hidden_size": 48}),
    Written("norms and layers", "eagle3-sglang", "eagle3", {"num_layers": 2}),
    Written("joint norm", "eagle3-sglang", "eagle3", {"tap_norm": "joint"}),
    Written("3.1", "eagle3-vllm", "eagle3", {"draft_vocab_size": 40, "embeddings": "own"}),
    Written(
        "joint norm", "eagle3-vllm", "eagle3",
        {"tap_norm": "joint", "norm_feedback": False, "norm_before_residual": True},
    ),
    Written("two layers", "eagle3-vllm", "eagle3", {"num_layers": 2, "attention_bias": True}),
    Written("Qwen3's layers", "eagle3-vllm", "eagle3", {"qk_norm": True, **GQA}),
    Written("3.1", "speculators", "eagle3", {"draft_vocab_size": 40}),
    Written("Qwen3's layers", "speculators", "eagle3", {**EAGLE3, "qk_norm": True, **GQA}),
    Written("four taps", "speculators", "eagle3", {"taps": (-1, 0, 3, 7), "tap_norm": "joint"}),
    Written("biases", "speculators", "eagle3", {"attention_bias": True, "num_layers": 2}),
    Written("P-EAGLE", "speculators", "eagle3", {"mask_token": 5, "num_layers": 2}),
    Written("EAGLE window", "speculators", "eagle3", {"window": 3, "num_layers": 2}),
    Written("P-EAGLE window", "speculators", "eagle3", {"mask_token": 5, "window": 3}),
    Written(
        "own embeddings", "speculators", "eagle3",
        {"mask_token": 5, "embeddings": "own", "draft_vocab_size": 40, **EAGLE3},
    ),
    Written("plain", "dflash", "parallel", DFLASH),
    Written("shape", "dflash", "parallel", {**DFLASH, **SHAPE, "attention_bias": True}),
    Written("final norm", "dflash", "parallel", {**DFLASH, "taps": (0, LAYERS)}),
    Written("causal", "dflash", "parallel", {**DFLASH, "causal": True}),
    Written("window", "dflash", "parallel", {**DFLASH, "window": 6}),
    Written("causal window", "dflash", "parallel", {**DFLASH, "causal": True, "window": 6}),
    Written("plain", "dflash-transformers", "parallel", DFLASH),
    Written("shape", "dflash-transformers", "parallel", {**DFLASH, **SHAPE}),
    Written("vanilla", "dspark", "parallel", DSPARK),
    Written("gated", "dspark", "parallel", {**DSPARK, "correction": "gated", "taps": (-1, 2, 8)}),
    Written("rnn", "dspark", "parallel", {**DSPARK, "correction": "recurrent", **SHAPE}),
    Written(
        "no heads", "dspark", "parallel",
        {**DSPARK, "correction": "none", "confidence_weight": 0.0},
    ),
    Written("confidence", "dspark", "parallel", {**DSPARK, "confidence_reads_token": False}),
    Written("dflash", "speculators", "parallel", DFLASH),
    Written("dflash from the anchor", "speculators", "parallel", {**DFLASH, "root_predicts": True}),
    Written("causal", "speculators", "parallel", {**DFLASH, "causal": True}),
    Written("window", "speculators", "parallel", {**DSPARK, "window": 6}),
    Written("causal window", "speculators", "parallel", {**DFLASH, "causal": True, "window": 6}),
    Written("dflash of few tokens", "speculators", "parallel", {**DFLASH, **SMALL, **SHAPE}),
    Written("vanilla of few tokens", "speculators", "parallel", {**DSPARK, **SMALL}),
    Written("gated", "speculators", "parallel", {**DSPARK, "correction": "gated", "taps": (7, -1)}),
    Written("rnn", "speculators", "parallel", {**DSPARK, **SMALL, "correction": "recurrent"}),
    Written("dspark unanchored", "speculators", "parallel", {**DSPARK, "root_predicts": False}),
]  # fmt: skip


@pytest.mark.parametrize("written", OWN, ids=lambda own: f"{own.format} {own.name}")
def test_settings_of_heads_survive_export_and_import(written: Written, tmp_path: Path) -> None:
    head, target = written.build(tmp_path / "head")
    again = load_head(tmp_path / "head", target)
    assert_same(head, again, target)
    assert getattr(again.config, "taps", None) == getattr(head.config, "taps", None)


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_exports_of_all_depths_and_widths_come_back(count: int, tmp_path: Path) -> None:
    """With and without the target; what is refused, with a UserError, does not count."""
    targets = {width: target_of(width) for width in WIDTHS}
    written: Counter[object] = Counter()
    for number in range(10 * count):
        rng = random.Random(number)
        family, name = PAIRS[number % len(PAIRS)]
        target, depth = targets[rng.choice(WIDTHS)], 1 + (number // len(PAIRS) + number) % 8
        settings = SETTINGS[family][(number // len(PAIRS)) % len(SETTINGS[family])]
        head = random_head(family, target, drafted(family, depth, settings))
        given = target if rng.random() < 0.5 else None
        folder = tmp_path / f"{number}"
        try:
            export_head(head, TargetFacts.of(target), given, name, folder)
        except UserError:
            continue
        _, foreign = read_foreign(folder, TargetFacts.of(target))
        assert_same(head, build_head(foreign, folder, target), target)
        told = "given" if given else "not given"
        written.update(["all", (family, name), depth, f"width {target.hidden_size}", told])
        if written["all"] == count:
            break
    assert written["all"] == count
    kinds = {*PAIRS, *range(1, 9), *(f"width {width}" for width in WIDTHS), "given", "not given"}
    assert count < MANY or kinds <= set(written), written


@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize(
    ("kind", "name"), [("eagle", "eagle"), ("eagle3", "eagle3-sglang"), ("eagle3", "eagle3-vllm")]
)
def test_a_depth_that_the_format_has_no_key_for_comes_back(
    kind: str, name: str, depth: int, tmp_path: Path
) -> None:
    target = target_of(48)
    settings = EAGLE3 if kind == "eagle3" else {}
    head = random_head(kind, target, drafted(kind, depth, settings))
    export_head(head, TargetFacts.of(target), target, name, tmp_path / "out")
    _, foreign = read_foreign(tmp_path / "out", TargetFacts())
    assert foreign.config.depth == depth
    assert not any("depth" in note for note in foreign.notes)


def test_a_depth_that_is_lost_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(48)
    monkeypatch.setattr("drafthead.heads.formats.eagle.DEPTH", "pad_token_id")  # read by no one
    head = random_head("eagle", target, {"depth": 3, "ttt_steps": 1})
    with pytest.raises(UserError, match="eagle cannot express a depth of 3"):
        export_head(head, TargetFacts.of(target), target, "eagle", tmp_path / "out")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("kind", "name"), [("medusa", "medusa"), ("mlp_speculator", "mlp"), ("eagle3", "speculators")]
)
def test_no_target_is_needed_for_any_width(
    kind: str, name: str, width: int, tmp_path: Path
) -> None:
    target = target_of(width)
    head = random_head(kind, target, {})
    assert export_head(head, TargetFacts.of(target), None, name, tmp_path / "out") < 1e-3
