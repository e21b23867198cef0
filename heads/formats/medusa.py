"""Medusa's formats (Cai et al., 2024): heads alone, heads in a whole model, and vLLM's names.

The number of heads is counted, because published configurations state another. The official code
applies one block several times and stores it as several equal blocks; ours has several blocks,
which computes the same.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from torch.nn.functional import silu

from drafthead.core.errors import UserError
from drafthead.heads.families.medusa.head import MedusaConfig
from drafthead.heads.formats.base import (
    Export,
    Foreign,
    Format,
    Probe,
    TargetFacts,
    Tensors,
    WritableFormat,
    Written,
    base_name,
    refuse_others,
    register_format,
)
from drafthead.heads.formats.checkpoint import Checkpoint
from drafthead.heads.formats.keys import (
    Count,
    Keys,
    Parts,
    Reasons,
    Size,
    TargetLayers,
    Vocabulary,
    only,
)

MERGED = "medusa_head."


class Names:
    """A format's names of the tensors of Medusa heads."""

    def __init__(self, block: str, output: str, prefix: str = ""):
        """Patterns with {i} for the head, {j} for the block and {n} for the number of blocks."""
        self.block, self.output, self.prefix = block, output, prefix

    def weight(self, head: int, block: int) -> str:
        """The matrix of a block."""
        return self.prefix + self.block.format(i=head, j=block) + ".weight"

    def bias(self, head: int, block: int) -> str:
        """The bias of a block."""
        return self.prefix + self.block.format(i=head, j=block) + ".bias"

    def projection(self, head: int, num_blocks: int) -> str:
        """The projection of a head to the vocabulary."""
        return self.prefix + self.output.format(i=head, n=num_blocks) + ".weight"

    def count(self, names: Iterable[str]) -> tuple[int, int]:
        """The numbers of heads and of blocks among the names, 0 and 0 when there are none."""
        pattern = re.escape(self.weight(0, 0)).replace("0", r"(\d{1,3})")
        found = [match for name in names if (match := re.fullmatch(pattern, name))]
        heads = {int(match[1]) for match in found}
        blocks = {int(match[2]) for match in found}
        return len(heads), len(blocks)


OFFICIAL = Names("{i}.{j}.linear", "{i}.{n}")
IN_MODEL = Names("{i}.{j}.linear", "{i}.{n}", MERGED)
VLLM = Names("blocks.{i}.layers.{j}", "lm_heads.{i}")
VLLM_PREFIXED = Names("blocks.{i}.layers.{j}", "lm_heads.{i}", "medusa_heads.")


class MedusaKeys(Keys):
    """Sizes that a configuration may state; published ones miscount the heads."""

    neutral: ClassVar[Reasons] = {
        "shown by the tensors": "medusa_num_layers version medusa_fc_bias model_type",
        "how vLLM drafts": "max_paths topk max_seq_len",
    }
    hidden_size: Size | None = None
    vocab_size: Vocabulary | None = None
    medusa_num_heads: Count | None = None
    num_heads: Count | None = None


class VllmKeys(MedusaKeys):
    """vLLM's keys."""

    num_hidden_layers: Parts | None = None  # blocks of a head
    truncated_vocab_size: Vocabulary | None = None
    logit_scale: Annotated[float, only(1, why="our heads do not scale logits")] = 1.0
    original_lm_head: bool = False


class MergedModelKeys(Keys):
    """Of a whole model."""

    neutral: ClassVar[Reasons] = {
        "of the target, which is loaded with its own class": "(?!medusa).*"
    }
    num_hidden_layers: TargetLayers | None = None


def read_heads(checkpoint: Checkpoint, names: Names, shared_output: str | None = None) -> Foreign:
    """Medusa heads under the given names; without projections they use the target's output head.

    `shared_output` is the name of a copy of the target's output head in the file.
    """
    num_heads, num_blocks = names.count(checkpoint.tensors)
    if num_heads * num_blocks > len(checkpoint.tensors):
        raise UserError(f"{checkpoint.weights} lacks blocks of some of its {num_heads} heads")
    own = shared_output is None and names.projection(0, num_blocks) in checkpoint.tensors
    hidden = checkpoint.shape(names.weight(0, 0), 2)[0]
    output = names.projection(0, num_blocks) if own else shared_output
    vocab = checkpoint.shape(output, 2)[0] if output else 0
    config = MedusaConfig(
        num_heads=num_heads,
        num_blocks=num_blocks,
        output="own" if own else "shared",
        bias=names.bias(0, 0) in checkpoint.tensors,
        hidden_size=hidden,
        vocab_size=vocab,
    )
    keys = checkpoint.keys(MedusaKeys)
    keys.check(hidden_size=hidden, **({"vocab_size": vocab} if vocab else {}))
    theirs = renamed(config, names)
    refuse_others(checkpoint, [*theirs.values(), shared_output or ""], names.prefix)
    return Foreign(
        "medusa",
        config,
        {name: checkpoint.load(other) for name, other in theirs.items()},
        TargetFacts(base_name(checkpoint), hidden, vocab or None),
        needs_target=""
        if own
        else "how large the vocabulary is (it uses the target's output head)",
        notes=miscounted(keys, num_heads),
    )


def renamed(config: MedusaConfig, names: Names) -> dict[str, str]:
    """A format's names of the tensors of our head, by our names."""
    found = {}
    for head in range(config.num_heads):
        for block in range(config.num_blocks):
            found[f"branches.{head}.blocks.{block}.weight"] = names.weight(head, block)
            if config.bias:
                found[f"branches.{head}.blocks.{block}.bias"] = names.bias(head, block)
        if config.output == "own":
            found[f"branches.{head}.output.weight"] = names.projection(head, config.num_blocks)
    return found


def miscounted(keys: MedusaKeys, num_heads: int) -> tuple[str, ...]:
    """A note when the configuration states another number of heads than there are."""
    for key in ("medusa_num_heads", "num_heads"):
        claimed = getattr(keys, key)
        if claimed not in (None, num_heads):
            return (f"{key} says {claimed}, but there are {num_heads} heads, which were all read",)
    return ()


def heads_replayed(tensors: Tensors, names: Names, probe: Probe) -> torch.Tensor:
    """Medusa's logits [K, V], computed from stored tensors."""
    num_heads, num_blocks = names.count(tensors)
    rows = []
    for head in range(num_heads):
        state = probe.states[-1]
        for block in range(num_blocks):
            bias = tensors.get(names.bias(head, block), torch.zeros(()))
            state = state + silu(tensors[names.weight(head, block)] @ state + bias)
        projection = tensors.get(names.projection(head, num_blocks))
        rows.append(probe.target.project(state) if projection is None else projection @ state)
    return torch.stack(rows)


@register_format
class Medusa(WritableFormat):
    """`medusa_lm_head.pt` of the official code, or `.safetensors` without projections (v2)."""

    name = "medusa"
    families = ("medusa",)
    readers = "Medusa (v1), text-generation-inference (v2)"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return OFFICIAL.count(checkpoint.tensors)[0] > 0

    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        return read_heads(checkpoint, OFFICIAL)

    def written(self, export: Export) -> Written:
        """Heads with their own projections as v1, with the target's output head as v2.

        Raises UserError for blocks that differ: the reader applies one block again and again.
        """
        config, tensors = export.config, export.tensors
        self.refuse_different_blocks(config, tensors)
        stored = {theirs: tensors[ours] for ours, theirs in renamed(config, OFFICIAL).items()}
        for index in range(0 if config.bias else config.num_heads):  # the reader's blocks have one
            for block in range(config.num_blocks):
                weight = stored[OFFICIAL.weight(index, block)]
                stored[OFFICIAL.bias(index, block)] = weight.new_zeros(weight.shape[0])
        shared = config.output == "shared"
        described = {
            "base_model_name_or_path": export.facts.name,
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_blocks,
            **({"version": "2"} if shared else {}),
        }
        return Written(stored, described, f"medusa_lm_head.{'safetensors' if shared else 'pt'}")

    def refuse_different_blocks(self, config: MedusaConfig, tensors: Tensors) -> None:
        """Raise UserError for a head whose blocks have different weights [D, D] or biases [D]."""
        for head in range(config.num_heads):
            for kind in ("weight", "bias") if config.bias else ("weight",):
                blocks = range(config.num_blocks)
                found = [tensors[f"branches.{head}.blocks.{block}.{kind}"] for block in blocks]
                if not all(torch.equal(found[0], other) for other in found):
                    raise self.cannot_express(
                        f"head.num_blocks {config.num_blocks} with blocks that differ: its reader "
                        "applies one block again and again (vllm-medusa can)"
                    )

    def replayed(self, config: dict[str, Any], tensors: Tensors, probe: Probe) -> torch.Tensor:
        """Logits [K, V]: residual blocks, then the head's own projection or the target's."""
        return heads_replayed(tensors, OFFICIAL, probe)


@register_format
class MergedMedusa(Format):
    """A whole model with `medusa_head.*` in it, as Medusa-2 publishes it; only read."""

    name = "medusa-merged"
    families = ("medusa",)
    readers = "Medusa 1.0"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return IN_MODEL.count(checkpoint.tensors)[0] > 0

    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        """The heads; the other weights are the target's, which is loaded separately."""
        foreign = read_heads(checkpoint, IN_MODEL)
        names = {"embedding": "embed_tokens.weight", "output": "lm_head.weight"}
        layers = checkpoint.keys(MergedModelKeys).num_hidden_layers
        return replace(
            foreign,
            target=replace(foreign.target, name=str(checkpoint.path), num_layers=layers),
            copies=checkpoint.present(names),
            notes=(
                *foreign.notes,
                "the target's weights in it are ignored: pass it as --target too",
            ),
        )


@register_format
class VllmMedusa(WritableFormat):
    """vLLM's names, which only vLLM reads, up to 0.32; it drafts chains only."""

    name = "vllm-medusa"
    families = ("medusa",)
    readers = "vLLM up to 0.32"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return any(names.count(checkpoint.tensors)[0] for names in (VLLM, VLLM_PREFIXED))

    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        """All heads; a projection that all share is the target's output head."""
        names = VLLM if VLLM.count(checkpoint.tensors)[0] else VLLM_PREFIXED
        if names.prefix + "token_map" in checkpoint.tensors:
            raise UserError(f"{checkpoint.weights} has a token_map: heads here know every token")
        keys = checkpoint.keys(VllmKeys)
        num_heads, num_layers = names.count(checkpoint.tensors)
        keys.check(num_heads=num_heads, num_hidden_layers=num_layers)
        keys.check(truncated_vocab_size=keys.vocab_size)
        if not keys.original_lm_head:
            return read_heads(checkpoint, names)
        name = names.projection(0, 0)
        foreign = read_heads(checkpoint, names, shared_output=name)
        return replace(foreign, copies={"output": checkpoint.load(name)}, needs_target="")

    def written(self, export: Export) -> Written:
        """Any Medusa head of ours; a shared output head is written once."""
        config, tensors = export.config, export.tensors
        stored = {theirs: tensors[ours] for ours, theirs in renamed(config, VLLM).items()}
        shared = config.output == "shared"
        if shared:
            target = self.needed_target(export, "the output head that the heads share")
            stored[VLLM.projection(0, 0)] = export.copied(target.output_weight())
        described = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "truncated_vocab_size": config.vocab_size,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_blocks,
            "medusa_fc_bias": config.bias,
            "original_lm_head": shared,
            "max_paths": 64,
            "topk": 10,
            "torch_dtype": export.dtype_name,
        }
        return Written(stored, described)

    def replayed(self, config: dict[str, Any], tensors: Tensors, probe: Probe) -> torch.Tensor:
        """Logits [K, V] as Medusa's; a single projection is used by all heads."""
        for head in range(VLLM.count(tensors)[0]):
            tensors.setdefault(VLLM.projection(head, 0), tensors[VLLM.projection(0, 0)])
        return heads_replayed(tensors, VLLM, probe)
