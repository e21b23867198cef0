"""What we export loads in the real `speculators` package and computes the same there.

Skipped where it is not installed: `pip install drafthead[interop]`.
"""

import json
from pathlib import Path

import pytest
import torch
from tiny import HIDDEN, VOCAB
from transformers import LlamaForCausalLM
from written import TARGET, random_head

from drafthead.core.target.features import Features
from drafthead.core.target.target import Target
from drafthead.heads.base import DraftHead
from drafthead.heads.families.parallel.head import ParallelHead
from drafthead.heads.families.recurrent.eagle3 import Eagle3Head
from drafthead.heads.families.recurrent.head import Unrolled
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.formats.exporting import export_head
from drafthead.heads.objectives.batch import HeadBatch

pytest.importorskip("speculators")

LENGTH = 12
EAGLES = {
    "3.0": {"tap_norm": "none", "norm_feedback": False, "draft_vocab_size": 40},
    "3.1": {},
    "Qwen3": {"tap_norm": "joint", "qk_norm": True, "head_dim": 12, "norm_before_residual": True},
    "two biased layers": {"num_layers": 2, "attention_bias": True, "taps": (-1, 0, 7)},
}
BLOCK = {
    "tap_norm": False, "causal": False, "mask_token": VOCAB - 1, "taps": (1, 4, 7), "block_size": 4,
}  # fmt: skip
BLOCKS = {
    "dflash": {"correction": "none", "root_predicts": False, "draft_vocab_size": 40},
    "dflash of all tokens": {"correction": "none", "root_predicts": False, "head_dim": 12},
    "causal dflash": {"correction": "none", "root_predicts": False, "causal": True},
    # Their window counts from the block's first slot, so it is compared where it hides nothing.
    "sliding": {"correction": "none", "causal": False, "window": LENGTH + 4},
    "dspark": {"confidence_weight": 1.0, "draft_vocab_size": 40},
    "gated dspark": {"correction": "gated", "confidence_weight": 1.0, "attention_bias": True},
    "recurrent dspark": {"correction": "recurrent", "confidence_weight": 1.0},
}


@pytest.fixture
def exported(tmp_path: Path):
    """Writes a head with its target beside it; gives head, target and their class's model."""
    from speculators.model import SpeculatorModel

    def export(family: str, options: dict) -> tuple[DraftHead, Target, torch.nn.Module]:
        torch.manual_seed(0)
        model = LlamaForCausalLM(TARGET)
        target = Target(model)
        head = random_head(family, target, options)
        model.save_pretrained(tmp_path / "target")
        facts = TargetFacts.of(target, str(tmp_path / "target"))
        export_head(head, facts, target, "speculators", tmp_path / "head")
        config = json.loads((tmp_path / "head" / "config.json").read_text())
        loaded = theirs(tmp_path / "head", SpeculatorModel)
        assert config["architectures"] == [type(loaded).__name__]
        return head, target, loaded

    return export


def theirs(folder: Path, base: type) -> torch.nn.Module:
    """Their model with plain attention: their own kernels need a GPU."""
    config = base.config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return base.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def taps_of(head: DraftHead) -> torch.Tensor:
    return torch.randn(1, LENGTH, len(head.config.taps) * HIDDEN)


def batch_of(head: DraftHead, ids: torch.Tensor, joined: torch.Tensor) -> HeadBatch:
    """Their pairs of features and next tokens, as text with features."""
    features = Features(joined[..., :1], joined.chunk(len(head.config.taps), dim=-1))
    before = ids.roll(1, dims=1)
    return HeadBatch(before, torch.ones_like(ids), torch.ones_like(ids).bool(), features)


@pytest.mark.parametrize("name", EAGLES)
@torch.no_grad()
def test_eagle3_computes_the_same_in_their_class(name: str, exported) -> None:
    head, target, model = exported("eagle3", EAGLES[name])
    assert isinstance(head, Eagle3Head)
    ids, joined = torch.randint(VOCAB, (1, LENGTH)), taps_of(head)
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda *call: found.append(call[2]))
    model(joined, ids, document_ids=torch.zeros_like(ids), ttt_steps=3)
    unrolled = Unrolled(head, target, batch_of(head, ids, joined), torch.arange(LENGTH)[None])
    assert len(found) == 3
    for logits in found:
        ours = head.logits(unrolled.next_outputs(), target)[:, : LENGTH - 4]
        torch.testing.assert_close(ours, logits[:, : LENGTH - 4], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_p_eagle_computes_the_same_in_their_class(
    exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speculators.models.peagle import core

    monkeypatch.setattr(core, "compute_metrics", lambda **_: (None, {}))  # it needs a GPU
    options = {"mask_token": 5, "num_layers": 2, "tap_norm": "none", "norm_feedback": False}
    head, target, model = exported("eagle3", options)
    assert isinstance(head, Eagle3Head)
    ids, joined = torch.randint(VOCAB, (1, LENGTH)), taps_of(head)
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda *call: found.append(call[2]))
    model(
        joined, ids, torch.zeros_like(ids), num_depths=2, down_sample_ratio=1.0,
        verifier_last_hidden_states=torch.randn(1, LENGTH, HIDDEN),
    )  # fmt: skip
    unrolled = Unrolled(head, target, batch_of(head, ids, joined), torch.arange(LENGTH)[None])
    first, second = (head.logits(unrolled.next_outputs(), target) for _ in range(2))
    # Their rows: all positions, then depth 1 behind anchors -1, 1, 2, ...
    ours = torch.cat([first, second[:, 1 : LENGTH - 1]], dim=1)
    expected = torch.cat([found[0][:, :LENGTH], found[0][:, LENGTH + 1 :]], dim=1)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_blocks_compute_the_same_in_their_class(name: str, exported) -> None:
    head, target, model = exported("parallel", {**BLOCK, **BLOCKS[name]})
    assert isinstance(head, ParallelHead)
    ids, joined = torch.randint(VOCAB, (1, LENGTH)), taps_of(head)
    nothing = torch.zeros_like(ids)
    hidden, logits, _, _, places = model._backbone_forward(
        joined, ids, torch.ones_like(ids), torch.randn(1, LENGTH, HIDDEN), nothing, max_anchors=2
    )
    blocks = places.view(2, -1)
    taps = Features(None, joined.chunk(len(head.config.taps), dim=-1))
    batch = HeadBatch(ids, torch.ones_like(ids), torch.ones_like(ids).bool(), taps)
    ours = head.block_states(batch, target, blocks[None, :, 0] - 1)[
        0
    ]  # our anchor is one before theirs
    unused = head.config.block_size - head.depth
    slots = hidden.view(2, head.config.block_size, -1)[:, unused:]
    torch.testing.assert_close(ours, slots, atol=1e-4, rtol=1e-4)
    expected = logits.view(2, head.config.block_size, -1)[:, unused:]
    torch.testing.assert_close(head.base_logits(ours, target), expected, atol=1e-4, rtol=1e-4)
    if head.correction is not None and head.confidence is not None:
        before = ids[0, blocks]
        bias = model.markov_head.block_bias(prev_token_ids=before, hidden_states=slots)
        codes = head.correction.codes(before, ours)
        torch.testing.assert_close(head.correction.output(codes), bias, atol=1e-4, rtol=1e-4)
        read = torch.cat([slots, model.markov_head.prev_embeddings(before)], dim=-1)
        chance = model.confidence_head(read)
        torch.testing.assert_close(
            head.confidence_logits(ours, before), chance, atol=1e-4, rtol=1e-4
        )
