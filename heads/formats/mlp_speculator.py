"""IBM's MLP speculator (Wertheimer et al., 2024), which fms-extras writes and reads."""

import math
from typing import Annotated, Any, ClassVar

import torch
from torch.nn.functional import gelu, rms_norm

from drafthead.core.errors import UserError
from drafthead.heads.families.sequential.mlp_speculator import NORM_EPS, MlpSpeculatorConfig
from drafthead.heads.formats.base import (
    PICKLE,
    WEIGHTS,
    Export,
    Foreign,
    Probe,
    TargetFacts,
    Tensors,
    WritableFormat,
    Written,
    refuse_others,
    register_format,
)
from drafthead.heads.formats.checkpoint import Checkpoint
from drafthead.heads.formats.keys import (
    WRITTEN,
    Count,
    Keys,
    Parts,
    Reasons,
    Size,
    Vocabulary,
    only,
)

PREFIX = "speculator."
# Our modules and their names in the file.
PARTS = {"embeddings": "emb", "projections": "proj", "norms": "ln", "outputs": "head"}


def stored_name(part: str, step: int, kind: str) -> str:
    """A tensor's name in the file."""
    return f"{PREFIX}{PARTS[part]}.{step}.{kind}"


class MlpKeys(Keys):
    """The keys of fms-extras and vLLM."""

    neutral: ClassVar[Reasons] = {
        **WRITTEN,
        "shown by the tensors": "model_type",
        "how its readers draft": "n_candidates top_k_tokens_per_head",
    }
    method: Annotated[str, only("sum_rnn", why="our heads are the MLP, not the LSTM")] = "sum_rnn"
    n_predict: Parts | None = None
    tie_weights: bool = False
    scale_input: bool = False
    emb_dim: Size | None = None
    inner_dim: Count | None = None
    vocab_size: Vocabulary | None = None


@register_format
class MlpSpeculatorFormat(WritableFormat):
    """`speculator.*` tensors; the number of steps is part of the arithmetic."""

    name = "mlp"
    families = ("mlp_speculator",)
    readers = "vLLM up to 0.32, text-generation-inference, fms-extras"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return all(stored_name(p, 0, "weight") in checkpoint.tensors for p in PARTS)

    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        """The steps; tied ones must be equal if the file holds all of them."""
        keys = checkpoint.keys(MlpKeys)
        inner, hidden = checkpoint.shape(stored_name("projections", 0, "weight"), 2)
        vocab = checkpoint.shape(stored_name("outputs", 0, "weight"), 2)[0]
        config = MlpSpeculatorConfig(
            num_heads=number_of_steps(checkpoint, keys),
            inner_size=inner,
            tie_weights=keys.tie_weights,
            scale_input=keys.scale_input,
            hidden_size=hidden,
            vocab_size=vocab,
        )
        table, tensors = renamed(config), dict[str, torch.Tensor]()
        for theirs, ours in table.items():
            if ours not in tensors:
                tensors[ours] = checkpoint.load(theirs)
        refuse_different(checkpoint, table)
        refuse_others(checkpoint, table)
        keys.check(emb_dim=hidden, vocab_size=vocab)
        if keys.inner_dim:  # 0 is the hidden size
            keys.check(inner_dim=inner)
        return Foreign("mlp_speculator", config, tensors, TargetFacts(None, hidden, vocab))

    def written(self, export: Export) -> Written:
        """Every step's tensors, tied ones as often as there are steps."""
        config, tensors = export.config, export.tensors
        stored = {theirs: tensors[ours] for theirs, ours in renamed(config).items()}
        described = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": config.vocab_size,
            "emb_dim": config.hidden_size,
            "inner_dim": config.inner_size,
            "n_predict": config.num_heads,
            "n_candidates": 5,
            "top_k_tokens_per_head": [max(1, 5 - step) for step in range(config.num_heads)],
            "tie_weights": config.tie_weights,
            "scale_input": config.scale_input,
            "torch_dtype": export.dtype_name,
        }
        # safetensors cannot hold one tensor under several names.
        return Written(stored, described, PICKLE if config.tie_weights else WEIGHTS)

    def replayed(self, config: dict[str, Any], tensors: Tensors, probe: Probe) -> torch.Tensor:
        """Logits [K, V]: state <- GELU(norm(W state + scale x embedding(token))), then a head."""
        steps, inner = config["n_predict"], config["inner_dim"]
        # As fms-extras joins state and embedding: the sum keeps the state's variance, half of which
        # is still the first state's after all steps.
        state_weight = 0.5 ** (0.5 / steps)
        scale = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight
        state, rows = probe.states[-1], []
        if config["scale_input"]:
            state = rms_norm(state, state.shape, eps=NORM_EPS) / math.sqrt(2)
        for step, token in enumerate(probe.before[:steps].tolist()):
            step_of = {part: f"{PREFIX}{name}.{step}" for part, name in PARTS.items()}
            embedding = tensors[step_of["embeddings"] + ".weight"][token]
            state = tensors[step_of["projections"] + ".weight"] @ state + scale * embedding
            normed = rms_norm(state, state.shape, tensors[step_of["norms"] + ".weight"], NORM_EPS)
            state = gelu(normed + tensors[step_of["norms"] + ".bias"])
            rows.append(tensors[step_of["outputs"] + ".weight"] @ state)
        return torch.stack(rows)


def number_of_steps(checkpoint: Checkpoint, keys: MlpKeys) -> int:
    """The number of steps in the file; of tied steps, which may be stored once, in the config."""
    names = checkpoint.tensors
    steps = 1
    while steps < len(names) and stored_name("outputs", steps, "weight") in names:
        steps += 1
    claimed = keys.n_predict or steps
    once = steps == 1 and keys.tie_weights
    if claimed != steps and not once:
        raise UserError(
            f"{checkpoint.weights} holds {steps} steps, but n_predict is {claimed}, on which the "
            "weight of every token depends"
        )
    return claimed


def own_steps(config: MlpSpeculatorConfig, part: str) -> int:
    """Return how many different modules of a part there are."""
    if not config.tie_weights:
        return config.num_heads
    # The first tied projection is separate: the width of its input is the target's.
    return min(config.num_heads, 2) if part == "projections" else 1


def renamed(config: MlpSpeculatorConfig) -> dict[str, str]:
    """Our names of the file's tensors by theirs, where tied steps stand once for each step."""
    return {
        stored_name(part, step, kind): f"{part}.{min(step, own_steps(config, part) - 1)}.{kind}"
        for part in PARTS
        for kind in (("weight", "bias") if part == "norms" else ("weight",))
        for step in range(config.num_heads)
    }


def refuse_different(checkpoint: Checkpoint, table: dict[str, str]) -> None:
    """Raise UserError when tied steps differ, or when only some of them are there."""
    steps: dict[str, list[str]] = {}
    for theirs, ours in table.items():
        steps.setdefault(ours, []).append(theirs)
    for ours, (first, *names) in steps.items():
        stored = [name for name in names if name in checkpoint.tensors]
        if len(stored) not in (0, len(names)):
            part = ours.partition(".")[0]
            raise UserError(f"{checkpoint.weights} holds {len(stored)} of {len(names)} tied {part}")
        for name in stored:
            if not checkpoint.same(name, first):
                raise UserError(f"{checkpoint.weights}: tie_weights is true, but {name} differs")
