"""A target for heads of all formats, and undamaged checkpoints for tests that damage copies."""

from pathlib import Path

import pytest
import torch
from damaged import build_examples
from transformers import LlamaForCausalLM
from written import TARGET

from drafthead.core.target.target import Target


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undamaged checkpoints by name, and their target."""
    root = tmp_path_factory.mktemp("whole")
    build_examples(root)
    return root


@pytest.fixture
def target8() -> Target:
    """A target of 8 layers."""
    torch.manual_seed(0)
    return Target(LlamaForCausalLM(TARGET))
