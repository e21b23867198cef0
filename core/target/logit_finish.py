"""The last step to logits: Cohere multiplies outputs of its output head, Gemma caps them.

Configurations state the numbers, and keys of one name are applied in several ways: Granite divides
by `logits_scaling`, HyperCLOVAX multiplies by it. One pass shows which way it is.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import cast

import torch
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from drafthead.core.errors import UserError, first_line

SAMPLED = 4  # tokens of the pass that shows how a model makes logits
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_mup_width_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
EXACT, ROUGH = 1e-4, 1e-2  # what a product in another order makes: float32, 16 bits
TINY = 1e-30  # logits may all be 0


@dataclass(frozen=True)
class Finish:
    """A factor, then a cap: c tanh(x / c)."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] from outputs [..., V] of the output head."""
        if self.scale != 1:
            outputs = outputs * self.scale
        if self.cap is not None:
            outputs = torch.tanh(outputs / self.cap) * self.cap
        return outputs


def possible(config: PretrainedConfig) -> Iterator[Finish]:
    """All that a configuration allows; first what most models do with such constants."""
    stated = [getattr(config, name, None) or 1.0 for name in SCALES]
    scale, divisor, multiplier, width = stated  # Cohere, Granite, Falcon H1, Inkling
    others = [factor for number in stated for factor in (number, 1 / number)]
    cap = next((cap for name in CAPS if (cap := getattr(config, name, None))), None)
    scales = dict.fromkeys([scale / divisor * multiplier / width, 1.0, *others])
    yield from (Finish(*both) for both in product(scales, dict.fromkeys([cap, None])))


def has_numbers(weight: torch.Tensor) -> bool:
    """Whether a weight [...] has values here: where only sizes are wanted, or on other devices too,
    it is a tensor of another class. Blocks of files count for none: their models are all known.
    """
    return not weight.is_meta and type(weight.data) is torch.Tensor and weight.is_floating_point()


def difference(found: torch.Tensor, logits: torch.Tensor) -> float:
    """The largest difference of logits [..., V], as a share of the largest logit.

    Numbers that are not finite show nothing.
    """
    differences, sizes = (found - logits).abs().float(), logits.abs().float()
    finite = differences.isfinite() & sizes.isfinite()
    if not finite.any():
        return 0.0
    return float(differences[finite].max() / sizes[finite].max().clamp_min(TINY))


def by_rounding(dtype: torch.dtype) -> float:
    """The most that rounding makes of `difference` in passes of a type."""
    return EXACT if dtype == torch.float32 else ROUGH


def sample_ids(model: PreTrainedModel) -> torch.Tensor:
    """Ids [1, T] of tokens that are likely to be text: neither the first ones nor the last."""
    count = cast(torch.Tensor, model.get_input_embeddings().weight).shape[0]
    ids = torch.arange(SAMPLED, device=model.device) + count // 3
    return (ids % count)[None]


def found_finish(
    model: PreTrainedModel,
    config: PretrainedConfig,  # of the text
    sample: Callable[[], tuple[torch.Tensor, torch.Tensor]],  # states [1, T, D], logits [1, T, V]
    project: Callable[[torch.Tensor], torch.Tensor],  # what the output head makes of states
) -> Finish:
    """The step from a model's output head to its logits, as one small pass shows it.

    Raises UserError when it is in no way that its configuration explains.
    """
    ways = list(possible(config))
    if not has_numbers(cast(torch.Tensor, model.get_input_embeddings().weight)):
        return ways[0]
    name = type(model).__name__
    try:
        hidden, logits = sample()
    except Exception as error:  # models raise many kinds
        reason = first_line(error)
        raise UserError(f"{name} cannot read {SAMPLED} tokens: {reason}") from error
    outputs = project(hidden)
    best = min(ways, key=lambda way: difference(way(outputs), logits))
    if difference(best(outputs), logits) <= by_rounding(model.dtype):
        return best
    raise UserError(
        f"{name} is not supported as a target: its logits are not what its output head makes "
        "of the last hidden state, whatever constants of its configuration scale and cap them"
    )
