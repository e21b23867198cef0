"""Exports that a reader would not compute alike are refused, and so is what a format cannot say."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import HIDDEN, VOCAB
from transformers import LlamaForCausalLM
from written import DFLASH, TARGET, random_head

from drafthead.core.errors import UserError
from drafthead.core.target.logit_finish import Finish
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import TokenTree, TreeShape
from drafthead.heads.formats import FORMATS, build_head, load_head, read_foreign
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.formats.exporting import difference_of, export_head
from drafthead.heads.formats.medusa import VllmMedusa

FACTS = TargetFacts("target", HIDDEN, VOCAB, TARGET.num_hidden_layers)


@pytest.fixture(scope="module")
def model() -> Target:
    torch.manual_seed(0)
    return Target(LlamaForCausalLM(TARGET))


def test_what_has_no_probability_in_float32_may_have_any_small_one_elsewhere() -> None:
    logits = torch.tensor([[0.0, -1.0, -200.0, -90.0]])
    probs = logits.softmax(1)
    assert probs[0, 2] == 0
    ids = torch.arange(4).expand(1, 2, 4)
    tree = TokenTree.from_shape(
        TreeShape.chain(1), torch.zeros(1, 2, dtype=torch.long), ids, probs.expand(1, 2, 4)
    )
    assert difference_of(logits, tree) < 1e-6
    assert difference_of(probs.log(), tree) < 1e-6
    assert difference_of(logits + torch.tensor([0.0, 0.5, 0.0, 0.0]), tree) > 1e-3
    assert difference_of(logits.flip(1), tree) > 0.5


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "options", "complaint"),
    [
        ("medusa", "medusa", {"num_blocks": 2}, "num_blocks 2 with blocks that differ"),
        ("medusa", "eagle", {}, "only medusa"),
        ("eagle", "eagle", {"rope_parameters": LLAMA3}, "rotary positions of the type 'llama3'"),
        ("eagle", "eagle", {"head_dim": 4}, "head_dim 4"),
        ("hydra", "hydra", {"intermediate_size": 40}, "intermediate_size 40 of the prefix layer"),
        ("drafthead", "eagle", {}, "cannot export to 'drafthead'"),
        ("eagle3-sglang", "eagle3", {"norm_before_residual": True}, "norm_before_residual True"),
        ("eagle3-sglang", "eagle3", {"qk_norm": True}, "head.qk_norm True"),
        ("eagle3-sglang", "eagle3", {"embeddings": "own"}, "head.embeddings 'own'"),
        ("eagle3-sglang", "eagle3", {"taps": (3,)}, r"SGLang leaves fc out for one tap"),
        ("eagle3-vllm", "eagle3", {"taps": (1, 3, 7)}, r"head.taps \[1, 3, 7\]: it reads inputs"),
        ("eagle3-vllm", "eagle3", {"mask_token": 3}, "head.mask_token 3"),
        ("speculators", "eagle3", {"hidden_size": 48}, "hidden_size 48 on a target of"),
        ("speculators", "eagle3", {"taps": (1, 3, 8)}, r"head.taps \[1, 3, 8\]"),
        ("dflash", "parallel", {"tap_norm": True}, "head.tap_norm True"),
        ("dflash", "parallel", {"root_feature": True}, "head.root_feature True"),
        ("dflash", "parallel", {"root_predicts": True}, "head.root_predicts True"),
        ("dflash", "parallel", {"correction": "markov"}, "head.correction 'markov'"),
        ("dflash", "parallel", {"draft_vocab_size": 40}, "head.draft_vocab_size 40"),
        ("dflash", "parallel", {"mask_token": None}, "head.mask_token null"),
        ("dflash", "parallel", {"taps": (1, 7)}, r"head.taps \[1, 7\]: for layer 7"),
        ("dflash", "parallel", {"taps": (-1, 3)}, "cannot tap layer -1"),
        ("dspark", "parallel", {}, "head.root_predicts False"),
        ("dspark", "parallel", {"root_predicts": True, "taps": (7,)}, "after the final norm"),
        ("speculators", "parallel", {"taps": (3, 8)}, r"head.taps \[3, 8\]"),
        ("dspark", "parallel", {"root_predicts": True, "causal": True}, "head.causal True"),
        ("dspark", "parallel", {"root_predicts": True, "window": 9}, "head.window 9"),
        ("dflash-transformers", "parallel", {"causal": True}, "head.causal True"),
        ("dflash-transformers", "parallel", {"window": 9}, "head.window 9"),
    ],
)
def test_what_a_format_cannot_express_is_named(
    model: Target, tmp_path: Path, name: str, kind: str, options: dict, complaint: str
) -> None:
    usual = DFLASH if kind == "parallel" else {}
    head = random_head(kind, model, {**usual, **options})
    with pytest.raises(UserError, match=complaint):
        export_head(head, FACTS, model, name, tmp_path / "out")
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("eagle", "eagle", {}),
        ("hydra", "hydra", {}),
        ("vllm-medusa", "medusa", {"output": "shared"}),
    ],
)
def test_a_format_with_copies_of_the_targets_weights_needs_it(
    model: Target, tmp_path: Path, name: str, kind: str, options: dict
) -> None:
    head = random_head(kind, model, options)
    with pytest.raises(UserError, match=f"{name} holds .*--target"):
        export_head(head, FACTS, None, name, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "kind"), [("medusa", "medusa"), ("vllm-medusa", "medusa"), ("mlp", "mlp_speculator")]
)
def test_the_others_do_without_the_target(
    model: Target, tmp_path: Path, name: str, kind: str
) -> None:
    head = random_head(kind, model, {}).to(torch.bfloat16)
    assert export_head(head, FACTS, None, name, tmp_path / "out") < 1e-5
    _, foreign = read_foreign(tmp_path / "out", TargetFacts())
    again = build_head(foreign, tmp_path / "out")
    for tensor, name_of_it in zip(again.state_dict().values(), head.state_dict(), strict=True):
        assert torch.equal(tensor, head.state_dict()[name_of_it])


def test_an_export_whose_reader_computes_something_else_is_not_kept(
    model: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = VllmMedusa.replay
    monkeypatch.setattr(VllmMedusa, "replay", lambda *a: right(*a).roll(1, dims=0))
    head = random_head("medusa", model, {})
    with pytest.raises(UserError, match="a reader of vllm-medusa would not compute what"):
        export_head(head, FACTS, None, "vllm-medusa", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_head_of_a_target_that_scales_its_logits_is_not_exported(
    model: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "finish", Finish(0.25))
    with pytest.raises(UserError, match="would not compute what"):
        export_head(random_head("medusa", model, {}), FACTS, model, "medusa", tmp_path / "out")


def test_nothing_is_written_over(model: Target, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    head = random_head("medusa", model, {})
    for folder, complaint in ((tmp_path, "not empty"), (tmp_path / "file", "not a folder")):
        with pytest.raises(UserError, match=complaint):
            export_head(head, FACTS, None, "medusa", folder)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_checkpoint_with_the_targets_own_embedding_reads_the_targets(
    model: Target, tmp_path: Path
) -> None:
    head = random_head("eagle", model, {})
    export_head(head, FACTS, model, "eagle", tmp_path)
    assert load_head(tmp_path, model).config.embeddings == "target"
    file = tmp_path / "pytorch_model.bin"
    tensors = torch.load(file, weights_only=True)
    tensors["embed_tokens.weight"] += 0.01
    torch.save(tensors, file)
    other = load_head(tmp_path, model)
    assert other.config.embeddings == "own"
    assert torch.equal(other.embed_tokens.weight, tensors["embed_tokens.weight"])


def test_hydra_of_another_target_is_refused(model: Target, tmp_path: Path) -> None:
    export_head(random_head("hydra", model, {}), FACTS, model, "hydra", tmp_path)
    torch.manual_seed(1)
    with pytest.raises(UserError, match="embedding that differs"):
        load_head(tmp_path, Target(LlamaForCausalLM(TARGET)))


def test_vllms_names_may_have_a_prefix_but_no_map_of_tokens(model: Target, tmp_path: Path) -> None:
    export_head(random_head("medusa", model, {}), FACTS, None, "vllm-medusa", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {f"medusa_heads.{name}": t for name, t in load_file(file).items()}
    save_file(tensors, file)
    assert load_head(tmp_path, model).depth == 4
    save_file({**tensors, "medusa_heads.token_map": torch.arange(9)}, file)
    with pytest.raises(UserError, match="token_map"):
        load_head(tmp_path, model)


def test_medusas_count_of_heads_is_not_believed_but_that_of_steps_is(
    model: Target, tmp_path: Path
) -> None:
    for name, kind, key in (
        ("medusa", "medusa", "medusa_num_heads"),
        ("mlp", "mlp_speculator", "n_predict"),
    ):
        folder = tmp_path / name
        export_head(random_head(kind, model, {}), FACTS, None, name, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, key: 2}))
    _, foreign = read_foreign(tmp_path / "medusa", TargetFacts())
    assert foreign.config.num_heads == 4 and "says 2, but there are 4 heads" in foreign.notes[0]
    with pytest.raises(UserError, match="holds 4 steps, but n_predict is 2"):
        read_foreign(tmp_path / "mlp", TargetFacts())


def test_every_format_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "formats.md").read_text()
    assert [name for name in FORMATS if name not in text] == []
