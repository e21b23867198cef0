"""The keys of a GGUF file: every one is used, known to be neutral, or refused by name.

The keys are those of llama.cpp, described in ggml's docs/gguf.md.
"""

from collections.abc import Callable
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.integrations.gguf import convert_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from drafthead.core.errors import UserError, first_line
from drafthead.core.target.gguf_header import GgufFile

# What transformers calls architectures, where it is something else.
MODEL_TYPES = {"gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
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
SPECIAL_TOKENS = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # fmt: skip
FALSE_IS_NEUTRAL = ("ggml.remove_extra_whitespaces", "ggml.add_sep_token")


def config_of(file: GgufFile) -> PreTrainedConfig:
    """The configuration of a file's model, without rotary positions.

    Raises UserError for a value that the model's class has no setting for.
    """
    name, tensors = MODEL_TYPES.get(file.architecture, file.architecture), file.tensors
    if not isinstance(tokens := file.get("tokenizer.ggml.tokens"), list):
        raise UserError(f"{file.path} cannot be read: it has no list tokenizer.ggml.tokens")
    usual = AutoConfig.for_model(name)
    found = {
        "vocab_size": len(tokens),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }
    if name == "stablelm":
        found |= {
            "use_qkv_bias": "blk.0.attn_q.bias" in tensors,
            "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors,
        }
    if name == "qwen3_moe":  # whose class has no usual width of heads
        found |= {"norm_topk_prob": True, "head_dim": file.of_model("attention.key_length")}
    left = {}
    for name in sorted({*SETTINGS, *NEUTRAL_VALUES}):
        if (value := file.of_model(name)) is None:
            continue
        setting = next((each for each in SETTINGS.get(name, ()) if hasattr(usual, each)), None)
        if setting is not None and not isinstance(value, list):
            found[setting] = value
        else:
            left[name] = value
    config = type(usual)(**found)
    for name, value in left.items():
        if name not in NEUTRAL_VALUES or not NEUTRAL_VALUES[name](value, config):
            key = f"{file.architecture}.{name}"
            raise file.refusal(key, f"for which {type(config).__name__} has no setting")
    apply_layer_kinds(file, config)
    if file.architecture.startswith("gemma"):
        config.query_pre_attn_scalar = attention_scalar(config)
    return config


def head_width(config: PreTrainedConfig) -> int:
    """Numbers of a head's queries and keys."""
    width = getattr(config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)


def apply_layer_kinds(file: GgufFile, config: PreTrainedConfig) -> None:
    """Set which layers slide, where the file says so: every n-th is full, or a list."""
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
    for key, value in file.fields.items():
        name = key.removeprefix("tokenizer.") if key.startswith("tokenizer.") else None
        if key in file.used or name in TOKENIZER_USED:
            file.used.add(key)
            continue
        is_false = name in FALSE_IS_NEUTRAL and not value
        if not (is_false or key.startswith(NEUTRAL_BEGINNINGS) or name in TOKENIZER_NEUTRAL):
            raise file.refusal(key, "which nothing here reads: it would be another model")
        neutral.append(key)
    return neutral


def tokenizer_of(file: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer that a file describes, with its chat template; UserError for what is unknown.

    transformers knows some of the names of ways to cut text, and cuts as GPT-2 does for all
    others, silently.
    """
    start = "tokenizer.ggml."
    of = {key.removeprefix(start): v for key, v in file.fields.items() if key.startswith(start)}
    kind, pre = of.get("model"), of.get("pre", "default")
    try:
        backend, _ = convert_gguf_tokenizer(
            file.architecture, {**of, "tokenizer_type": kind, "pre_tokenizer_type": pre}
        )
    except Exception as error:  # of damaged vocabularies, of any kind
        raise UserError(
            f"transformers cannot read the tokenizer of {file.path}: {first_line(error)}"
        ) from error
    if kind == "gpt2" and not pre_tokenizer_as(pre, backend):
        raise file.refusal(start + "pre", "a way to cut text that is not known here")
    adds = {name: of[name] for name in ("add_bos_token", "add_eos_token") if name in of}
    if kind == "llama":
        adds.setdefault("add_bos_token", True)  # as llama.cpp does
    named = {name: of["tokens"][of[key]] for name, key in SPECIAL_TOKENS.items() if key in of}
    template = file.get("tokenizer.chat_template")
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, **named, **adds
    )
    stated = of.get("add_space_prefix")
    if kind != "gpt2" and stated not in (None, made.tokenize("a")[0].startswith("\u2581")):
        key = f"{start}add_space_prefix"
        raise file.refusal(key, "which the tokenizer of transformers does not follow")
    return made


def pre_tokenizer_as(name: str, backend: Tokenizer) -> bool:
    """Let a tokenizer of bytes cut text by a name of llama.cpp; gives whether that is known."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name in DIGITS_APART:
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif name in AS_QWEN2:
        parts = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([parts, whole])
    return name in (*DIGITS_APART, *AS_QWEN2, *AS_GPT2, *GGUF_PRE_TOKENIZER_SPLITS)
