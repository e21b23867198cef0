"""Draft models: cut out of a target, trained on its answers, written for transformers."""

import json
from pathlib import Path

import pytest
import torch
from runs import run, write_inputs, write_run
from tiny import VOCAB, llama_config, tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3ForCausalLM

from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.block_modules import put_blocks
from drafthead.core.target.blocks import Blocks
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget
from drafthead.heads.formats.loading import load_head
from drafthead.infer import Decoder
from drafthead.infer.drafters.draft_model import DraftModel
from drafthead.infer.drafters.frequent_tokens import DRAFT_IDS_FILE, FrequentTokens
from drafthead.infer.drafters.model_drafter import model_drafter
from drafthead.train.data.packing import collate
from drafthead.train.data.sequences import TokenSequence
from drafthead.train.draft_models.student import (
    DraftModelConfig,
    Student,
    architecture_of,
    built,
    copy_layers,
    evenly_spaced,
)
from drafthead.train.features.reading import read_features
from drafthead.train.learning.evaluation import measure, ranked_anchors

FEW = torch.arange(0, VOCAB, 2)


def student_of(target: Target, **options: object) -> Student:
    """A fresh student in eval mode; with a draft vocabulary it guesses the tokens of FEW."""
    student = Student(Student.sized(DraftModelConfig(**options), target))
    counts = torch.zeros(target.vocab_size).index_fill(0, FEW, 1)
    student.prepare(counts)
    student.initialize(target)
    return student.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("count", "layers"), [(1, (0,)), (2, (0, 29)), (4, (0, 10, 19, 29)), (30, tuple(range(30)))]
)
def test_layers_are_spaced_evenly(count: int, layers: tuple[int, ...]):
    assert evenly_spaced(count, 30) == layers


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3"])
def test_a_model_of_all_layers_is_the_target(name: str):
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3,
             "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    torch.manual_seed(0)
    target = Target(AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes)).eval())
    model = built(architecture_of(target, (0, 1, 2))).eval()
    copy_layers(target, (0, 1, 2), model)
    ids = torch.arange(8, 20)[None]
    assert torch.equal(Target(model).forward(ids, torch.arange(12)[None], None),
                       target.forward(ids, torch.arange(12)[None], None))  # fmt: skip


def test_chosen_layers_keep_their_kind_and_their_weights():
    config = AutoConfig.for_model(
        "gemma3_text", vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, sliding_window=8,
    )  # fmt: skip
    target = Target(Gemma3ForCausalLM(config))
    assert config.layer_types[5] == "full_attention" != config.layer_types[4]
    model = built(architecture_of(target, (0, 5)))
    copy_layers(target, (0, 5), model)
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    assert target.config.num_hidden_layers == 6
    ours, theirs = model.model.layers[1].state_dict(), target.layers[5].state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_only_what_is_kept_of_a_target_in_blocks_is_dequantised(monkeypatch):
    target, found, dequantised = Target(tiny_llama(num_hidden_layers=4)), [], Blocks.dequantised
    for name, weight in list(target.model.named_parameters()):
        if name.endswith("_proj.weight"):
            blocks = Blocks.rounded(weight.detach(), "Q8_0")
            put_blocks(target.model, name.removesuffix(".weight"), blocks)

    def noted(blocks: Blocks, dtype: torch.dtype) -> torch.Tensor:
        found.append(dequantised(blocks, dtype))
        return found[-1]

    monkeypatch.setattr(Blocks, "dequantised", noted)
    model = built(architecture_of(target, (2,)))
    copy_layers(target, (2,), model)
    weights = [w for n, w in model.named_parameters() if n.endswith("_proj.weight")]
    assert len(found) == len(weights) == 7
    assert all(map(torch.equal, weights, found))


def test_a_model_of_all_layers_drafts_what_the_target_says(target: Target):
    student = student_of(target, layers=tuple(range(target.num_layers)), depth=3)
    drafter = DraftModel(Target(student.model, target.tokenizer), target, depth=3)
    result = Decoder(target, drafter).generate([[9, 10, 11]], max_new_tokens=40)
    assert result.stats.tau > 3.5


@pytest.mark.parametrize("draft_vocab_size", [0, len(FEW)])
def test_the_tau_that_is_reported_is_the_tau_of_decoding(target: Target, draft_vocab_size: int):
    """Answers of several lengths, several to a row, drafted as chains."""
    depth = 3
    student = student_of(target, num_layers=1, depth=depth, draft_vocab_size=draft_vocab_size)
    model = Target(student.model, target.tokenizer)
    drafter = (
        FrequentTokens(model, target, depth, FEW)
        if draft_vocab_size
        else DraftModel(model, target, depth)
    )
    prompts = [[9, 10, 11], [20, 21], [30, 31, 32, 33], [8], [40, 41, 42], [50, 51]]
    plain = Decoder(target).generate(prompts, max_new_tokens=60)
    result = Decoder(target, drafter, Budget(depth + 1, depth)).generate(prompts, max_new_tokens=60)
    assert result.sequences == plain.sequences
    sequences = [
        TokenSequence(
            torch.tensor(p + s, dtype=torch.int32), torch.arange(len(p) + len(s)) >= len(p)
        )
        for p, s in zip(prompts, result.sequences, strict=True)
    ]
    tokens = collate([sequences[:2], sequences[2:3], sequences[3:]])
    batch = read_features(target, tokens, student.features_needed, "no")
    evaluation = measure(ranked_anchors(batch, student.loss(batch, target).ranks))
    assert evaluation.tau_chain == pytest.approx(result.stats.tau)
    assert result.stats.tau > 1, "something was accepted"


@pytest.mark.parametrize("loss", ["hard", "soft"])
def test_the_loss_is_that_of_the_tokens_that_drafts_guess(target: Target, loss: str):
    """One answer of five tokens: drafts begin at the first, and guess the four others."""
    student = student_of(target, num_layers=1, depth=2, loss=loss)
    ids = torch.tensor([9, 10, 11, 20, 21, 22, 23, 24], dtype=torch.int32)
    tokens = collate([[TokenSequence(ids, torch.arange(8) >= 3)]])
    batch = read_features(target, tokens, student.features_needed, "no")
    positions = torch.arange(8)[None]
    log_probs = Target(student.model).forward(tokens.input_ids, positions, None)[0].log_softmax(-1)
    wanted = target.forward(tokens.input_ids, positions, None)[0].softmax(-1)
    if loss == "hard":
        wanted = torch.nn.functional.one_hot(tokens.input_ids[0].roll(-1), target.vocab_size)
    each = -(wanted * log_probs).sum(-1)
    found = student.loss(batch, target)
    # The token after the first one is guessed by one of two drafts, the others by both.
    torch.testing.assert_close(found.total, each[3] / 2 + each[4] + each[5] + each[6])
    assert found.depth_counts.tolist() == [4, 3]
    torch.testing.assert_close(found.depth_losses[1], each[4] + each[5] + each[6])


@pytest.fixture
def configure(tmp_path: Path):
    """Writes a run's YAML, for a target of four layers."""
    write_inputs(tmp_path, num_hidden_layers=4)

    def write(name: str = "run", **head: object) -> Path:
        head = {"family": "draft_model", "loss": "hard", **head}
        return write_run(tmp_path / f"{name}.yaml", tmp_path, head, {}, {})

    return write


@pytest.mark.parametrize("few", [0, 64])
def test_what_is_written_drafts_here_and_loads_in_transformers(configure, tmp_path: Path, few: int):
    folder = run(configure(num_layers=2, draft_vocab_size=few), "train.max_steps=40")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["loss"] < records[0]["loss"] / 2
    assert (folder / DRAFT_IDS_FILE).exists() == bool(few)
    assert not list(folder.glob(".model.*"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.num_hidden_layers, model.dtype) == (2, torch.bfloat16)
    target = tmp_path / "target"
    with pytest.raises(UserError, match=r"no draft head .* is it a draft model\?"):
        load_head(folder, load_decoder_only(target, "float32", "cpu"))
    decoder = Decoder.from_pretrained(target, draft=folder)
    assert decoder.drafter.model.dtype == decoder.target.dtype == torch.float32
    assert type(decoder.drafter) is (FrequentTokens if few else DraftModel)
    prompts = ["count", "abcd abcd "]
    plain = Decoder.from_pretrained(target, dtype="float32").generate(prompts, max_new_tokens=24)
    assert decoder.generate(prompts, max_new_tokens=24).sequences == plain.sequences


def test_a_run_can_begin_with_a_draft_model(configure):
    first = run(configure("first", num_layers=1))
    second = run(configure("second", num_layers=1), f"train.init_from={first}", "train.max_steps=1")
    losses = [
        [json.loads(line)["loss"] for line in (f / "metrics.jsonl").read_text().splitlines()]
        for f in (first, second)
    ]
    assert losses[1][0] < losses[0][0] / 2
    with pytest.raises(UserError, match=r"init_from=.* has another shape"):
        run(configure("third", num_layers=2), f"train.init_from={first}")


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        ({"layers": [0, 4]}, r"head.layers is \[0, 4\], but the target has layers 0 to 3"),
        ({"num_layers": 3, "layers": [0, 1]}, r"num_layers is 3, but layers names \(0, 1\)"),
        ({"num_layers": -1}, "head.num_layers must be at least 0, got -1"),
        ({"num_layers": 99}, "head.num_layers is 99, but the target has 4"),
        ({"loss": "none"}, "loss must be one of"),
        ({"draft_vocab_size": 1000}, "head.draft_vocab_size is 1000, but the target has"),
    ],
)
def test_a_wrong_shape_is_said(configure, head: dict[str, object], sentence: str):
    with pytest.raises(UserError, match=sentence):
        run(configure(**head))


def test_hard_labels_need_no_features(configure, tmp_path: Path):
    with pytest.raises(UserError, match=r"a draft model with head.loss=hard reads none"):
        run(configure(), f"data.feature_folder={tmp_path / 'features'}")


def test_a_model_with_adapters_cannot_be_cut():
    target = Target(tiny_llama())
    target.layers[0].mlp.up_proj = torch.nn.Sequential(target.layers[0].mlp.up_proj)
    with pytest.raises(UserError, match="cannot be cut out of this target"):
        copy_layers(target, (0,), built(architecture_of(target, (0,))))


@pytest.mark.parametrize(
    "tokens", ["[1, 2]", '{"draft_ids": []}', '{"draft_ids": [2, 1]}', '{"draft_ids": [1, 64]}',
               '{"draft_ids": [1, 1]}', '{"draft_ids": [1.5]}', '{"draft_ids": null}', "{"],
)  # fmt: skip
def test_a_damaged_draft_vocabulary_is_named(tmp_path: Path, tokens: str):
    tiny_llama().save_pretrained(tmp_path)
    (tmp_path / DRAFT_IDS_FILE).write_text(tokens)
    model = load_decoder_only(tmp_path, "float32", "cpu")
    with pytest.raises(UserError, match=DRAFT_IDS_FILE):
        model_drafter(model, model, depth=2)


def test_the_given_model_keeps_its_output_head():
    model = Target(AutoModelForCausalLM.from_config(llama_config(tie_word_embeddings=True)))
    drafter = FrequentTokens(model, model, 2, FEW)
    assert drafter.model.output_weight().shape[0] == len(FEW)
    assert model.output_weight().shape[0] == model.model.lm_head.weight.shape[0] == VOCAB
