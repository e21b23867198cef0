"""Races EAGLE-3 against heads that begin as a layer of the target, or read its keys and values.

`python benchmarks/jump.py --output benchmarks/jump.json` prints what they learnt as tables. With
`--target MODEL --answers FILE --held-out FILE` it trains each head on the same rows in the same
order first, and adds that. The heads are here and in no family, because they did not pay.
"""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from recorded import about_run
from torch import nn
from torch.nn.functional import pad

from drafthead.core.settings import settings
from drafthead.core.storage.files import write_json
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.features import Features, FeatureSpec
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Path as TreePath
from drafthead.heads.base import DraftHead, head_family, register_head
from drafthead.heads.families.recurrent.eagle3 import Eagle3Config, Eagle3Head, default_taps
from drafthead.heads.families.recurrent.head import (
    RecurrentConfig,
    RecurrentHead,
    Unrolled,
    anchors_by_row,
)
from drafthead.heads.growing.static import grow_tree
from drafthead.heads.layers.decoder_layer import DecoderLayer, GatedMlp, RMSNorm, rotated
from drafthead.heads.objectives.anchors import labels_at
from drafthead.heads.objectives.batch import HeadBatch, HeadLoss
from drafthead.heads.objectives.losses import depth_weights
from drafthead.train.data.packing import PackedData, RowOrder
from drafthead.train.data.training_rows import DataConfig, training_data
from drafthead.train.features.reading import read_features
from drafthead.train.learning.evaluation import measure, ranked_anchors
from drafthead.train.learning.ranks import (
    RankedAnchors,
    accepted_in,
    roots_of_steps,
)
from drafthead.train.learning.step import LossModule
from drafthead.train.optimizers import (
    OptimizerConfig,
    build_optimizers,
    lr_share,
    set_learning_rates,
)

BASE = "EAGLE-3"  # what the others are compared with
NODES = 16
CONTEXT = 8000  # tokens, of which the bytes of a head's cache are stated
RESAMPLES = 2000

# Sizes and means [D] of the channels after each layer of the target that a head predicts.
Channels = dict[int, tuple[torch.Tensor, torch.Tensor]]
channels: Channels = {}


@torch.no_grad()
def begin_like(layer: DecoderLayer, original: nn.Module) -> None:
    """Copy a target's layer by its names; what of a layer is wider gets the copy at its end."""
    theirs = original.state_dict()
    for name, weight in layer.state_dict().items():
        if name in theirs:
            width = theirs[name].shape[-1]
            weight[..., :-width] *= 0.1  # reads the embedding, and is random
            weight[..., -width:] = theirs[name]


@settings
class CopiedConfig(Eagle3Config):
    """EAGLE-3's configuration, and the layer of the target as which the head's layer begins."""

    copied: int = -1


@register_head("eagle3_copied", CopiedConfig)
class CopiedEagle3Head(Eagle3Head):
    """EAGLE-3 whose layer begins as one of the target, and its mixture of taps as one tap."""

    @torch.no_grad()
    def initialize(self, target: Target) -> None:
        """Begin as layer `copied`, which reads the next tap below it."""
        super().initialize(target)
        taps, size, copied = self.config.taps, self.config.hidden_size, self.config.copied
        original: Any = target.layers[copied]  # type: ignore[index]
        first: Any = self.layers[0]
        begin_like(first, original)
        first.hidden_norm.weight.copy_(original.input_layernorm.weight)
        below = max(place for place, tap in enumerate(taps) if tap < copied)
        # Taps are normed; what the layer adds to is not, and has this size.
        scale = channels[taps[below]][0].square().mean().sqrt()
        self.fc.weight *= 0.1
        self.fc.weight[:, below * size : (below + 1) * size] = scale * torch.eye(size)


@settings
class JumpConfig(RecurrentConfig):
    """The layer of the target that a jump head copies, and how it begins and learns."""

    copied: int = -1
    sources: tuple[int, ...] = ()  # layers whose output is read
    copy_rate: float = 1.0  # of the copy's learning rates to the others
    readout: bool = False  # a gated MLP between the copy and the output head
    state_weight: float = 1.0  # of the distance of the predicted inputs from the true ones
    draft_vocab_size: int = 0


@register_head("jump", JumpConfig)
class JumpHead(RecurrentHead):
    """A copy of a layer of the target that attends to the target's own keys and values there.

    After economize 0.3.2 (Apache-2.0). From a token's embedding and the state of the token before
    it, the target's or the head's own, a linear map predicts the input of the layer.
    """

    embed_tokens = None

    def __init__(self, config: JumpConfig):
        super().__init__(config, config.draft_vocab_size)
        size, eps, taps = config.hidden_size, config.rms_norm_eps, len(config.sources)
        self.tap_norms = nn.ModuleList(RMSNorm(size, eps=eps) for _ in range(taps))
        self.fc = nn.Linear(taps * size, size, bias=False) if taps > 1 else None
        self.embed_norm, self.state_norm = RMSNorm(size, eps=eps), RMSNorm(size, eps=eps)
        self.predictor = nn.Linear(2 * size, size, bias=False)
        self.gain, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.layers = nn.ModuleList([DecoderLayer(config)])
        self.readout = None
        if config.readout:
            narrow = GatedMlp(replace(config, intermediate_size=size))
            self.readout = nn.Sequential(RMSNorm(size, eps=eps), narrow)
            nn.init.zeros_(narrow.down_proj.weight)
        self.norm = RMSNorm(size, eps=eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size or config.vocab_size, bias=False)
        self.inputs: torch.Tensor | None = None  # of the layer, as predicted last

    @property
    def features_needed(self) -> FeatureSpec:
        """The sources, and the inputs of the copied layer."""
        return FeatureSpec((*self.config.sources, self.config.copied - 1), last=True)

    @torch.no_grad()
    def initialize(self, target: Target) -> None:
        weight = target.output_weight()
        rows = weight if self.draft_ids is None else weight[self.draft_ids]
        self.lm_head.weight.copy_(rows)
        self.norm.weight.copy_(
            torch.linalg.vector_norm(rows.float(), dim=-1).square().mean().rsqrt()
        )
        if self.config.copied == target.num_layers - 1:
            self.norm.weight.copy_(target.final_norm_scale())
        begin_like(self.layers[0], target.layers[self.config.copied])  # type: ignore
        sizes, means = channels[self.config.copied - 1]
        self.gain.copy_(sizes)
        self.bias.copy_(means)
        self.predictor.weight *= 0.5

    def encode(self, features: Features) -> torch.Tensor:
        taps = features.taps[:-1]
        if self.fc is None:
            return taps[0]
        return self.fc(torch.cat([n(t) for n, t in zip(self.tap_norms, taps, strict=True)], -1))

    def layer_inputs(self, embeds: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        read = torch.cat([self.embed_norm(embeds), self.state_norm(states)], dim=-1)
        self.inputs = self.gain * self.predictor(read) + self.bias
        return (self.inputs,)

    def logits(self, outputs: torch.Tensor, target: Target) -> torch.Tensor:
        if self.readout is not None:
            outputs = outputs + self.readout(outputs)
        return target.finish_logits(self.lm_head(self.norm(outputs)))

    def loss(self, batch: HeadBatch, target: Target) -> HeadLoss:
        """The loss of recurrent heads, and the normalised distance of the predicted inputs."""
        config = self.config
        places, real = anchors_by_row(batch)
        anchors = real.nonzero(as_tuple=True)
        rows, at = anchors[0], places[anchors]
        unrolled = UnrolledOnTarget(self, target, batch, places)
        weights = depth_weights(config.depth_decay, config.ttt_steps)
        weights += [0.0] * (self.depth - config.ttt_steps)
        outputs, distance, last = [], torch.zeros(()), batch.input_ids.shape[1] - 1
        for k in range(config.ttt_steps if self.training else self.depth):
            outputs.append(unrolled.next_outputs()[anchors])
            assert self.inputs is not None
            here, _ = labels_at(batch, rows, at, offset=k + 1)
            true = batch.features.taps[-1][rows, (at + k + 1).clamp_max(last)].float()
            error = (self.inputs[anchors].float() - true).square().mean(-1)
            error = error / true.square().mean(-1).clamp_min(1e-6)
            distance = distance + weights[k] * error.where(here, 0).sum()
        found = self.loss_by_depth(batch, target, (rows, at), outputs, weights)
        return replace(found, total=found.total + config.state_weight * distance)


class UnrolledOnTarget(Unrolled):
    """A jump head's steps from many anchors at once, each after the target's keys to its anchor."""

    head: JumpHead

    def __init__(self, head: JumpHead, target: Target, batch: HeadBatch, places: torch.Tensor):
        """`places` [B, A] are the anchors."""
        super().__init__(head, target, batch, places)
        layer: Any = target.layers[head.config.copied]  # type: ignore[index]
        read = batch.features.taps[-1].to(target.dtype)
        with torch.no_grad():
            normed = layer.input_layernorm(read)
            keys, values = (
                part(normed).unflatten(-1, (-1, head.config.head_dim)).transpose(1, 2)
                for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)
            )
            keys = rotated(keys, head.rotary(torch.arange(read.shape[1])[None]))
        self.keys_values[0] = keys, values

    def next_outputs(self) -> torch.Tensor:
        """Step k reads the token k + 1 places after the anchor, at that token's position."""
        head, rows, places = self.head, self.rows, self.places
        states = self.outputs
        if states is None:
            states = head.encode(self.batch.features)[rows, places]
        positions = (places + 1 + self.done).clamp_max(self.batch.input_ids.shape[1] - 1)
        embeds = head.embed(self.batch.input_ids[rows, positions], self.target)
        self.done += 1
        own = torch.eye(places.shape[1], dtype=torch.bool).expand(len(rows), -1, -1)
        mask = torch.cat([self.seen[rows, places], *[own] * self.done], dim=-1)
        self.outputs = head.run_layers(
            embeds, states, head.rotary(positions), mask[:, None], self._keeping
        )
        return self.outputs


def racers(target: Target) -> dict[str, tuple[str, dict[str, Any]]]:
    """The heads by name: family, and settings of its own."""
    count, taps = target.num_layers, default_taps(target.num_layers)
    last, middle = count - 1, taps[len(taps) // 2] + 1
    inner = round(count * 17 / 24) - 1  # where economize copies a layer of Qwen2.5-0.5B
    slowly = {"copied": inner, "readout": True, "copy_rate": 0.1}
    return {
        BASE: ("eagle3", {}),
        "EAGLE-3, begins as the last layer": ("eagle3_copied", {"copied": last}),
        "EAGLE-3, begins as a middle layer": ("eagle3_copied", {"copied": middle}),
        "jump, last layer": ("jump", {"copied": last, "sources": (last,)}),
        "jump, last layer, EAGLE-3's taps": ("jump", {"copied": last, "sources": taps}),
        "jump, last layer, no loss of states": (
            "jump",
            {"copied": last, "sources": (last,), "state_weight": 0.0},
        ),
        "jump, last layer, EAGLE-3's taps, slow copy": (
            "jump",
            {"copied": last, "sources": taps, "copy_rate": 0.1},
        ),
        "jump, inner layer, slow copy": ("jump", {"sources": (inner,), **slowly}),
        "jump, inner layer, EAGLE-3's taps, slow copy": ("jump", {"sources": taps, **slowly}),
    }


@dataclass
class Rows:
    """Packed rows with the states that any head reads, in memory."""

    batches: list[tuple[HeadBatch, dict[int, torch.Tensor]]]  # of one row, and taps by layer

    @classmethod
    def read(cls, target: Target, data: PackedData, spec: FeatureSpec, limit: int) -> "Rows":
        """Run the target once over the first rows."""
        batches = []
        for row in range(min(limit, len(data.rows))):
            batch = read_features(target, data.batch([row]), spec, "bf16")
            taps = dict(zip(spec.layers, batch.features.taps, strict=True))
            batches.append((replace(batch, features=Features(batch.features.last)), taps))
        return cls(batches)

    def batch(self, rows: Sequence[int], spec: FeatureSpec) -> HeadBatch:
        """Some rows, padded to the longest, with what a head reads."""
        parts = [self.batches[row] for row in rows]
        longest = max(batch.input_ids.shape[1] for batch, _ in parts)

        def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
            """Tensors [1, T, ...] as one [B, T, ...]."""
            sizes = [(0, 0) * (t.dim() - 2) + (0, longest - t.shape[1]) for t in tensors]
            return torch.cat([pad(t, size) for t, size in zip(tensors, sizes, strict=True)])

        last = [batch.features.last for batch, _ in parts]
        return HeadBatch(
            *(
                joined([getattr(batch, name) for batch, _ in parts])
                for name in ("input_ids", "segments", "supervised")
            ),
            Features(
                joined([state for state in last if state is not None]),
                tuple(joined([taps[layer] for _, taps in parts]) for layer in spec.layers),
            ),
        )


@dataclass
class Recipe:
    """How all heads of a race are trained."""

    steps: int
    rows: int  # of a step
    ttt_steps: int
    draft_vocab_size: int
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


def optimizers_of(
    head: DraftHead, config: OptimizerConfig
) -> tuple[list[torch.optim.Optimizer], list[float]]:
    """The optimisers of a head and their peak rates; the copied layer may have smaller ones."""
    rate = getattr(head.config, "copy_rate", 1.0)
    both: tuple[list[torch.optim.Optimizer], list[float]] = [], []
    for share, is_copy in ((1.0, False), (rate, True)):
        named = [(n, p) for n, p in head.named_parameters() if n.startswith("layers.") == is_copy]
        for each in build_optimizers(named, config):
            both[0].append(each)
            both[1].append(share * each.param_groups[0]["lr"])
    return both


def trained(
    module: LossModule, train: Rows, held_out: Rows, recipe: Recipe, seed: int
) -> Iterator[tuple[dict[str, Any], RankedAnchors]]:
    """Train a head; what it knows after half and all of the steps."""
    head = module.head
    optimizers, peaks = optimizers_of(head, recipe.optimizer)
    order, tokens, seconds = RowOrder(len(train.batches), recipe.rows, seed), 0, 0.0
    for step in range(1, recipe.steps + 1):
        began = time.process_time()
        share = lr_share(recipe.optimizer, (step - 0.5) / recipe.steps)
        set_learning_rates(optimizers, peaks, share)
        batch = train.batch(order.rows_of_step(step - 1), head.features_needed)
        total, _ = module(batch)
        (total / batch.num_supervised()).backward()
        nn.utils.clip_grad_norm_(head.parameters(), recipe.optimizer.max_grad_norm)
        for each in optimizers:
            each.step()
            each.zero_grad()
        seconds += time.process_time() - began
        tokens += int(batch.num_supervised())
        if step in (recipe.steps // 2, recipe.steps):
            ranked = ranks_on(module, held_out, recipe.rows)
            yield {"step": step, "tokens": tokens, "processor_seconds": round(seconds, 1)}, ranked


@torch.no_grad()
def ranks_on(module: LossModule, held_out: Rows, size: int) -> RankedAnchors:
    """The ranks of the true tokens on held-out rows."""
    module.eval()
    parts = []
    for first in range(0, len(held_out.batches), size):
        rows = range(first, min(first + size, len(held_out.batches)))
        batch = held_out.batch(rows, module.head.features_needed)
        parts.append(ranked_anchors(batch, module(batch)[1].ranks, first_row=first))
    module.train()
    return RankedAnchors.joined(parts)


def passes_of(ranked: RankedAnchors, tree: set[TreePath]) -> torch.Tensor:
    """Tokens and passes [R, 2] of each of R answers, decoded with a tree; as `tau` counts them."""
    counts = []
    for answer in dict.fromkeys(ranked.conversations):
        part = ranked.part(lambda key, answer=answer: key == answer)  # type: ignore[misc]
        accepted = [accepted_in(tree, tuple(row)) for row in part.ranks.tolist()]
        steps = roots_of_steps(part.conversations, part.anchors, accepted)
        last = len(part.anchors) - 1  # no step begins at an answer's last token
        counts.append((last, sum(step != last for step in steps)))
    return torch.tensor(counts, dtype=torch.double)


def judged(ranked: RankedAnchors, base: RankedAnchors | None) -> dict[str, Any]:
    """Tau, and with a `base` the 95 % interval of the ratio to its tau, over resampled answers."""
    found = measure(ranked)
    row: dict[str, Any] = {
        "tau_chain": round(found.tau_chain, 3),
        "tau_16": round(found.tau_tree[NODES], 3),
        "top1": [round(share, 3) for share in found.top1],
    }
    if base is None:
        return row
    counts = []
    for each in (ranked, base):
        tree = {(), *grow_tree(measure(each).path_counts, NODES).paths}
        counts.append(passes_of(each, tree))
    number = len(counts[0])
    drawn = torch.randint(number, (RESAMPLES, number), generator=torch.Generator().manual_seed(0))
    mine, theirs = (part[drawn].sum(1) for part in counts)
    ratios = (mine[:, 0] / mine[:, 1]) / (theirs[:, 0] / theirs[:, 1])
    ends = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.double))
    return row | {"ratio_16": [round(float(end), 3) for end in ends]}


@torch.no_grad()
def level_milliseconds(head: RecurrentHead, target: Target, calls: int = 100) -> float:
    """The processor time of one drafted node after 256 others: layer and output, not compiled."""
    config = head.config
    cached = torch.randn(1, config.num_key_value_heads, 256, config.head_dim).to(target.dtype)
    narrow, times = head.to(target.dtype).eval(), []
    state = torch.randn(1, 1, config.hidden_size).to(target.dtype)
    token, mask = torch.tensor([[5]]), torch.ones(1, 1, 1, 257, dtype=torch.bool)
    for _ in range(calls):
        began = time.process_time()
        inputs = narrow.draft_inputs(token, state, target)
        rotation = narrow.rotary(torch.tensor([[256]]))
        output = narrow.run_layers(
            *inputs,
            rotation,
            mask,
            lambda _: lambda *new: tuple(torch.cat([cached, part], dim=2) for part in new),
        )
        narrow.logits(output, target).topk(10)
        times.append(time.process_time() - began)
    return round(1000 * statistics.median(times), 3)


def costs(head: RecurrentHead, target: Target) -> dict[str, Any]:
    """What a level reads and takes, and the bytes of the head's own cache."""
    only_once = ("fc", "tap_norms", "fc_norm")
    read = sum(p.numel() for n, p in head.named_parameters() if not n.startswith(only_once))
    config, of_its_own = head.config, not isinstance(head, JumpHead)
    column = 2 * config.num_key_value_heads * config.head_dim * target.dtype.itemsize
    return {
        "weights_of_a_level": read,
        "milliseconds_of_a_level": level_milliseconds(head, target),
        "cache_bytes": CONTEXT * column * of_its_own,
    }


def race(
    target: Target, data: tuple[PackedData, PackedData], recipe: Recipe, names: list[str], seed: int
) -> Iterator[dict[str, Any]]:
    """A row of the table for each head, after half and all of the steps."""
    heads = racers(target)
    copied = {c["copied"] + d for _, c in heads.values() if "copied" in c for d in (0, -1)}
    spec = FeatureSpec(tuple(sorted(copied | {*default_taps(target.num_layers)})), last=True)
    train = Rows.read(target, data[0], spec, recipe.steps * recipe.rows)
    held_out = Rows.read(target, data[1], spec, len(data[1].rows))
    for layer in spec.layers:
        states = torch.cat([taps[layer][0] for _, taps in train.batches[:8]]).float()
        channels[layer] = states.std(0), states.mean(0)
    base: dict[int, RankedAnchors] = {}  # by step
    for name in names or heads:
        torch.manual_seed(seed)
        family, given = heads[name]
        shared = {"ttt_steps": recipe.ttt_steps, "draft_vocab_size": recipe.draft_vocab_size}
        cls = head_family(family)
        head: Any = cls(cls.sized(cls.config_class(**shared, **given), target))
        head.prepare(data[0].sequences.token_counts(target.vocab_size))
        head.initialize(target)
        size = sum(p.numel() for p in head.parameters())
        for place, ranked in trained(
            LossModule(head, target, "bf16"), train, held_out, recipe, seed
        ):
            if name == BASE:
                base[place["step"]] = ranked
            found = judged(ranked, None if name == BASE else base.get(place["step"]))
            row = {"head": name, "seed": seed, "parameters": size, **place, **found}
            if place["step"] == recipe.steps:
                row |= costs(head, target)
            yield row


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows of a race, as Markdown."""
    yield "| head | tokens | seconds | chain | 16 nodes | of EAGLE-3's, 95 % | ms a level | MB |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        low, high = row.get("ratio_16", ("-", "-"))
        cache = row.get("cache_bytes")
        cells = [
            f"{row['head']}, seed {row['seed']}",
            f"{row['tokens']:,}",
            row["processor_seconds"],
            row["tau_chain"],
            row["tau_16"],
            "-" if low == "-" else f"{low} to {high}",
            row.get("milliseconds_of_a_level", "-"),
            "-" if cache is None else f"{cache / 1e6:.1f}",
        ]
        yield f"| {' | '.join(map(str, cells))} |"


def main(
    output: Annotated[Path, typer.Option(help="JSON file to add to, and to print.")],
    target: Annotated[str | None, typer.Option(help="Model; none: print only.")] = None,
    answers: Annotated[str, typer.Option(help="Answers of the model.")] = "",
    held_out: Annotated[str, typer.Option(help="Others, to measure on.")] = "",
    heads: Annotated[list[str] | None, typer.Option(help="Names of heads; all without.")] = None,
    steps: int = 60,
    rows: int = 2,
    seed: int = 0,
    max_length: int = 512,
    ttt_steps: int = 3,
    draft_vocab_size: int = 8192,
    muon_lr: float = 0.05,
) -> None:
    """Train all heads on the same rows and print what they learnt."""
    races = json.loads(output.read_text()) if output.exists() else []
    if target is not None:
        model = load_decoder_only(target, "auto")
        assert model.tokenizer is not None
        data = DataConfig(train=answers, validation=held_out, max_length=max_length)
        train, measured = training_data(data, model.tokenizer, 0, model.vocab_size)
        assert measured is not None
        optimizer = OptimizerConfig(name="muon", lr=5e-3, muon_lr=muon_lr, schedule="linear")
        recipe = Recipe(steps, rows, ttt_steps, draft_vocab_size, optimizer)
        races.append({"target": target, **about_run(), "rows": []})
        for row in race(model, (train, measured), recipe, heads or [], seed):
            races[-1]["rows"].append(row)
            print(json.dumps(row), flush=True)
            write_json(output, races)
    for each in races:
        print(f"\n{each['target']}\n", *table(each["rows"]), sep="\n")


if __name__ == "__main__":
    typer.run(main)
