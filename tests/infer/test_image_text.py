"""Models of images and texts, used for text alone."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny import HIDDEN, VOCAB, byte_tokenizer, llama_config
from transformers import PreTrainedModel

from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.request.prompts import other_inputs

NEW = 12
PROMPT = list(range(10, 27))
IDS = torch.tensor([PROMPT, [0] * 5 + PROMPT[5:]])
CALL = {"attention_mask": (IDS != 0).long(), "max_new_tokens": NEW, "do_sample": False}
PATCHES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
TEXT = {**llama_config().to_dict(), "head_dim": 8, "bos_token_id": 1}
IMAGE_PLACES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def model_of(name: str, vision: dict[str, Any], model_type: str = "", **text: Any) -> Any:
    """A random model whose greedy text is varied."""
    torch.manual_seed(0)
    kind = {"model_type": model_type} if model_type else {}
    settings = {k: v for k, v in TEXT.items() if k != "model_type"} | kind | text
    config_class = getattr(transformers, f"{name}Config")
    config = config_class(text_config=settings, vision_config=vision, image_token_id=50)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    model.generation_config.pad_token_id = 0
    return model


def llava() -> PreTrainedModel:
    vision = {"model_type": "clip_vision_model", **PATCHES, "projection_dim": 16}
    return model_of("Llava", vision, "llama")


def gemma3() -> PreTrainedModel:
    return model_of("Gemma3", {"model_type": "siglip_vision_model", **PATCHES}, sliding_window=16)


def qwen2_vl() -> PreTrainedModel:
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": HIDDEN, "patch_size": 8}
    return model_of("Qwen2VL", vision, rope_parameters=IMAGE_PLACES)


@pytest.mark.parametrize("make", [llava, gemma3, qwen2_vl])
def test_texts_are_decoded_by_folder_and_with_custom_generate(make, tmp_path) -> None:
    model = make()
    expected = model.generate(IDS, **CALL)
    custom = Decoder.from_pretrained(model, draft="lookup").as_custom_generate()
    assert model.generate(IDS, custom_generate=custom, **CALL).equal(expected)
    model.save_pretrained(tmp_path)
    decoder = Decoder.from_pretrained(tmp_path, draft="lookup", dtype="float32")
    inputs = {"input_ids": IDS, "attention_mask": CALL["attention_mask"], "pixel_values": None}
    answers = decoder.generate(inputs, max_new_tokens=NEW).sequences
    assert answers == expected[:, IDS.shape[1] :].tolist()


def test_marks_of_texts_are_no_images() -> None:
    model = qwen2_vl()
    custom = Decoder.from_pretrained(model).as_custom_generate()
    marks = torch.zeros_like(IDS)
    found = model.generate(IDS, custom_generate=custom, mm_token_type_ids=marks, **CALL)
    assert found.equal(model.generate(IDS, **CALL))
    with pytest.raises(UserError, match="mm_token_type_ids is not supported"):
        model.generate(IDS, custom_generate=custom, mm_token_type_ids=marks + (IDS == 12), **CALL)


@pytest.mark.parametrize("nothing", [None, {}, [], (), torch.empty(0, 4), np.zeros(0), {"a": []}])
@pytest.mark.parametrize("something", [{"a": [1]}, [[1]], torch.ones(1), np.zeros(1), 0, False])
def test_inputs_without_elements_are_no_inputs(nothing, something) -> None:
    given = {"images": nothing, "pixel_values": something, "known": something}
    assert other_inputs(given, {"known"}) == ["pixel_values"]


def test_prompts_that_are_read_in_both_directions_are_refused(make_target) -> None:
    model = make_target().model
    model.config.use_bidirectional_attention = True  # of PaliGemma
    with pytest.raises(UserError, match="also sees those after it"):
        Target(model)
    model.config.use_bidirectional_attention = None


def test_a_folder_keeps_its_tokenizer(tmp_path) -> None:
    model = llava()
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert load_decoder_only(tmp_path, "float32", "cpu").tokenizer is not None
    assert model.config.text_config.vocab_size == VOCAB
