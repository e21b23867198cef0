"""Small seeded models, tokenizers, prompts and conversations; no network, no GPU."""

import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from drafthead.core.drafting.drafter import Drafter
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import TreeShape

VOCAB, HIDDEN, END = 64, 32, 7
# Wide at the root, narrow below: siblings, cousins and an only child.
BUSHY = TreeShape.from_paths(
    [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0)]
)
LETTERS = "abcdefgh"  # of tokenizers
SPECIALS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def llama_config(**settings: Any) -> LlamaConfig:
    """Two layers, and weights so large that greedy text is varied, where nothing else is set."""
    defaults = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": 2 * settings.get("hidden_size", HIDDEN),
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "initializer_range": 0.3,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    return LlamaConfig(**defaults | settings)


def tiny_llama(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    """A random float32 Llama, always the same for the same seed and settings."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(**settings))


def byte_tokenizer(specials: tuple[str, ...] = SPECIALS) -> PreTrainedTokenizerFast:
    """The special tokens, then one token for each byte; with a chat format."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=list(SPECIALS[2:]),
        chat_template=CHAT_TEMPLATE,
    )


def byte_target(
    tokenizer: PreTrainedTokenizerFast | None = None, seed: int = 0, **settings: Any
) -> Target:
    """A random model of a tokenizer's tokens, by default `byte_tokenizer`'s, which its end ends."""
    tokenizer = tokenizer or byte_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id}
    return Target(tiny_llama(seed, vocab_size=len(tokenizer), **ends | settings), tokenizer)


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Words, and bytes as SentencePiece models have them."""
    words = ["<unk>", "</s>", "▁a", "▁b", "c", "▁é", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE(vocab={w: n for n, w in enumerate(words)}, merges=[], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>",
        clean_up_tokenization_spaces=True,
    )  # fmt: skip


def letters_tokenizer(letters: str, pairs: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """One token for each letter, in that order, then one for each pair of letters."""
    vocab = {token: number for number, token in enumerate([*letters, *pairs])}
    merges = [(pair[0], pair[1]) for pair in pairs]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def words_tokenizer() -> PreTrainedTokenizerFast:
    """VOCAB tokens: special ones, letters, digits and some pairs of letters; with a chat format."""
    specials, pairs = [*SPECIALS, "<|system|>"], ("th", "he", "ab", "ba")
    singles = [*string.ascii_lowercase, *string.ascii_uppercase, *" .,"]
    vocab = {token: n for n, token in enumerate([*specials, *singles, *pairs][:VOCAB])}
    merges = [(pair[0], pair[1]) for pair in pairs if pair in vocab]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=specials[2:],
        chat_template=CHAT_TEMPLATE,
    )


def letters_model(letters: str = LETTERS, pairs: tuple[str, ...] = (), seed: int = 0) -> Target:
    """A random model of one layer, with its `letters_tokenizer`."""
    tokenizer = letters_tokenizer(letters, pairs)
    return Target(tiny_llama(seed, vocab_size=len(tokenizer), num_hidden_layers=1), tokenizer)


def write_target(folder: Path, **settings: Any) -> None:
    """A model of `byte_tokenizer`'s tokens, with the tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    settings = {"num_attention_heads": 2, **ends, **settings}
    tiny_llama(vocab_size=len(tokenizer), **settings).save_pretrained(folder)


def target_folder(**settings: Any) -> Any:
    """A module's fixture: the folder of what `write_target` writes with these settings."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("target")
        write_target(path, **settings)
        return path

    return folder


def random_prompts(count: int, vocab: int = VOCAB) -> list[list[int]]:
    """Prompts of 1 to 20 tokens."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 21, (count,), generator=generator).tolist()
    return [torch.randint(8, vocab, (n,), generator=generator).tolist() for n in lengths]


def write_conversations(path: Path, count: int, seed: int) -> None:
    """Answers of very different lengths that a head can learn; other seeds ask otherwise."""
    chance, question = random.Random(seed), "count" if seed == 0 else f"count{seed}"
    with path.open("w") as file:
        for _ in range(count):
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": "abcd " * chance.randint(1, 9)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


SMALL_T5 = {
    "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}  # fmt: skip
SMALL_BART = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "max_position_embeddings": 64, "decoder_start_token_id": 2,
}  # fmt: skip
ENCODER_DECODERS: dict[str, dict[str, object]] = {
    "t5": SMALL_T5,
    "t5:gated": {**SMALL_T5, "feed_forward_proj": "gated-gelu"},  # Flan-T5
    "mt5": SMALL_T5,
    "longt5": {**SMALL_T5, "local_radius": 4},
    "bart": SMALL_BART,
    "mbart": SMALL_BART,
    "marian": {**SMALL_BART, "decoder_vocab_size": VOCAB},  # sines
    "pegasus": {**SMALL_BART, "decoder_start_token_id": 0},
    "blenderbot": {**SMALL_BART, "decoder_start_token_id": 1},
    "blenderbot-small": {**SMALL_BART, "decoder_start_token_id": 1},
    "plbart": SMALL_BART,
    "mvp": SMALL_BART,
    "bigbird_pegasus": {
        **SMALL_BART, "attention_type": "original_full", "scale_embedding": False,
    },
}  # fmt: skip
FORCED = {"bart": 3, "mbart": 9}  # the first token of every answer: of texts, or of a language


def tiny_encoder_decoder(name: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A random float32 model of a name in ENCODER_DECODERS, whose greedy text is varied.

    Its weights are large, those of positions too, and its output head is its own.
    """
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB, "d_model": HIDDEN, "bos_token_id": 0, "pad_token_id": 0,
        "eos_token_id": None,
    }  # fmt: skip
    options = sizes | ENCODER_DECODERS[name] | settings
    config = AutoConfig.for_model(name.partition(":")[0], **options)
    model = AutoModelForSeq2SeqLM.from_config(config).float().eval()
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1 and parameter.requires_grad:
            stds = {"relative_attention_bias": 3.0, "embed_positions": 1.0}
            parameter.data.normal_(std=next((s for k, s in stds.items() if k in key), 0.1))
    model.get_input_embeddings().weight.data.normal_()
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.randn(head.weight.shape))
    assert model.generation_config is not None
    model.generation_config.forced_bos_token_id = FORCED.get(name)
    model.generation_config.forced_eos_token_id = None
    return model


def placed(drafter: Drafter, device: torch.device) -> Drafter:
    """The drafter with all of its weights and tables on a device."""
    for name, part in [*vars(drafter).items()]:
        if torch.is_tensor(part):
            setattr(drafter, name, part.to(device))
        if isinstance(part, Drafter):
            placed(part, device)
        model = part.model if isinstance(part, Target) else part
        if isinstance(model, torch.nn.Module):
            model.to(device)
    return drafter
