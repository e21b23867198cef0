"""Training of the small demo language models: examples, batches, loss, and a resumable run."""

import json
import logging
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import LlamaForCausalLM

from drafthead.train.optimizers import (
    OptimizerConfig,
    build_optimizers,
    lr_share,
    set_learning_rates,
)

logger = logging.getLogger(__name__)

LEARN, UNLEARN, IGNORE = 1, -1, 0


@dataclass(frozen=True)
class Example:
    """Token ids of a conversation and what to do with each: LEARN, UNLEARN or IGNORE it."""

    ids: list[int]
    signs: list[int]


@dataclass(frozen=True)
class Recipe:
    """How long and how fast one run trains."""

    epochs: float
    optimizer: OptimizerConfig
    seed: int = 0
    batch_tokens: int = 6144


@dataclass
class Batches:
    """Example indices of every batch of a run, in order; they depend on the recipe alone."""

    examples: list[Example]
    recipe: Recipe
    steps: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = list(self._steps())

    def _steps(self) -> Iterator[list[int]]:
        epochs = self.recipe.epochs
        for epoch in range(int(epochs) + 1):
            batches = batches_of_epoch(
                self.examples, self.recipe.batch_tokens, self.recipe.seed, epoch
            )
            yield from batches[: round(min(1.0, epochs - epoch) * len(batches))]


def batches_of_epoch(
    examples: list[Example], batch_tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """Example indices of each batch: similar lengths, at most `batch_tokens` after padding."""
    generator = random.Random(f"{seed}-{epoch}")
    order = sorted(
        range(len(examples)), key=lambda i: (len(examples[i].ids) // 8, generator.random())
    )
    batches: list[list[int]] = []
    for index in order:
        length = len(examples[index].ids)
        if not batches or length * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    generator.shuffle(batches)
    return batches


def pad_batch(examples: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids [B, T] and signs [B, T], 0 and IGNORE on padding.

    No attention mask is needed: the padding is on the right, where a causal model never looks.
    """
    longest = max(len(example.ids) for example in examples)
    ids = [example.ids + [0] * (longest - len(example.ids)) for example in examples]
    signs = [example.signs + [IGNORE] * (longest - len(example.ids)) for example in examples]
    return torch.tensor(ids), torch.tensor(signs)


def token_loss(
    model: LlamaForCausalLM, ids: torch.Tensor, signs: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Summed loss in nats over the tokens of ids [B, T] that signs [B, T] marks, and their number.

    -log p of a token to learn, -log(1 - p) of one to unlearn (unlikelihood training, Welleck et
    al., 2020, arXiv 1908.04319).
    """
    device = next(model.parameters()).device
    ids, signs = ids.to(device), signs.to(device)[:, 1:]
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    surprise = cross_entropy(
        logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    ).view_as(signs)  # -log p
    learn = surprise[signs == LEARN].sum()
    # 1 - p, at least 1e-4: a certain token would have an infinite loss.
    unlearn = -torch.log((-torch.expm1(-surprise[signs == UNLEARN])).clamp_min(1e-4)).sum()
    return learn + unlearn, int((signs != IGNORE).sum())


class TrainingRun:
    """One training run; its whole state is in one file, so that it resumes exactly."""

    def __init__(
        self,
        name: str,
        model: LlamaForCausalLM,
        examples: list[Example],
        recipe: Recipe,
        work: Path,
    ):
        """`name` names the checkpoint and the log in `work`."""
        self.name, self.model, self.examples, self.recipe = name, model, examples, recipe
        self.batches = Batches(examples, recipe).steps
        self.optimizers = build_optimizers(model.named_parameters(), recipe.optimizer)
        self.peaks = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        self.step = 0
        self.tokens = 0
        self.checkpoint = work / f"{name}.pt"
        self.log = work / f"{name}_log.jsonl"

    def train_step(self) -> float:
        """One optimiser step; returns the batch's loss in nats per token."""
        share = lr_share(self.recipe.optimizer, (self.step + 0.5) / len(self.batches))
        set_learning_rates(self.optimizers, self.peaks, share)
        examples = [self.examples[i] for i in self.batches[self.step]]
        loss, count = token_loss(self.model, *pad_batch(examples))
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optimizer.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.tokens += count
        return loss.item() / count

    def save(self) -> None:
        """Write the whole state under a temporary name, then rename it."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "tokens": self.tokens,
        }
        temporary = self.checkpoint.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self.checkpoint)

    def resume(self) -> None:
        """Continue from the last checkpoint, if there is one."""
        if not self.checkpoint.exists():
            return
        device = next(self.model.parameters()).device
        state = torch.load(self.checkpoint, map_location=device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for owned, saved in zip(self.optimizers, state["optimizers"], strict=True):
            owned.load_state_dict(saved)
        self.step, self.tokens = state["step"], state["tokens"]
        logger.info("%s: resumed at step %d of %d", self.name, self.step, len(self.batches))

    def train(self, save_every: int) -> None:
        """Train to the end of the schedule, saving and logging on the way."""
        self.resume()
        bar = tqdm(total=len(self.batches), initial=self.step, desc=self.name, mininterval=10)
        while self.step < len(self.batches):
            started, before = time.perf_counter(), self.tokens
            loss = self.train_step()
            seconds = time.perf_counter() - started
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            if self.step % save_every == 0 or self.step == len(self.batches):
                self.save()
            with self.log.open("a") as log:
                speed = round((self.tokens - before) / seconds)
                log.write(json.dumps({"step": self.step, "loss": loss, "tokens_s": speed}) + "\n")
        bar.close()


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, examples: list[Example]) -> float:
    """Mean loss in nats per marked token."""
    model.eval()
    total, tokens = 0.0, 0
    for batch in batches_of_epoch(examples, 8192, seed=0, epoch=0):
        chosen = [examples[i] for i in batch]
        loss, count = token_loss(model, *pad_batch(chosen))
        total, tokens = total + loss.item(), tokens + count
    model.train()
    return total / tokens
