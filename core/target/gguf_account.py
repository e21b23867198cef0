"""What a GGUF file says, and where its copy holds it: every key is used, known to be neutral, or
refused by name.

The keys are those of llama.cpp, described in ggml's docs/gguf.md. transformers reads a part of
them; the others are written into the configuration here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedConfig
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.errors import UserError

# Architectures of which copies were compared with what they were written from, by the tests.
COMPARED = (
    "gemma2", "gemma3", "gpt2", "llama", "nemotron", "phi3", "qwen2", "qwen2moe", "qwen3",
    "qwen3moe", "stablelm", "starcoder2",
)  # fmt: skip
# Of a model, by the names that configurations of transformers have for them.
SETTINGS = {
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_epsilon": (
        "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps",
    ),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "expert_count": ("num_experts",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_used_count": ("num_experts_per_tok",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "use_parallel_residual": ("use_parallel_residual",),
    "vocab_size": ("vocab_size",),
}  # fmt: skip
# Values with which a key changes nothing, for models that have no such setting.
NEUTRAL_VALUES: dict[str, Callable[[Any, PreTrainedConfig], bool]] = {
    "attention.causal": lambda value, _: value is True,
    "attention.head_count_kv": lambda value, config: value == config.num_attention_heads,
    "attention.key_length": lambda value, config: value == head_width(config),
    "attention.value_length": lambda value, config: value == head_width(config),
    "expert_count": lambda value, _: value == 0,
    "expert_used_count": lambda value, _: value == 0,
    "feed_forward_length": lambda value, config: "moe" in config.model_type,
    "tensor_data_layout": lambda value, _: True,  # of the first files, of which all have it
}
# Keys that describe the file and its origin, or how it was made.
NEUTRAL_BEGINNINGS = (
    "GGUF.",
    "general.",
    "imatrix.",
    "quantize.",
    "split.",
    "tokenizer.chat_template.",
)
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
TOKENIZER_USED = (
    "chat_template",
    *(f"ggml.{name}" for name in (
        *ENDS, "add_bos_token", "add_eos_token", "add_space_prefix", "bos_token_id", "merges",
        "model", "padding_token_id", "pre", "scores", "token_type", "tokens", "unknown_token_id",
    )),
)  # fmt: skip
# Names of tokens that no prompt and no answer here asks for, and what other keys say again.
TOKENIZER_NEUTRAL = (
    "chat_templates",
    "huggingface.json",
    *(f"ggml.{name}" for name in (
        "cls_token_id", "fim_mid_token_id", "fim_pad_token_id", "fim_pre_token_id",
        "fim_rep_token_id", "fim_sep_token_id", "fim_suf_token_id", "mask_token_id",
        "middle_token_id", "prefix_token_id", "seperator_token_id", "suffix_token_id",
        "token_type_count",
    )),
)  # fmt: skip
# Names of llama.cpp's src/llama-vocab.cpp. `default` stands in files whose name was not known.
AS_GPT2 = ("default", "gpt-2", "jina-de", "jina-es", "mpt", "olmo", "phi-2", "roberta-bpe")
DIGITS_APART = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")
AS_QWEN2 = ("stablelm2",)
FALSE_IS_NEUTRAL = ("ggml.remove_extra_whitespaces", "ggml.add_sep_token")


@dataclass
class GgufFile:
    """The keys and tensors of a file, and which keys were read for the copy."""

    path: Path
    used: set[str] = field(default_factory=set)

    @cached_property
    def reader(self) -> Any:
        """The `gguf.GGUFReader` of the file."""
        from gguf import GGUFReader

        return GGUFReader(self.path)

    @cached_property
    def architecture(self) -> str:
        """The name of the architecture, by which its own keys begin."""
        return str(self.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, which counts as used; `default` where there is none."""
        if key not in self.reader.fields:
            return default
        self.used.add(key)
        return self.reader.get_field(key).contents()

    def of_model(self, name: str, default: Any = None) -> Any:
        """The value of one of the architecture's keys, one number where each layer has the same."""
        value = self.get(f"{self.architecture}.{name}", default)
        if isinstance(value, list) and len(set(value)) == 1:
            return value[0]
        return value

    def refusal(self, key: str, why: str) -> UserError:
        """The error for a key that the copy cannot hold."""
        value = self.reader.get_field(key).contents()
        return UserError(f"{self.path} cannot be copied: {key} is {value}, {why}")

    def tensors(self) -> dict[str, Any]:
        """The tensors by name."""
        return {tensor.name: tensor for tensor in self.reader.tensors}


def head_width(config: PreTrainedConfig) -> int:
    """Numbers of a head's queries and keys."""
    width = getattr(config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)


def check_architecture(file: GgufFile) -> None:
    """Raise UserError for an architecture of which no copy was ever compared with its file."""
    if file.architecture not in COMPARED:
        raise UserError(
            f"{file.path} has the architecture {file.architecture}, of which no copy was compared "
            f"with its file: use a folder of transformers' files, or one of {', '.join(COMPARED)}"
        )


def apply_settings(file: GgufFile, config: PreTrainedConfig) -> None:
    """Write what the file says of the model's sizes and constants into its configuration.

    Raises UserError for a value that the model's class has no setting for.
    """
    if config.model_type == "mistral":  # llama.cpp gives such files no window
        config.sliding_window = None
    for name in sorted({*SETTINGS, *NEUTRAL_VALUES}):
        key = f"{file.architecture}.{name}"
        value = file.of_model(name)
        if value is None:
            continue
        found = next((n for n in SETTINGS.get(name, ()) if hasattr(config, n)), None)
        if found is not None and not isinstance(value, list):
            setattr(config, found, value)
        elif name not in NEUTRAL_VALUES or not NEUTRAL_VALUES[name](value, config):
            raise file.refusal(key, f"for which {type(config).__name__} has no setting")
    apply_layer_kinds(file, config)
    if file.architecture.startswith("gemma"):
        config.query_pre_attn_scalar = attention_scalar(config)


def apply_layer_kinds(file: GgufFile, config: PreTrainedConfig) -> None:
    """Which layers have a sliding window, where the file says so: every n-th is full, or a list."""
    pattern = file.of_model("attention.sliding_window_pattern")
    if pattern is None:
        return
    layers = range(config.num_hidden_layers)
    if type(pattern) is int:
        slides = [bool((layer + 1) % pattern) for layer in layers]
    else:
        slides = [bool(pattern if type(pattern) is bool else pattern[layer]) for layer in layers]
    if not hasattr(config, "layer_types"):
        raise file.refusal(
            f"{file.architecture}.attention.sliding_window_pattern",
            f"for which {type(config).__name__} has no setting",
        )
    config.layer_types = ["sliding_attention" if s else "full_attention" for s in slides]


def attention_scalar(config: PreTrainedConfig) -> int:
    """Of Gemma: the number whose root divides attention scores, which no file states.

    As llama.cpp has it: the width of a head, but the hidden size over the heads in the models of 27
    billion parameters, which it knows by their layers.
    """
    largest = {"gemma2": 46, "gemma3_text": 62}.get(config.model_type)
    if config.num_hidden_layers == largest:
        return int(config.hidden_size // config.num_attention_heads)
    return head_width(config)


def end_ids(file: GgufFile) -> list[int]:
    """The tokens that end an answer: of the text, of a turn, of a message."""
    ids = [file.get(f"tokenizer.ggml.{name}") for name in ENDS]
    return list(dict.fromkeys(int(number) for number in ids if number is not None))


def check_keys(file: GgufFile) -> list[str]:
    """The keys that change nothing; raises UserError for one that nothing here has read."""
    neutral = []
    for key in file.reader.fields:
        name = key.removeprefix("tokenizer.") if key.startswith("tokenizer.") else None
        if key in file.used or name in TOKENIZER_USED:
            file.used.add(key)
            continue
        is_false = name in FALSE_IS_NEUTRAL and not file.reader.get_field(key).contents()
        if not (is_false or key.startswith(NEUTRAL_BEGINNINGS) or name in TOKENIZER_NEUTRAL):
            raise file.refusal(key, "which nothing here reads: the copy would be another model")
        neutral.append(key)
    return neutral


def split_as_stated(file: GgufFile, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a tokenizer cut text as the file says; raises UserError for a name that is not known.

    transformers knows some of the names, and cuts as GPT-2 does for all others, silently.
    """
    if file.get("tokenizer.ggml.model") != "gpt2":
        check_prefix(file, tokenizer)
        return
    name = file.get("tokenizer.ggml.pre", "default")
    backend = tokenizer.backend_tokenizer
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in DIGITS_APART:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), bytes_of_words]
        )
    elif name in AS_QWEN2:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif name not in AS_GPT2 and name not in known_to_transformers():
        raise file.refusal("tokenizer.ggml.pre", "a way to cut text that is not known here")


def known_to_transformers() -> tuple[str, ...]:
    """The names that transformers cuts text by; none in its older releases."""
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping
    except ImportError:
        return ()
    return tuple(getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", ()))


def check_prefix(file: GgufFile, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError where a tokenizer of SentencePiece puts a space before a text and its file
    says otherwise.
    """
    key = "tokenizer.ggml.add_space_prefix"
    stated = file.get(key)
    if stated is None:
        return
    (first, *_) = tokenizer.tokenize("a")
    if first.startswith("\u2581") != stated:
        raise file.refusal(key, "which the tokenizer of transformers does not follow")
