"""Rotary positions as a GGUF file has them, in keys and in tensors of factors."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from drafthead.core.target.gguf_account import head_width
from drafthead.core.target.gguf_header import GgufFile, Tensor

Numbers = NDArray[np.float64]
Rope = dict[str, Any]

FACTORS = "rope_freqs.weight"  # what each frequency is divided by: of Llama 3.1 to 3.3
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
FACTOR_TENSORS = (FACTORS, LONG, SHORT)
# Of Llama 3: the bounds of the wavelengths between which factors grow, where nothing tells them.
LOW, HIGH = 1.0, 4.0
# Settings of YaRN that transformers lacks, with what leaves it as it is; -1 means that too.
YARN_NEUTRAL = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}
PLAIN = ("rope_theta", "partial_rotary_factor")  # of every kind of scaling
EXACT = 1e-5  # relative difference of factors that were stored in float32


def apply_rope(file: GgufFile, config: PreTrainedConfig) -> None:
    """Write the file's rotary positions into a configuration.

    Raises UserError, naming the key or tensor, for what the model's class cannot express.
    """
    before = getattr(config, "rope_parameters", None)
    if before is None:
        return  # keys of positions that such a model does not have are refused with all others
    by_kind = before if "full_attention" in before else None
    plain = dict(by_kind["full_attention"] if by_kind else before)
    plain = {"rope_type": "default", **{n: plain[n] for n in PLAIN if n in plain}}
    plain["rope_theta"] = float(file.of_model("rope.freq_base", 10000.0))
    apply_width(file, config, plain)
    found = with_factors(file, config, scaled(file, config, plain))
    original = found.get("original_max_position_embeddings")
    if original and hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = original  # it goes first, in Phi 3
    if by_kind:
        theta = float(file.of_model("rope.freq_base_swa", 10000.0))
        sliding = {**plain, "rope_theta": theta}
        found = {"full_attention": found, "sliding_attention": sliding}
    config.rope_parameters = found


def apply_width(file: GgufFile, config: PreTrainedConfig, rope: Rope) -> None:
    """Set how many numbers of a head are rotated: all, where the file does not say."""
    width = head_width(config)
    rotated = file.of_model("rope.dimension_count", width)
    if "partial_rotary_factor" in rope:
        rope["partial_rotary_factor"] = rotated / width
    elif rotated != width:
        raise file.refusal(
            f"{file.architecture}.rope.dimension_count",
            f"but {type(config).__name__} rotates all {width} numbers of a head",
        )


def scaled(file: GgufFile, config: PreTrainedConfig, rope: Rope) -> Rope:
    """The rope with the scaling of the file's keys."""
    key = f"{file.architecture}.rope.scaling.type"
    factor = float(file.of_model("rope.scaling.factor", file.of_model("rope.scale_linear", 1.0)))
    factor = factor or 1.0  # 0 is none
    kind = file.of_model("rope.scaling.type", "none" if factor == 1 else "linear")
    original = int(file.of_model("rope.scaling.original_context_length", 0))
    original = original or config.max_position_embeddings
    by = float(file.of_model("rope.scaling.attn_factor", 1.0))
    file.of_model("rope.scaling.finetuned")  # how the model was trained, which it now is
    if by != 1 and kind not in ("yarn", "longrope"):
        raise file.refusal(f"{file.architecture}.rope.scaling.attn_factor", f"with {kind} scaling")
    if kind == "none" or (kind == "linear" and factor == 1):
        return rope
    if kind == "linear":
        return {**rope, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {**rope, **yarn(file, factor, original, by)}
    if kind == "longrope":
        return {
            **rope, "rope_type": "longrope", "original_max_position_embeddings": original,
            "factor": config.max_position_embeddings / original,
            **({} if by == 1 else {"attention_factor": by}),
        }  # fmt: skip
    raise file.refusal(key, "a scaling that is not known here")


def yarn(file: GgufFile, factor: float, original: int, by: float) -> Rope:
    """YaRN (arXiv 2309.00071); `by` multiplies what it scales attention by."""
    for name, neutral in YARN_NEUTRAL.items():
        if file.of_model(f"rope.scaling.{name}", neutral) not in (neutral, -1.0):
            raise file.refusal(f"{file.architecture}.rope.scaling.{name}", f"and not {neutral:g}")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": float(file.of_model("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": float(file.of_model("rope.scaling.yarn_beta_slow", 1.0)),
        "attention_factor": by * (1 + 0.1 * math.log(factor) if factor > 1 else 1.0),
    }


def with_factors(file: GgufFile, config: PreTrainedConfig, rope: Rope) -> Rope:
    """The rope with the factors that are in tensors of the file."""
    tensors = file.tensors
    if LONG in tensors and SHORT in tensors:
        if rope["rope_type"] == "default":  # files do not always say it
            rope = {**rope, "rope_type": "longrope", **long_context(file, config)}
        both = {"long_factor": values(tensors[LONG]), "short_factor": values(tensors[SHORT])}
        return {**rope, **{name: list(map(float, found)) for name, found in both.items()}}
    if FACTORS not in tensors:
        return rope
    factors = values(tensors[FACTORS])
    if rope["rope_type"] != "default":
        raise file.refusal(
            f"{file.architecture}.rope.scaling.type", f"and {FACTORS} holds other factors"
        )
    if (factors == 1).all():
        return rope
    return {**rope, **(llama3(factors, rope["rope_theta"]) or explicit(factors, config))}


def values(tensor: Tensor) -> Numbers:
    """The numbers [n] of a small tensor of a file."""
    return np.asarray(tensor.values(), np.float64).reshape(-1)


def explicit(factors: Numbers, config: PreTrainedConfig) -> Rope:
    """Any factors: LongRoPE whose long ones are its short ones, and which scales nothing else."""
    both = list(map(float, factors))
    return {
        "rope_type": "longrope", "short_factor": both, "long_factor": both, "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config.max_position_embeddings,
    }  # fmt: skip


def llama3(factors: Numbers, theta: float) -> Rope | None:
    """The settings of Llama 3's scaling that give the factors [n]; None where none do.

    A wavelength w is divided by 1 / ((1 - s) / factor + s), where s = (original / w - low) /
    (high - low) within 0 and 1. So s is linear in 1 / w, and two points between give the line. It
    does not change where original, low and high are multiplied alike: low is 1, as in all models.
    """
    count, factor = len(factors), float(factors.max())
    per_wavelength = theta ** (-np.arange(count) / count) / (2 * math.pi)
    if factor <= 1:
        return None
    shares = (1 / factors - 1 / factor) / (1 - 1 / factor)
    between = [n for n in range(count) if EXACT < shares[n] < 1 - EXACT]
    if len(between) > 1:
        slope, start = np.polyfit(per_wavelength[between], shares[between], 1)
        high = LOW - LOW / start if start else HIGH
        original = slope * (high - LOW)
    elif between:
        high = HIGH
        original = (shares[between[0]] * (HIGH - LOW) + LOW) / per_wavelength[between[0]]
    else:
        return None
    found = {
        "rope_type": "llama3", "factor": round(factor, 4), "low_freq_factor": LOW,
        "high_freq_factor": round(float(high), 3),
        "original_max_position_embeddings": round(float(original)),
    }  # fmt: skip
    given = factors_of(found, per_wavelength)
    return found if np.allclose(given, factors, rtol=EXACT, atol=0) else None


def factors_of(rope: Rope, per_wavelength: Numbers) -> Numbers:
    """The factors [n] by which Llama 3's scaling divides frequencies."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * per_wavelength
    shares = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - shares) / rope["factor"] + shares))


def long_context(file: GgufFile, config: PreTrainedConfig) -> Rope:
    """The settings of LongRoPE for files that state no kind of scaling."""
    original = file.of_model("rope.scaling.original_context_length")
    if original is None:
        raise file.refusal(
            f"{file.architecture}.context_length",
            f"and {LONG} is there, but no rope.scaling.original_context_length",
        )
    return {
        "original_max_position_embeddings": original,
        "factor": config.max_position_embeddings / original,
    }
