"""Words of other software for what is called otherwise here: each is answered with ours."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from transformers.generation.configuration_utils import GenerationConfig

from drafthead.core.errors import UserError
from drafthead.core.settings import names_elsewhere
from drafthead.core.target.loading import type_name
from drafthead.infer.request.request import DecodeOptions

ALWAYS_A_RESULT = "a result with fields is always returned"
AT_LOADING = "it is chosen in Decoder.from_pretrained"
OF_TEMPLATES = "write chat_template_kwargs={{{name!r}: ...}}"
LOADED = "load model and tokenizer with it, and pass the loaded model and tokenizer="
# For options of a call, after their name. `{name}` is the name.
OF_CALLS = {
    "do_sample": "a temperature above 0 samples, and 0, the default, is greedy",
    "max_length": "use max_new_tokens, or generation_config=GenerationConfig(max_length=...)",
    "stream": "Decoder.stream gives the text piece by piece",
    "skip_special_tokens": "texts never have special tokens; result.sequences has them",
    **{other: f"use {own}" for other, own in names_elsewhere(DecodeOptions).items()},
    **dict.fromkeys(("return_dict_in_generate", "return_dict"), ALWAYS_A_RESULT),
    **dict.fromkeys(
        ("output_scores", "output_logits"), "ask for logprobs=0, or for n > 0 alternatives"
    ),
    **dict.fromkeys(
        ("messages", "prompt", "inputs", "text"), "prompts and messages come first, without a name"
    ),
    **dict.fromkeys(
        ("assistant_model", "draft", "prompt_lookup_num_tokens", "tokenizer"),
        AT_LOADING,
    ),
    **dict.fromkeys(("tools", "documents", "enable_thinking"), OF_TEMPLATES),
}
OF_LOADING = {
    "device_map": "use device; layers on several devices come as a loaded model",
    "load_in_8bit": 'use dtype="int8"',
    "load_in_4bit": 'use dtype="int4"',
    "assistant_model": "use draft",
    "num_speculative_tokens": "use draft_tokens",
    **dict.fromkeys(
        (
            "attn_implementation", "quantization_config", "max_memory", "low_cpu_mem_usage",
            "revision", "token", "cache_dir", "local_files_only",
        ),
        LOADED,
    ),
}  # fmt: skip


class UnknownOptionError(UserError, TypeError):
    """A keyword that does not exist, and what to write instead."""


def refuse_unknown_options(options: Mapping[str, object], known: Collection[str]) -> None:
    """Raise UnknownOptionError for an option of a call that is not among the known ones."""
    for name in options.keys() - set(known):
        if name not in OF_CALLS and name in vars(GenerationConfig()):
            instead = f"write generation_config=GenerationConfig({name}=...)"
        else:
            instead = OF_CALLS.get(name, "").format(name=name) or nearest(name, known)
        raise UnknownOptionError(f"unknown option {name!r}: {instead}")


def nearest(name: str, known: Collection[str]) -> str:
    """The known options, and the one that is spelt most like a name."""
    likest = difflib.get_close_matches(name, known, n=1)
    guess = f"did you mean {likest[0]!r}? " if likest else ""
    return f"{guess}Options: {', '.join(known)}"


def type_of_weights(dtype: object, others: Mapping[str, Any]) -> str:
    """The name of the type that `dtype` or transformers' older word for it names.

    Raises UnknownOptionError for the other words, and UserError for a type that is given twice.
    """
    for name in others.keys() - {"torch_dtype"}:
        instead = OF_LOADING.get(name) or "Decoder.from_pretrained explains what it takes"
        raise UnknownOptionError(f"unknown argument {name!r}: {instead}")
    if "torch_dtype" in others and dtype != "auto":
        raise UserError("dtype and torch_dtype are the same: leave one of them out")
    return type_name(others.get("torch_dtype", dtype))
