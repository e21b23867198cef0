"""MTP layers: read from their models' files, as transformers and vLLM compute them, and back."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from architectures import DELTA, EXPERTS, HEAD, LATENT, MLP, SIZES, tiny_model
from safetensors.torch import load_file, save_file
from tiny import HIDDEN, VOCAB
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import TreeShape
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.families.recurrent.mtp import MtpConfig, MtpHead
from drafthead.heads.formats import build_head, load_head, read_foreign
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.formats.drafthead import save_head
from drafthead.heads.formats.exporting import export_head
from drafthead.heads.formats.mtp import split
from drafthead.heads.layers.own_layer import mtp_layer_of
from drafthead.heads.objectives.batch import HeadBatch
from drafthead.infer import Decoder
from drafthead.infer.loading.loaded import kind_of_path
from drafthead.lab.tracing import trace
from drafthead.train.run.trainables import new_head

WEIGHTS, COPIED = "model.safetensors", ("embed_tokens.weight", "shared_head.head.weight")
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
ONE = {"num_nextn_predict_layers": 1}
HYBRID = {
    **DELTA, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_mtp_layers": 1, "mtp_layer_types": ["full_attention"],
}  # fmt: skip
KINDS = {
    "deepseek_v3": {**MLP, **LATENT, **ONE},  # latent attention, experts
    "glm4_moe": {
        **HEAD, **EXPERTS, **ONE, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    },
    "mellum": {  # a layer with a window, and names as Qwen's
        **HEAD, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "sliding_window": 4,
        "num_mtp_layers": 1, "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen2": {**HEAD, "num_mtp_layers": 1, "mtp_layer_types": ["full_attention"],
              "mtp_hidden_states_first": True},  # MiMo: transformers knows its body as Qwen2
    # Transformers runs these two's layers only where it is told that there is one.
    "qwen3_next": HYBRID,
    "qwen3_5_text": HYBRID,
}  # fmt: skip
QWEN = ("mtp.", "layers.0.", "pre_fc_norm_embedding pre_fc_norm_hidden fc norm")
AROUND = {
    "deepseek_v3": ("model.layers.2.", "", "enorm hnorm eh_proj shared_head.norm"),
    "glm4_moe": ("model.layers.2.", "", "enorm hnorm eh_proj shared_head.norm"),
    "mellum": QWEN,
    "qwen3_next": QWEN,
    "qwen3_5_text": QWEN,
    "qwen2": (
        *("model.mtp_layers.0.", ""),
        "token_layernorm hidden_layernorm input_proj final_layernorm",
    ),
}


def names_in_file(name: str, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors of transformers' layer under the names of a model's files, written out here."""
    place, block, around = AROUND[name]
    ours = ("enorm", "hnorm", "eh_proj", "post_norm")
    named = dict(zip(ours, around.split(), strict=True))
    found = {}
    for key, tensor in layer.state_dict().items():
        first, _, rest = key.partition(".")
        if first in named:
            found[f"{place}{named[first]}.{rest}"] = tensor
            continue
        key = place + block + rest
        if key.endswith("gate_up_proj"):
            for number, matrix in enumerate(tensor):
                at = key.replace("gate_up_proj", f"{number}")
                found[f"{at}.gate_proj.weight"], found[f"{at}.up_proj.weight"] = matrix.chunk(2)
        elif key.endswith("experts.down_proj"):
            for number, matrix in enumerate(tensor):
                found[key.replace("down_proj", f"{number}.down_proj.weight")] = matrix
        else:
            found[key] = tensor
    return {key: tensor.detach().clone() for key, tensor in found.items()}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, MtpModel]]:
    """The folder of a model that has an MTP layer, and that layer as transformers makes it."""
    name = request.param
    main = tiny_model(name, KINDS[name])
    layers = MtpModel(main, 1).eval()
    for key, tensor in layers.layers.state_dict().items():
        tensor.normal_(1.0 if "norm" in key else 0.0, 0.3)
    main.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / WEIGHTS
    stored = load_file(file) | names_in_file(name, layers.layers[0])
    if name == "deepseek_v3":  # as there, with copies of the target's own
        stored["model.layers.2.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
        stored["model.layers.2.shared_head.head.weight"] = stored["lm_head.weight"].clone()
    save_file(stored, file, metadata={"format": "pt"})
    yield tmp_path / "model", layers


def target_of(folder: Path) -> Target:
    return load_decoder_only(str(folder), "float32", "cpu")


def chain_of(layers: MtpModel, target: Target, ids: list[int], depth: int) -> list[int]:
    """What transformers' layer drafts after the last of these tokens, in whole passes."""
    tokens = torch.tensor([ids])
    places = torch.arange(len(ids) - 1)[None]
    # The state that transformers' own decoding feeds it, which is the one after the final norm.
    read = target.model(tokens[:, :-1], output_hidden_states=True)
    states = read.hidden_states[-1]
    normed = target.run(tokens[:, :-1], places, None, FeatureSpec()).features.last
    assert torch.allclose(states, normed, atol=1e-5)
    drafted = []
    for _ in range(depth):
        places = torch.arange(states.shape[1])[None]
        outputs = layers.forward_layer(
            0, states, places, None, input_ids=tokens[:, 1:][:, -states.shape[1] :]
        )
        guess = layers.shared_head(outputs[:, -1:]).argmax(-1)
        drafted.append(int(guess))
        tokens = torch.cat([tokens, guess], dim=1)
        states = torch.cat([states, outputs[:, -1:]], dim=1)
    return drafted


@torch.no_grad()
def test_drafts_are_those_of_transformers_and_text_is_the_targets(model) -> None:
    folder, layers = model
    target = target_of(folder)
    head = load_head(folder, target)
    decoder = Decoder(target, drafter_for(head, target, TreeShape.chain(3)))
    found = trace(decoder, PROMPT, max_new_tokens=16)
    assert any(len(step.nodes) == 4 for step in found.steps)
    text = Decoder(target).generate([PROMPT], max_new_tokens=16).sequences[0]
    read = list(PROMPT)
    for step in found.steps:
        root, *chain = [node.token for node in step.nodes]
        read.append(root)
        assert chain == chain_of(layers, target, read, len(chain))
        read += [node.token for node in step.nodes if node.accepted][1:]
    named = Decoder.from_pretrained(target, draft="mtp")
    assert named.generate([PROMPT, PROMPT[:3]], max_new_tokens=16).sequences[0] == text
    assert kind_of_path(folder) == "model", "a folder with all of a model is a model"


def test_a_layer_learns_and_goes_back_into_the_files(model, tmp_path: Path) -> None:
    folder, _ = model
    target = target_of(folder)
    counts = torch.ones(VOCAB, dtype=torch.long)
    head = new_head("mtp", MtpConfig(depth=4), target, counts, init_from=str(folder))
    ids = torch.tensor([target.model.generate(torch.tensor([PROMPT]), max_length=40)[0].tolist()])
    features = target.run(ids, torch.arange(40)[None], None, head.features_needed).features
    batch = HeadBatch(ids, torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool), features)
    optimizer, curve = torch.optim.AdamW(head.parameters(), lr=3e-3), []
    for _ in range(8):
        total = head.loss(batch, target).total
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        curve.append(total.item())
    assert curve[-1] < 0.9 * curve[0]

    save_head(head, tmp_path / "head", target, str(folder), {}, dtype=None)
    trained = load_head(tmp_path / "head", target)
    assert trained.depth == 4
    export_head(trained, TargetFacts.of(target), target, "mtp", tmp_path / "back")
    stored, written = load_file(folder / WEIGHTS), load_file(tmp_path / "back" / WEIGHTS)
    place = AROUND[target.config.model_type][0]
    own = {key for key in stored if key.startswith(place) and not key.endswith(COPIED)}
    assert written.keys() == own, "the names of the file, and no others"
    save_file(stored | written, folder / WEIGHTS, metadata={"format": "pt"})
    for name, tensor in load_head(folder, target).state_dict().items():
        assert torch.equal(tensor, trained.state_dict()[name]), name


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next"])
def test_layers_of_hybrid_models_are_read_and_draft_for_them(name, tmp_path) -> None:
    experts = {
        **EXPERTS, "num_experts": 4, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }  # fmt: skip
    sizes = {**SIZES, **HEAD, "num_hidden_layers": 4, **(experts if name == "qwen3_next" else {})}
    config = AutoConfig.for_model(name, **sizes, mtp_num_hidden_layers=2)
    head = MtpHead(MtpConfig(hidden_size=HIDDEN, vocab_size=VOCAB, layer=mtp_layer_of(config)))
    around = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
    stored = {}
    for key, tensor in split(head.state_dict()).items():
        first, _, rest = key.partition(".")
        stored[f"mtp.{around.get(first, first)}.{rest}".replace("0.layer", "0")] = tensor.clone()
    stored["mtp.layers.1.mlp.up_proj.weight"] = torch.ones(2, 2)
    config.save_pretrained(tmp_path)
    save_file(stored, tmp_path / WEIGHTS)
    _, foreign = read_foreign(tmp_path, TargetFacts())
    assert foreign.notes == ("the first of 2 MTP layers was read: it drafts all depths",)
    assert type(head.layers[0].layer).__name__.startswith("Qwen3")
    for key, tensor in build_head(foreign, tmp_path).state_dict().items():
        assert torch.equal(tensor, head.state_dict()[key]), key
    target = Target(AutoModelForCausalLM.from_config(config).float().eval())
    drafted = Decoder(target, drafter_for(head, target)).generate([5, 6, 7], max_new_tokens=8)
    assert drafted.sequences == Decoder(target).generate([5, 6, 7], max_new_tokens=8).sequences


@pytest.mark.parametrize("model", ["glm4_moe"], indirect=True)
def test_what_is_no_layer_of_ours_is_refused(model, tmp_path: Path) -> None:
    folder, _ = model
    target, stored = target_of(folder), load_file(folder / WEIGHTS)
    head = load_head(folder, target)
    for name, words in {
        "mlp.gate.weight_scale_inv": r"is quantised \(layers.2.mlp.gate.weight_scale_inv\): read",
        "mlp.third.weight": "holds 1 unknown tensors, the first is layers.0.layer.mlp.third.weight",
    }.items():
        more = stored | {f"model.layers.2.{name}": torch.ones(2)}
        save_file(more, folder / WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(UserError, match=words):
            load_head(folder, target)
    without = {key: tensor for key, tensor in stored.items() if "layers.2." not in key}
    save_file(without, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UserError, match="draft mtp is the target's own MTP layer: .* holds no"):
        Decoder.from_pretrained(target, draft="mtp")
    with pytest.raises(ValueError, match="num_layers is of the target's own layer here"):
        MtpConfig(num_layers=2)
    with pytest.raises(UserError, match="mtp cannot express a layer for .*, whose files have none"):
        export_head(head, TargetFacts.of(target), target, "mtp", tmp_path / "back")
