"""Checkpoints that our own exporters write from small random heads."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny import VOCAB, llama_config
from transformers import LlamaForCausalLM

from drafthead.core.target.target import Target
from drafthead.heads.base import HEADS, DraftHead
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.formats.exporting import export_head

LAYERS = 8
TARGET = llama_config(num_hidden_layers=LAYERS, initializer_range=0.15)
# Settings that heads of the official code have.
EAGLE3 = {"tap_norm": "none", "norm_feedback": False}
DFLASH = {
    "tap_norm": False, "causal": False, "root_predicts": False, "correction": "none",
    "mask_token": VOCAB - 1, "taps": (1, 4, 6), "block_size": 5,
}  # fmt: skip
DSPARK = {
    **DFLASH, "root_predicts": True, "correction": "markov", "correction_rank": 6,
    "confidence_weight": 1.0,
}  # fmt: skip
GQA = {"num_key_value_heads": 1, "head_dim": 12}  # not the hidden size over the heads
Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Written:
    """A head to be exported: the format, the family, and what makes the head special."""

    name: str
    format: str
    family: str
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, folder: Path) -> tuple[DraftHead, Target]:
        """Export the head; gives it, and its target, which is the same for all."""
        torch.manual_seed(0)
        target = Target(LlamaForCausalLM(TARGET))
        head = random_head(self.family, target, self.options)
        facts = TargetFacts.of(target, "target")
        assert export_head(head, facts, target, self.format, folder) < 1e-4
        return head, target


def random_head(family: str, target: Target, options: dict[str, Any]) -> DraftHead:
    """A head with random weights and, if it has one, a random draft vocabulary."""
    cls = HEADS[family]
    head = cls(cls.sized(cls.config_class(**options), target))
    head.prepare(torch.rand(target.vocab_size))
    head.initialize(target)
    for parameter in head.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return head.eval().requires_grad_(False)
