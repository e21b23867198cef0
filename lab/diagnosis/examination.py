"""One reading of answers, for facts about a head, its target and the answers themselves."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tqdm import tqdm
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.target.features import Features, FeatureSpec
from drafthead.heads.base import DraftHead
from drafthead.heads.formats import build_head, read_foreign
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.objectives.anchors import anchor_positions
from drafthead.heads.objectives.batch import HeadBatch
from drafthead.infer import Target
from drafthead.train.data.conversations import Conversation, read_conversations
from drafthead.train.data.fitted_rows import Reading
from drafthead.train.data.left_out import LeftOut
from drafthead.train.data.packing import collate, pack_sequences
from drafthead.train.data.sequences import TokenTable
from drafthead.train.data.token_table import token_table
from drafthead.train.features.reading import read_features
from drafthead.train.learning.evaluation import Evaluation, measure, ranked_anchors, read_ranks
from drafthead.train.learning.ranks import Ranked, RankedAnchors
from drafthead.train.learning.step import LossModule

SHIFTS = (-1, 0, 1)  # of the taps, in layers
ROW = 1024  # tokens of given answers; longer conversations are cut


def read_answers(reading: Reading, target: Target) -> TokenTable:
    """Conversations as tokens, cut where they do not fit the target.

    Raises UserError for data that cannot be read or has no answers.
    """
    assert target.tokenizer is not None  # a target read from disk has one
    longest = min(reading.max_length, target.max_length or reading.max_length)
    fitting = replace(reading, max_length=longest, vocab_size=target.vocab_size)
    return token_table(fitting, target.tokenizer)


@dataclass(frozen=True)
class Patient:
    """A head, its target, and answers that it was not trained on."""

    target: Target
    target_name: str
    head: DraftHead
    provenance: dict[str, Any]  # of the head: settings, data and evaluation of its training
    conversations: list[Conversation]
    answers: TokenTable  # of the conversations

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        assert self.target.tokenizer is not None  # a target read from disk has one
        return self.target.tokenizer


@dataclass(frozen=True)
class Authorship:
    """A target's view of the tokens of answers. Shares of 1 are of its own greedy answers."""

    tokens: int
    first: float  # share of the tokens that it finds most probable
    largest: float  # mean of its largest probability: that share, of answers that it sampled


@dataclass(frozen=True)
class Examination:
    """Everything that the checks look at."""

    patient: Patient
    evaluation: Evaluation
    shifted: dict[int, Evaluation]  # with taps one layer lower and higher, where that can be
    authorship: Authorship


def patient_of(model: Target, name: str, head: Path, reading: Reading) -> Patient:
    """Load what is examined; raises UserError for what cannot be read."""
    _, foreign = read_foreign(head, TargetFacts.of(model))
    built = build_head(foreign, head, model).to(model.device, model.dtype)
    answers = read_answers(reading, model)  # says what is left out
    conversations = [
        replace(one, template_arguments={**reading.template_arguments, **one.template_arguments})
        for one in read_conversations(
            reading.source, reading.prompt_column, reading.limit, LeftOut(reading.strict)
        )
    ]
    return Patient(model, name, built, foreign.provenance, conversations, answers)


@torch.no_grad()
def examine(patient: Patient) -> Examination:
    """Read each answer once, with the taps of the head and those beside them."""
    target, head = patient.target, patient.head.eval()
    needed = head.features_needed
    specs = {shift: shifted(needed, shift, target) for shift in SHIFTS}
    possible = {shift: spec for shift, spec in specs.items() if spec is not None}
    layers = sorted({layer for spec in possible.values() for layer in spec.layers})
    ranked: dict[int, list[RankedAnchors]] = {shift: [] for shift in possible}
    seen: list[torch.Tensor] = []
    answers = tqdm(patient.answers, desc="reading answers", unit="answer")
    for number, sequence in enumerate(answers):
        batch = read_features(target, collate([[sequence]]), FeatureSpec(tuple(layers), True), "no")
        for shift, spec in possible.items():
            part = replace(batch, features=selected(batch.features, layers, spec))
            ranks = head.loss(part, target).ranks
            ranked[shift].append(ranked_anchors(part, ranks, first_row=number))
        seen.append(judged(batch, target))
    found = {shift: measure(RankedAnchors.joined(parts)) for shift, parts in ranked.items()}
    first, largest = torch.cat(seen, dim=1).double().mean(dim=1).tolist()
    tokens = sum(part.shape[1] for part in seen)
    return Examination(patient, found.pop(0), found, Authorship(tokens, first, largest))


def shifted(spec: FeatureSpec, shift: int, target: Target) -> FeatureSpec | None:
    """The features with taps `shift` layers higher; None where there are none to shift so far."""
    layers = tuple(layer + shift for layer in spec.layers)
    if shift and not (layers and -1 <= min(layers) <= max(layers) <= target.num_layers):
        return None
    return replace(spec, layers=layers)


def selected(features: Features, layers: list[int], spec: FeatureSpec) -> Features:
    """The features of `spec`, from features whose taps are of the given layers."""
    taps = tuple(features.taps[layers.index(layer)] for layer in spec.layers)
    return Features(features.last if spec.last else None, taps)


def judged(batch: HeadBatch, target: Target) -> torch.Tensor:
    """Of the A supervised tokens [2, A]: whether each is the target's first choice, and the
    probability of that choice.
    """
    rows, places = anchor_positions(batch)
    assert batch.features.last is not None
    probs = target.project(batch.features.last[rows, places]).float().softmax(-1)
    largest, choice = probs.max(dim=-1)
    return torch.stack([(choice == batch.input_ids[rows, places + 1]).float(), largest]).cpu()


def ranked_answers(
    head: DraftHead, target: Target, tables: dict[str, TokenTable]
) -> dict[str, Ranked]:
    """Return what a head guesses along the answers of each source."""
    accelerator = Accelerator(cpu=target.device.type == "cpu", mixed_precision="no")
    module = LossModule(head, target, "no")  # in the number type that decoding has
    found: dict[str, Ranked] = {}
    for source, table in tables.items():
        packed = pack_sequences(table, int(table.lengths.max()), seed=0)
        with tqdm(total=len(packed.rows), desc=source, unit="row", leave=False) as bar:
            ranks = read_ranks(accelerator, module, head, target, packed, 1, bar.update)
        found[source] = Ranked(ranks, packed)
    return found
