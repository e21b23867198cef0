"""The memory of one optimiser step, part by part, by a step without numbers."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from drafthead.lab.planning.dry_run import Ledger
from drafthead.lab.planning.dry_setup import DrySetup
from drafthead.train.features.reading import read_features
from drafthead.train.learning.step import LossModule
from drafthead.train.optimizers import build_optimizers

TARGET, HEAD, GRADIENTS = "target: weights", "head: weights", "head: gradients"
OPTIMISER, AVERAGE = "optimiser: state", "average of weights (ema)"
FEATURES, ACTIVATIONS = "target's features", "activations for the backward pass"
CASTS, LOGITS = "weights in bfloat16", "logits of the loss"
PASS, BACKWARD, UPDATE = "target's pass", "backward pass", "optimiser's step"
PARTS = (
    *(TARGET, HEAD, GRADIENTS, OPTIMISER, AVERAGE),
    *(FEATURES, ACTIVATIONS, CASTS, LOGITS, PASS, BACKWARD, UPDATE),
)


@dataclass(frozen=True)
class StepMemory:
    """The bytes of a step: what is held throughout, and what is there at each phase's peak."""

    held: dict[str, int]  # weights, gradients of a whole step, optimiser's state, average
    phases: dict[str, Counter[str]]  # phase -> part -> bytes at the phase's peak
    optimizers: list[torch.optim.Optimizer]
    average: nn.Module | None

    @property
    def peak_phase(self) -> str:
        """The phase that needs the most."""
        return max(self.phases, key=lambda phase: self.phases[phase].total())

    @property
    def peak(self) -> Counter[str]:
        """The parts at the peak of the step, by bytes."""
        return self.phases[self.peak_phase]

    def most_of(self, part: str) -> int:
        """The most bytes of a part at the peak of any phase."""
        return max(self.held.get(part, 0), *(peak[part] for peak in self.phases.values()))


class Names:
    """Names each new tensor of a step, by the phase and by its shape."""

    def __init__(self, setup: DrySetup):
        self.phase = OPTIMISER
        target, head = setup.target, setup.head
        weights = [*head.parameters(), *target.output_head.parameters()]
        self.weights = {tuple(w.shape) for w in weights} | {tuple(w.shape[::-1]) for w in weights}
        self.gradients = {tuple(w.shape) for w in head.parameters()}
        self.vocabularies = {target.vocab_size, getattr(head, "num_guesses", target.vocab_size)}

    def __call__(self, tensor: torch.Tensor) -> str:
        """The part that a tensor [...] belongs to."""
        shape = tuple(tensor.shape)
        if self.phase not in (ACTIVATIONS, BACKWARD):
            return self.phase
        if self.phase == BACKWARD and shape in self.gradients:
            return GRADIENTS
        if len(shape) > 1 and shape in self.weights:
            return CASTS
        return LOGITS if len(shape) > 1 and shape[-1] in self.vocabularies else self.phase


class DryStep:
    """A step without numbers, phase by phase."""

    def __init__(self, setup: DrySetup):
        self.setup, self.names = setup, Names(setup)
        self.ledger = setup.dry.ledger = Ledger(self.names)
        self.phases: dict[str, Counter[str]] = {}
        for part, module in ((TARGET, setup.target.model), (HEAD, setup.head)):
            for tensor in (*module.parameters(), *module.buffers()):
                self.ledger.add(tensor, part)

    def run(self, num_processes: int = 1) -> StepMemory:
        """The memory of a process's step, whatever engine shares the run."""
        config, head = self.setup.config, self.setup.head
        with self.setup.dry:
            optimizers = build_optimizers(head.named_parameters(), config.optimizer)
            for weight in trained(head):
                weight.grad = torch.zeros_like(weight)
            update(optimizers)  # they make their states in the first step
            self.names.phase = AVERAGE
            average = None
            if config.train.ema is not None:
                average = type(head)(head.config)  # in float32, as `WeightAverage` keeps it
            held = dict(self.ledger.live)
            held[GRADIENTS] = sum(w.numel() * w.element_size() for w in trained(head))
            for _ in range(min(2, config.train.accumulation(num_processes))):
                self._micro_batch()
            self._begin(UPDATE)
            nn.utils.clip_grad_norm_(head.parameters(), config.optimizer.max_grad_norm)
            update(optimizers)
            self._end(UPDATE)
        return StepMemory(held, self.phases, optimizers, average)

    def _micro_batch(self) -> None:
        config, target, head = self.setup.config, self.setup.target, self.setup.head
        precision = config.train.mixed_precision
        self._begin(PASS)
        batch = read_features(target, self.setup.tokens, head.features_needed, precision)
        self._end(PASS)
        last = batch.features.last
        for hidden in (*batch.features.taps, *([] if last is None else [last])):
            self.ledger.rename(hidden, FEATURES)
        self._begin(ACTIVATIONS)
        total, _ = LossModule(head, target, precision)(batch)
        self._end(ACTIVATIONS)
        self._begin(BACKWARD)
        total.backward()
        self._end(BACKWARD)

    def _begin(self, phase: str) -> None:
        self.names.phase = phase
        self.ledger.begin_peak()

    def _end(self, phase: str) -> None:
        """Note the peak of a phase, the larger one where it was there before."""
        before = self.phases.get(phase, Counter())
        self.phases[phase] = max(before, self.ledger.at_peak, key=Counter.total)


def trained(head: nn.Module) -> list[nn.Parameter]:
    """The weights that are trained."""
    return [weight for weight in head.parameters() if weight.requires_grad]


def update(optimizers: list[torch.optim.Optimizer]) -> None:
    """A step of each optimiser, after which there are no gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
