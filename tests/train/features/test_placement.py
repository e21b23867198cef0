"""Targets whose layers are elsewhere: heads learn the same. Two processes: `test_engines.py`."""

from pathlib import Path

import pytest
import torch
from tiny import target_folder

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.core.target.weights_hash import weights_fingerprint
from drafthead.train.data.packing import collate
from drafthead.train.data.sequences import TokenSequence
from drafthead.train.features.reading import load_target, read_features
from drafthead.train.learning.step import LossModule
from drafthead.train.run.trainables import new_head, trainable
from drafthead.train.settings import TargetConfig

ON_DISK = {"model.layers.0": "disk", "model.layers.2": "disk"}
CPU = torch.device("cpu")


folder = target_folder(num_hidden_layers=3, initializer_range=0.05)


def loss_of(target: Target, family: str) -> tuple[float, list[torch.Tensor]]:
    """The loss of a fresh head on a row, and the gradients of the head."""
    torch.manual_seed(0)
    counts = torch.ones(target.vocab_size, dtype=torch.long)
    head = new_head(family, trainable(family).config_class(), target, counts)
    ids = torch.arange(4, 34, dtype=torch.int32)
    batch = read_features(
        target, collate([[TokenSequence(ids, ids >= 8)]]), head.features_needed, "no"
    )
    torch.manual_seed(0)
    total, _ = LossModule(head, target, "no")(batch)
    total.backward()
    return total.item(), [p.grad for p in head.parameters() if p.grad is not None]


def test_a_head_learns_the_same_from_layers_on_disk(folder: Path, trainable_family: str) -> None:
    whole = load_target(TargetConfig(str(folder)), "no", 64, CPU)
    placed = load_target(TargetConfig(str(folder), placement=ON_DISK), "no", 64, CPU)
    loss, gradients = loss_of(whole, trainable_family)
    found_loss, found_gradients = loss_of(placed, trainable_family)
    assert found_loss == pytest.approx(loss, abs=1e-5)
    torch.testing.assert_close(found_gradients, gradients, atol=1e-5, rtol=1e-5)


def test_weights_have_one_fingerprint_wherever_they_are(folder: Path) -> None:
    whole = load_target(TargetConfig(str(folder)), "no", 64, CPU)
    placed = load_target(TargetConfig(str(folder), placement=ON_DISK), "no", 64, CPU)
    assert weights_fingerprint(placed) == weights_fingerprint(whole)


@pytest.mark.parametrize(
    ("placement", "processes", "words"),
    [
        ("auto", 2, "target.placement=auto is for one process.*there are 2: use fsdp"),
        ("fsdp", 1, "fsdp shares the target among processes, and this is one alone"),
    ],
)
def test_placements_that_do_not_fit_the_processes_are_refused(
    folder: Path, placement: str, processes: int, words: str
) -> None:
    config = TargetConfig(str(folder), placement=placement)
    with pytest.raises(UserError, match=words):
        load_target(config, "no", 64, CPU, processes)
