"""Races EAGLE-3 against heads that begin as a layer of the target, and that read its keys.

`python benchmarks/jump.py --target MODEL --answers FILE` trains each head on the same rows of the
same answers, in the same order and number of steps, and prints the table of docs/results.md. The
heads are below and in no package: the race said that they do not pay.
"""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from drafthead.core.settings import settings
from drafthead.core.storage.files import write_text
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.features import Features, FeatureSpec
from drafthead.core.target.target import Target
from drafthead.heads.base import DraftHead, head_family, register_head
from drafthead.heads.families.recurrent.eagle3 import Eagle3Config, Eagle3Head, default_taps
from drafthead.heads.families.recurrent.head import (
    RecurrentConfig,
    RecurrentHead,
    Unrolled,
    anchors_by_row,
)
from drafthead.heads.layers.decoder_layer import DecoderLayer, RMSNorm, Rotation
from drafthead.heads.objectives.batch import HeadBatch, HeadLoss
from drafthead.heads.objectives.losses import depth_weights
from drafthead.infer.machine import describe_machine, describe_versions
from drafthead.train.data.packing import PackedData, RowOrder
from drafthead.train.data.training_rows import DataConfig, training_data
from drafthead.train.features.reading import read_features
from drafthead.train.learning.evaluation import Evaluation, measure, ranked_anchors
from drafthead.train.learning.ranks import RankedAnchors
from drafthead.train.learning.step import LossModule
from drafthead.train.optimizers import (
    OptimizerConfig,
    build_optimizers,
    lr_share,
    set_learning_rates,
)


def begin_like(layer: DecoderLayer, original: nn.Module) -> None:
    """Copy the weights of a target's layer, by their names; a wider input gets them at its end."""
    theirs = original.state_dict()
    for name, weight in layer.state_dict().items():
        if name not in theirs:
            continue
        found = theirs[name]
        if weight.ndim == 2 and weight.shape[1] > found.shape[1]:
            weight[:, : -found.shape[1]] *= 0.1  # what reads the embedding
        weight[..., -found.shape[-1] :].copy_(found)


@settings
class CopiedConfig(Eagle3Config):
    """EAGLE-3's, and the layer of the target that the head's layer begins as."""

    copied: int = -1


@register_head("eagle3_copied", CopiedConfig)
class CopiedEagle3Head(Eagle3Head):
    """EAGLE-3, whose layer begins as one of the target, and the mixing of taps as one tap."""

    @torch.no_grad()
    def initialize(self, target: Target) -> None:
        """Begin as the layer `copied` that reads the nearest tap below it."""
        super().initialize(target)
        number = self.config.copied % target.num_layers
        original = target.layers[number]
        begin_like(self.layers[0], original)
        self.layers[0].hidden_norm.weight.copy_(original.input_layernorm.weight)
        below = max(i for i, tap in enumerate(self.config.taps) if tap < number)
        size = self.config.hidden_size
        self.fc.weight.mul_(0.1)
        # Taps are normed, and the residual stream is not: it has this size on average.
        scale = SCALES[self.config.taps[below]].square().mean().sqrt()
        self.fc.weight[:, below * size : (below + 1) * size].copy_(scale * torch.eye(size))


# Mean sizes [D] of the channels after the target's layers, as `Rows` finds them.
SCALES: dict[int, torch.Tensor] = {}
MEANS: dict[int, torch.Tensor] = {}


@settings
class JumpConfig(RecurrentConfig):
    """Which layer of the target a jump head copies, and how it begins and is trained."""

    copied: int = -1
    sources: tuple[int, ...] = ()  # layers whose output is read; that of the copied one without any
    trained: bool = True  # the copy
    readout: bool = False  # a small network between the copy's output and the output head
    state_weight: float = 1.0  # of the normalised distance of predicted inputs
    draft_vocab_size: int = 0


@register_head("jump", JumpConfig)
class JumpHead(RecurrentHead):
    """A copy of a target's layer that attends to the target's own keys and values of that layer.

    A map predicts the input that the layer would get for a token, from that token's embedding and
    from the state at the token before it: the target's output of the layer, or the head's own.
    """

    embed_tokens = None

    def __init__(self, config: JumpConfig):
        super().__init__(config, config.draft_vocab_size)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.source_norm = nn.ModuleList(RMSNorm(size, eps=eps) for _ in config.sources)
        self.fc = nn.Linear(len(config.sources) * size, size, bias=False)
        self.state_norm, self.embed_norm = RMSNorm(size, eps=eps), RMSNorm(size, eps=eps)
        self.predictor = nn.Linear(2 * size, size, bias=False)
        self.gain, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.layers = nn.ModuleList([DecoderLayer(config).requires_grad_(config.trained)])
        self.readout = None
        if config.readout:
            self.readout = DecoderLayer(replace(config, intermediate_size=size)).mlp
            nn.init.zeros_(self.readout.down_proj.weight)
            self.readout_norm = RMSNorm(size, eps=eps)
        self.norm = RMSNorm(size, eps=eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size or config.vocab_size, bias=False)

    @classmethod
    def sized(cls, config: Any, target: Target) -> Any:
        """The configuration with the numbers of layers from 0."""
        copied = config.copied % target.num_layers
        sources = config.sources or (copied,)
        return replace(super().sized(config, target), copied=copied, sources=sources)

    @property
    def features_needed(self) -> FeatureSpec:
        return FeatureSpec((*self.config.sources, self.config.copied - 1), last=True)

    @torch.no_grad()
    def initialize(self, target: Target) -> None:
        weight = target.output_weight()
        rows = weight if self.draft_ids is None else weight[self.draft_ids]
        self.lm_head.weight.copy_(rows)
        if self.config.copied == target.num_layers - 1:
            self.norm.weight.copy_(target.final_norm_scale())
        else:
            lengths = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
            self.norm.weight.copy_(lengths.square().mean().rsqrt())
        begin_like(self.layers[0], target.layers[self.config.copied])
        self.gain.copy_(SCALES[self.config.copied - 1])
        self.bias.copy_(MEANS[self.config.copied - 1])
        self.predictor.weight.mul_(0.5)
        if len(self.config.sources) == 1:
            self.fc.weight.copy_(torch.eye(len(self.gain)))

    def encode(self, features: Features) -> torch.Tensor:
        taps = features.taps[: len(self.config.sources)]
        if len(taps) == 1:
            return taps[0]
        return self.fc(
            torch.cat([n(tap) for n, tap in zip(self.source_norm, taps, strict=True)], -1)
        )

    def predicted(self, embeds: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The inputs [..., D] of the layer."""
        read = torch.cat([self.embed_norm(embeds), self.state_norm(states)], dim=-1)
        return self.gain * self.predictor(read) + self.bias

    def layer_inputs(self, embeds: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = self.predicted(embeds, states)
        self.last_inputs = inputs
        return (inputs,)

    def logits(self, outputs: torch.Tensor, target: Target) -> torch.Tensor:
        if self.readout is not None:
            outputs = outputs + self.readout(self.readout_norm(outputs))
        return target.finish_logits(self.lm_head(self.norm(outputs)))

    def loss(self, batch: HeadBatch, target: Target) -> HeadLoss:
        """That of `RecurrentHead`, and the distance of the predicted inputs from the true ones."""
        config = self.config
        places, real = anchors_by_row(batch)
        anchors = real.nonzero(as_tuple=True)
        unrolled = UnrolledOnTarget(self, target, batch, places)
        steps = config.ttt_steps if self.training else self.depth
        weights = depth_weights(config.depth_decay, config.ttt_steps)
        outputs, distance = [], torch.zeros(())
        true = batch.features.taps[-1].float()
        length = true.shape[1]
        for k in range(steps):
            outputs.append(unrolled.next_outputs()[anchors])
            if k < config.ttt_steps:
                inputs = self.last_inputs[anchors].float()
                at = places[anchors] + 1 + k
                here = (at < length) & (
                    batch.segments[anchors[0], at.clamp_max(length - 1)]
                    == batch.segments[anchors[0], places[anchors]]
                )
                wanted = true[anchors[0], at.clamp_max(length - 1)]
                error = (inputs - wanted).square().mean(-1) / wanted.square().mean(-1).clamp_min(1e-6)
                distance = distance + weights[k] * error.where(here, 0).sum()
        weights += [0.0] * (self.depth - config.ttt_steps)
        found = self.loss_by_depth(batch, target, (anchors[0], places[anchors]), outputs, weights)
        return replace(found, total=found.total + config.state_weight * distance)


class UnrolledOnTarget(Unrolled):
    """A jump head's steps from many anchors at once, each on the target's keys up to its anchor."""

    def __init__(self, head: JumpHead, target: Target, batch: HeadBatch, places: torch.Tensor):
        super().__init__(head, target, batch, places)
        layer = target.layers[head.config.copied]
        inputs = batch.features.taps[-1].to(target.dtype)
        positions = torch.arange(inputs.shape[1])[None]
        attention, copy = layer.self_attn, head.layers[0].self_attn
        with torch.no_grad():
            normed = layer.input_layernorm(inputs)
            keys, values = copy._heads(attention.k_proj(normed)), copy._heads(
                attention.v_proj(normed)
            )
            cos, sin = head.rotary(positions)
            first, second = keys.float().chunk(2, dim=-1)
            keys = keys.float() * cos + torch.cat([-second, first], dim=-1) * sin
        narrow = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
        self.keys_values[0] = keys.to(narrow), values.to(narrow)

    def next_outputs(self) -> torch.Tensor:
        """Step k reads the token k + 1 places after the anchor, at that token's own position."""
        head, rows, places = self.head, self.rows, self.places
        if self.outputs is None:
            states = head.encode(self.batch.features)[rows, places]
        else:
            states = self.outputs
        positions = (places + 1 + self.done).clamp_max(self.batch.input_ids.shape[1] - 1)
        embeds = head.embed(self.batch.input_ids[rows, positions], self.target)
        own = torch.eye(places.shape[1], dtype=torch.bool).expand(len(rows), -1, -1)
        mask = torch.cat([self.seen[rows, places], *[own] * (self.done + 1)], dim=-1)
        rotation: Rotation = head.rotary(positions)
        self.outputs = head.run_layers(embeds, states, rotation, mask[:, None], self._keeping)
        self.done += 1
        return self.outputs


@dataclass
class Rows:
    """Packed rows with the target's states at all layers that any head reads."""

    data: PackedData
    batches: list[tuple[HeadBatch, dict[int, torch.Tensor]]]  # one row each

    @classmethod
    def read(cls, target: Target, data: PackedData, layers: tuple[int, ...], dtype: str) -> "Rows":
        """Run the target once over all rows."""
        spec, batches = FeatureSpec(layers, last=True), []
        for row in range(len(data.rows)):
            batch = read_features(target, data.batch([row]), spec, dtype)
            taps = {n: t.bfloat16() for n, t in zip(layers, batch.features.taps, strict=True)}
            last = batch.features.last.bfloat16()
            batches.append((replace(batch, features=Features(last)), taps))
        return cls(data, batches)

    def batch(self, rows: list[int], spec: FeatureSpec) -> HeadBatch:
        """The rows as one batch, padded, with what a head reads."""
        parts = [self.batches[row] for row in rows]
        longest = max(b.input_ids.shape[1] for b, _ in parts)

        def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
            out = tensors[0].new_zeros(len(tensors), longest, *tensors[0].shape[2:])
            for place, tensor in enumerate(tensors):
                out[place, : tensor.shape[1]] = tensor[0]
            return out

        taps = tuple(joined([t[n] for _, t in parts]) for n in spec.layers)
        return HeadBatch(
            joined([b.input_ids for b, _ in parts]),
            joined([b.segments for b, _ in parts]),
            joined([b.supervised for b, _ in parts]),
            Features(joined([b.features.last for b, _ in parts]), taps),
        )


@torch.no_grad()
def evaluation(module: LossModule, held_out: Rows, size: int) -> tuple[Evaluation, RankedAnchors]:
    """Measure a head on held-out rows."""
    module.eval()
    parts = []
    for first in range(0, len(held_out.batches), size):
        rows = list(range(first, min(first + size, len(held_out.batches))))
        batch = held_out.batch(rows, module.head.features_needed)
        _, loss = module(batch)
        parts.append(ranked_anchors(batch, loss.ranks, first_row=first))
    module.train()
    ranked = RankedAnchors.joined(parts)
    return measure(ranked), ranked


def trained(
    head: DraftHead,
    target: Target,
    train: Rows,
    held_out: Rows,
    steps: int,
    seed: int,
    o: Any,
    keep: Path,
) -> Iterator[dict[str, Any]]:
    """Train a head, measured after 1/4, 1/2 and all of the steps."""
    module = LossModule(head, target, o.precision)
    optimizers = build_optimizers(head.named_parameters(), o.optimizer)
    peaks = [each.param_groups[0]["lr"] for each in optimizers]
    order = RowOrder(len(train.batches), o.rows, seed)
    tokens, began = 0, time.process_time()
    seconds = 0.0
    for step in range(steps):
        began = time.process_time()
        set_learning_rates(optimizers, peaks, lr_share(o.optimizer, (step + 0.5) / steps))
        batch = train.batch(order.rows_of_step(step), head.features_needed)
        total, _ = module(batch)
        loss = total / batch.supervised.sum()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), o.optimizer.max_grad_norm)
        for each in optimizers:
            each.step()
            each.zero_grad()
        tokens += int(batch.supervised.sum())
        seconds += time.process_time() - began
        if step + 1 in (steps // 4, steps // 2, steps):
            found, ranked = evaluation(module, held_out, o.rows)
            torch.save((ranked.ranks, ranked.conversations, ranked.anchors), keep)
            yield {
                "step": step + 1,
                "tokens": tokens,
                "processor_seconds": round(seconds, 1),
                "loss": round(float(loss.detach()), 3),
                "tau_chain": round(found.tau_chain, 3),
                "tau_16": round(found.tau_tree[16], 3),
                "tau_tree": {k: round(v, 3) for k, v in found.tau_tree.items()},
                "top1": [round(v, 3) for v in found.top1],
            }


@dataclass
class Options:
    optimizer: OptimizerConfig
    rows: int
    precision: str


def variants(layers: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """The heads of the race by name: family and settings."""
    last, middle = layers - 1, default_taps(layers)[len(default_taps(layers)) // 2] + 1
    two_thirds = round(layers * 17 / 24) - 1  # economize's layer 17 of 24
    return {
        "eagle3": ("eagle3", {}),
        "eagle3, begins as the last layer": ("eagle3_copied", {"copied": last}),
        "eagle3, begins as the middle layer": ("eagle3_copied", {"copied": middle}),
        "jump, last layer": ("jump", {"copied": last}),
        "jump, last layer, three taps": (
            "jump",
            {"copied": last, "sources": default_taps(layers)},
        ),
        "jump, last layer, frozen": ("jump", {"copied": last, "trained": False}),
        "jump, last layer, no state loss": ("jump", {"copied": last, "state_weight": 0.0}),
        "jump, layer at two thirds": ("jump", {"copied": two_thirds, "readout": True}),
    }


def main(
    target: Annotated[str, typer.Option(help="Model.")],
    answers: Annotated[str, typer.Option(help="Its answers.")],
    held_out: Annotated[str, typer.Option(help="Others of its answers.")],
    output: Annotated[Path, typer.Option(help="JSON to add results to.")],
    heads: Annotated[list[str] | None, typer.Option(help="Names; all without any.")] = None,
    steps: int = 100,
    rows: int = 2,
    seed: int = 0,
    draft_vocab_size: int = 8192,
    max_length: int = 512,
    ttt_steps: int = 3,
    muon_lr: float = 0.05,
    lr: float = 5e-3,
    cache: Path = Path("/tmp/jump"),
) -> None:
    """Train all heads on the same and print what they learnt."""
    model = load_decoder_only(target, "auto")
    options = Options(
        OptimizerConfig(name="muon", lr=lr, muon_lr=muon_lr, schedule="linear"), rows, "bf16"
    )
    n = model.num_layers
    layers = sorted(
        {
            *default_taps(n),
            *(
                layer + d
                for _, c in variants(n).values()
                if "copied" in c
                for layer in [c["copied"]]
                for d in (0, -1)
            ),
        }
    )
    data = DataConfig(train=answers, validation=held_out, max_length=max_length)
    train_rows, held_rows = training_data(data, model.tokenizer, 0, model.vocab_size)
    needed = min(steps * rows, len(train_rows.rows))
    file = cache / f"{Path(answers).stem}-{n}-{max_length}.pt"
    if file.exists():
        train, held = torch.load(file, weights_only=False)
    else:
        began = time.process_time()
        train = Rows.read(model, train_rows, tuple(layers), "bf16")
        held = Rows.read(model, held_rows, tuple(layers), "bf16")
        torch.save((train, held), file)
        print("features", time.process_time() - began, "s", flush=True)
    print(len(train.batches), "rows", needed, "needed", len(held.batches), "held out", flush=True)
    for layer in layers:
        states = torch.cat([t[layer][0].float() for _, t in train.batches[:8]])
        SCALES[layer] = states.std(0)
        MEANS[layer] = states.mean(0)
    counts = train_rows.sequences.token_counts(model.vocab_size)
    for name in heads or variants(n):
        family, given = variants(n)[name]
        torch.manual_seed(seed)
        cls = head_family(family)
        config = cls.config_class(
            ttt_steps=ttt_steps, draft_vocab_size=draft_vocab_size, **given
        )
        head = cls(cls.sized(config, model))
        head.prepare(counts)
        head.initialize(model)
        keep = cache / f"ranks-{Path(target).stem}-{name}-{seed}-{steps}.pt".replace(" ", "_")
        size = sum(p.numel() for p in head.parameters())
        for result in trained(head, model, train, held, steps, seed, options, keep):
            line = {"target": target, "head": name, "seed": seed, "parameters": size,
                    "muon_lr": muon_lr, **result}
            print(json.dumps(line), flush=True)
            with output.open("a") as out:
                out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    typer.run(main)
