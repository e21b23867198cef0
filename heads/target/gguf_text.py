"""How a GGUF file's tokenizer cuts text before it merges, which the file states by a name.

transformers knows some of the names, and cuts as GPT-2 does for all others, silently.
"""

from tokenizers import Regex, pre_tokenizers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.heads.target.gguf_account import GgufFile

# Names of llama.cpp's src/llama-vocab.cpp. `default` stands in files whose name was not known.
AS_GPT2 = ("default", "gpt-2", "jina-de", "jina-es", "mpt", "olmo", "phi-2", "roberta-bpe")
DIGITS_APART = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")
AS_QWEN2 = ("stablelm2",)


def split_as_stated(file: GgufFile, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a tokenizer cut text as the file says; raises UserError for a name that is not known."""
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
