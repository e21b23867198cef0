"""Cases like those of `golden`, but written by our own exporters from small random heads.

They go through the same tests, so that these run where the official cases are not at hand, and show
that what is exported comes back as the same head.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from golden import Case
from safetensors.torch import save_file
from tiny import VOCAB, llama_config
from transformers import LlamaForCausalLM

from drafthead.heads.base import HEADS, DraftHead
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.formats.exporting import export_head
from drafthead.heads.target.target import Target

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
Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Written:
    """A head to be exported: the format, the family, and what makes the head special."""

    name: str
    format: str
    family: str
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, folder: Path, inputs: Outputs, compute: Callable[..., Outputs]) -> Case:
        """Export the head, and keep what it computes of the inputs before that."""
        torch.manual_seed(0)
        model = LlamaForCausalLM(TARGET)
        target, head = Target(model), random_head(self.family, Target(model), self.options)
        facts = TargetFacts.of(target, "target")
        assert export_head(head, facts, target, self.format, folder) < 1e-4
        model.save_pretrained(folder / "target")
        about = {"tolerance": {"atol": 1e-5, "rtol": 1e-5}, "tree_settings": []}
        (folder / "case.json").write_text(json.dumps(about))
        with torch.no_grad():
            expected = compute(head, target, inputs)
        everything = {**inputs, **expected}
        save_file({k: v.contiguous() for k, v in everything.items()}, folder / "io.safetensors")
        return Case(folder)


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
