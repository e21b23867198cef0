"""DSpark as DeepSpec stores it: DFlash with a correction by the token before, and a confidence.

Every slot of a block drafts, including the root's. Layer ids are those of `formats.dflash`, with -1
for the embeddings. The file holds copies of the target's embeddings and output head.
"""

from pathlib import Path

import torch

from drafthead.heads.base import DraftHead
from drafthead.heads.formats.base import (
    Foreign,
    Probe,
    TargetFacts,
    WritableFormat,
    all_tensors,
    register_format,
    wanted,
    write_config,
    write_tensors,
)
from drafthead.heads.formats.block_parallel import (
    IdKeys,
    Seen,
    block_keys,
    correction_keys,
    refuse_unlike,
    replayed,
    their_tensors,
)
from drafthead.heads.formats.dflash import (
    BIDIRECTIONAL,
    block_with_ids,
    described,
    num_layers_known,
    num_layers_of_target,
    their_ids,
)
from drafthead.heads.formats.files import Checkpoint, read_json
from drafthead.heads.formats.layers import with_output_bias
from drafthead.heads.target.target import Target


@register_format
class DSpark(WritableFormat):
    """DeepSpec's files."""

    name = "dspark"
    families = ("parallel",)
    readers = "deepseek-ai/DeepSpec"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """A block transformer with copies of the target's weights."""
        parts = {"fc.weight", "hidden_norm.weight", "embed_tokens.weight", "lm_head.weight"}
        return (
            parts <= set(checkpoint.tensors)
            and "layers.0.self_attn.q_norm.weight" in checkpoint.tensors
            and "speculators_model_type" not in checkpoint.config
        )

    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        """The head, with copies to be compared with the target's weights."""
        keys = block_keys(checkpoint, IdKeys)
        num_layers = num_layers_of_target(checkpoint, keys, target)
        ids = keys.target_layer_ids or []
        return block_with_ids(checkpoint, keys, ids, num_layers, True, target.vocab_size)

    def write(
        self, head: DraftHead, facts: TargetFacts, target: Target | None, folder: Path
    ) -> None:
        """Write the head and copies of weights of the target, which is required."""
        config, num_layers = head.config, num_layers_known(self.name, facts)
        plain = {**BIDIRECTIONAL, "root_predicts": (True,), "draft_vocab_size": (0,)}
        refuse_unlike(self.name, config, plain)
        owner = wanted(target, self.name, "copies of the target's embeddings and output head")
        ids = their_ids(self.name, config.taps, num_layers, lowest=-1)
        tensors = with_output_bias(their_tensors(head.state_dict()))
        dtype = tensors["fc.weight"].dtype
        tensors["embed_tokens.weight"] = owner.input_weight().to(dtype)
        tensors["lm_head.weight"] = owner.output_weight().detach().to(dtype)
        write_tensors(folder, tensors)
        content = {
            "architectures": ["Qwen3DSparkModel"],
            **described(config, num_layers),
            **correction_keys(config),
            "mask_token_id": config.mask_token,
            "target_layer_ids": ids,
        }
        write_config(folder, {**content, "base_model_name_or_path": facts.name})

    def replay(self, folder: Path, probe: Probe) -> torch.Tensor:
        """Logits [K, V] of one pass over the block, each slot corrected by the token before it."""
        config, tensors = read_json(folder / "config.json"), all_tensors(folder)
        return replayed(config, config, tensors, probe, config["mask_token_id"], True, Seen())
