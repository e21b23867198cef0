"""Some of a target's layers draft for it, over its own keys: the same guesses, nothing read twice.

The reference shares nothing with the drafter: a pass of the whole model over the whole text, in
which the other layers return what they are given, at the drafted positions alone.
"""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from alone import Alone
from rehearsal import rehearse
from tiny import VOCAB, random_prompts, tiny_llama
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from drafthead.backends.cuda.recorded_target import RecordedTarget
from drafthead.backends.cuda.tree_kernels import CudaTreeKernels
from drafthead.contrib.own_layers import OwnLayers, part_of
from drafthead.core.drafting.drafter import Committed
from drafthead.core.errors import UserError
from drafthead.core.kv_cache.cache_memory import CacheMemory
from drafthead.core.kv_cache.column_cache import FRESH
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.features import Features
from drafthead.core.target.hooks import hook_lock
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget
from drafthead.infer import Decoder

WINDOW, DEPTH, LAYERS = 5, 3, 4
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
MIXED = {
    "sliding_window": WINDOW, "head_dim": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 6,
}  # fmt: skip
MODELS = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "gpt2": {},
    "bert": {"is_decoder": True},  # whose layers are in a module of their own
    "bloom": {},  # ALiBi
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 8},  # rotations by the kind of layer as well
    "qwen2": {**MIXED, "use_sliding_window": True},
}
SETS = {"exit": [0, 1], "gap": [0, 2], "late": [1, 3]}
TEXTS = [[9, 10, 11, 12, 40, 41, 9, 30, 22], [20, 21, 22]]  # beyond the window and within


def make_model(name: str) -> Target:
    torch.manual_seed(1)
    config = AutoConfig.for_model(name.split()[0], **SIZES | MODELS[name])
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.25)
    return Target(model)


@torch.no_grad()
def guess(target: Target, layers: list[int], text: list[int], drafted: int) -> int:
    """The most probable token where the last `drafted` positions go through `layers` alone."""

    def passed_over(_layer: nn.Module, args, kwargs, output):
        given = args[0] if args else kwargs["hidden_states"]
        found = output[0] if isinstance(output, tuple) else output
        mixed = torch.cat([found[:, :-drafted], given[:, -drafted:]], dim=1)
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    with ExitStack() as hooks:
        for number, layer in enumerate(target.layers):
            if number not in layers:
                hook = layer.register_forward_hook(passed_over, with_kwargs=True)
                hooks.callback(hook.remove)
        return int(target.model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax())


def chain(target: Target, layers: list[int], text: list[int]) -> list[int]:
    """The drafted tokens after a text, whose last token is the root."""
    drafted: list[int] = []
    for depth in range(1, DEPTH + 1):
        drafted.append(guess(target, layers, [*text, *drafted], depth))
    return drafted


@pytest.mark.parametrize("layers", SETS.values(), ids=SETS)
@pytest.mark.parametrize("name", MODELS)
def test_the_chain_is_that_of_a_model_without_the_other_layers(name: str, layers: list[int]):
    target = make_model(name)
    lengths = torch.tensor([len(text) - 1 for text in TEXTS])
    ids = torch.zeros(len(TEXTS), int(lengths.max()) + 1, dtype=torch.long)
    for row, text in zip(ids, TEXTS, strict=True):
        row[: len(text)] = torch.tensor(text)
    session = Alone(OwnLayers(target, layers, DEPTH), target, ids[:, :-1], lengths)
    session.commit(Committed(ids[:, 1:], Features(last=None), lengths))
    tree = session.propose(Budget(DEPTH + 1, DEPTH), SamplingConfig(), None)
    assert tree.tokens.tolist() == [[text[-1], *chain(target, layers, text)] for text in TEXTS]


def test_all_layers_draft_what_the_target_says(target: Target) -> None:
    drafter = OwnLayers(target, [0, 1], DEPTH)
    result = Decoder(target, drafter, Budget(DEPTH + 1, DEPTH)).generate(
        random_prompts(4), max_new_tokens=1 + 3 * (DEPTH + 1)
    )
    for row, tokens in zip(result.stats.accept_lengths, result.sequences, strict=True):
        assert all(length == DEPTH + 1 for length in row[:-1]) and len(tokens) > 1


def test_no_committed_token_is_read_by_the_draft(target: Target, monkeypatch) -> None:
    drafter = OwnLayers(target, [0], DEPTH)
    run, read = drafter.model.run, []

    def watched(input_ids: torch.Tensor, *arguments):
        read.append(tuple(input_ids.shape))
        return run(input_ids, *arguments)

    monkeypatch.setattr(drafter.model, "run", watched)
    decoder = Decoder(target, drafter, Budget(DEPTH + 1, DEPTH))
    steps = decoder.generate(TEXTS[0], max_new_tokens=20).stats.steps
    assert read == [(1, 1)] * DEPTH * steps, "roots and drafted tokens alone"


def test_recorded_drafts_are_the_eager_ones(monkeypatch) -> None:
    """A pass is given the keys of the layers that draft, which it knows by their own numbers."""
    rehearse(monkeypatch)
    target, answers = make_model("llama"), []
    for each in (target, RecordedTarget(target, fuses=False)):
        drafter = OwnLayers(each, [0, 2, 3], 2)
        drafter.compile(each)
        decoder = Decoder(each, drafter, Budget(3, 2))
        answers.append(decoder.generate(TEXTS[0], max_new_tokens=24))
    eager, recorded = answers
    assert recorded.sequences == eager.sequences
    assert recorded.stats.accept_lengths == eager.stats.accept_lengths
    assert eager.stats.tau > 1, "a draft that is never accepted shows nothing"


def test_passes_of_a_part_and_its_target_wait_for_each_other(target: Target) -> None:
    part = part_of(target, [1])
    assert hook_lock(part.model) is hook_lock(target.model)
    assert [*part.layers] == [target.layers[1]] and target.num_layers == 2


def test_layers_that_share_keys_cannot_draft_alone() -> None:
    config = AutoConfig.for_model(
        "gemma4_text", **SIZES | MIXED, global_head_dim=8, num_kv_shared_layers=2,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB,
    )  # fmt: skip
    target = Target(AutoModelForCausalLM.from_config(config).float().eval())
    with pytest.raises(UserError, match="Gemma4ForCausalLM cannot draft with some of its layers"):
        OwnLayers(target, [0, 1], DEPTH)


def test_a_part_that_computes_something_else_is_refused() -> None:
    """Software that places layers on several devices replaces a module's `forward`."""
    model = tiny_llama(0)
    part_of(Target(model), [0])
    model.model.forward = model.model.forward  # bound to the module that has all layers
    with pytest.raises(UserError, match="computes something else"):
        part_of(Target(model), [0])


# How users name layers


@pytest.mark.parametrize(
    ("text", "layers"),
    [("0", (0,)), ("0-2", (0, 1, 2)), ("0-1,3", (0, 1, 3)), ("0,2-3", (0, 2, 3))],
)
def test_layers_are_named_by_ranges(text: str, layers: tuple[int, ...]) -> None:
    decoder = Decoder.from_pretrained(make_model("llama"), draft=f"layers:{text}")
    assert isinstance(decoder.drafter, OwnLayers) and decoder.drafter.model.numbers == layers


@pytest.mark.parametrize(
    ("choice", "complaint"),
    [
        ("0-9", "layers 0-9 cannot draft: the target has layers 0 to 3"),
        ("3,1", "ascending order"),
        ("1,1", "each once"),
        ("2-1", "2-1"),
        ("0-999999999", "not a list of layers"),
        ("first", "layers:first is not a list of layers, such as layers:0-7,20-29"),
        ("", "is not a drafter"),
    ],
)
def test_a_choice_that_cannot_be_kept_is_refused(choice: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Decoder.from_pretrained(make_model("llama"), draft=f"layers:{choice}")


def test_a_part_keeps_every_end_token_whatever_their_number(make_target) -> None:
    target = make_target(layers=2)
    target.config.eos_token_id = [3, 4]
    assert part_of(target, [1]).config.eos_token_id == [3, 4]


def test_a_part_on_a_gpu_is_recorded_with_masks(monkeypatch) -> None:
    part = part_of(make_model("llama"), [1, 3])
    names = "model", "tokenizer", "dtype", "numbers"
    there = {name: getattr(part, name) for name in names} | {"device": torch.device("cuda")}
    monkeypatch.setattr(CudaTreeKernels, "for_model", lambda *_: object())
    monkeypatch.setattr(CacheMemory, "on", lambda _: FRESH)  # which asks the device
    compiled = RecordedTarget(SimpleNamespace(**there), fuses=False)
    assert compiled.numbers == (1, 3) and compiled.kernels is None
