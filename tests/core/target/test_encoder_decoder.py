"""Encoder-decoder architectures: greedy answers equal to `model.generate`, or a clear refusal."""

import pytest
import torch
from hidden_answers import check_every_right_token_is_accepted, generated
from tiny import ENCODER_DECODERS, VOCAB, random_prompts, tiny_encoder_decoder
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from drafthead.contrib.encoder_decoder.decoder_positions import distance_bias
from drafthead.contrib.encoder_decoder.encoder_decoder import EncoderDecoderTarget
from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only, load_target, target_of
from drafthead.core.target.target import Target
from drafthead.infer import Decoder

SOURCE_LENGTHS, NEW = (5, 17, 2), 12
LONGEST = 64  # positions of the small BART


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_greedy_answers_equal_those_of_transformers(name: str) -> None:
    target = target_of(tiny_encoder_decoder(name))
    sources = [torch.randint(8, VOCAB, (n,)).tolist() for n in SOURCE_LENGTHS]
    answers = {tuple(generated(target.model, source, NEW + 4)) for source in sources}
    assert len(answers) == len(sources), "answers must depend on the source"
    check_every_right_token_is_accepted(target, sources, NEW)


def test_a_node_has_the_bias_of_its_depth() -> None:
    """Two committed tokens, a gap to a longer row, then a root, two children and a grandchild."""
    target = target_of(tiny_encoder_decoder("t5"))
    seen = ["11.1...", "11.11..", "11.1.1.", "11.1.11"]
    mask = torch.tensor([[mark == "1" for mark in row] for row in seen])
    scores = torch.zeros(1, 1, 4, 7).masked_fill(~mask, torch.finfo(torch.float32).min)
    attention = target.decoder.block[0].layer[0].SelfAttention
    bias = distance_bias(attention, scores)
    plain = attention.compute_bias(5, 5)  # of a text of 5 tokens without a tree
    for node, columns in enumerate([[0, 1, 3], [0, 1, 3, 4], [0, 1, 3, 5], [0, 1, 3, 5, 6]]):
        position = len(columns) - 1
        expected = plain[0, :, position, : position + 1]
        torch.testing.assert_close(bias[0, :, node, columns], expected)


REFUSED = {
    "umt5": "counts positions by itself",
    "m2m_100": "counts positions by itself",
    "prophetnet": "counts positions by itself",
    "led": "counts positions by itself",
    "pegasus_x": "counts positions by itself",
    "switch_transformers": "experts take so many tokens",
}


@pytest.mark.parametrize("name", REFUSED)
def test_targets_that_cannot_hold_a_tree_are_refused_with_the_reason(name: str) -> None:
    config = AutoConfig.for_model(name)
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(config).eval()
    with pytest.raises(UserError, match=REFUSED[name]):
        target_of(model)


def test_attention_that_takes_no_mask_is_refused() -> None:
    model = tiny_encoder_decoder("bart")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="flash_attention_2 attention.*attn_implementation='sdpa'"):
        target_of(model)


def test_a_model_that_names_no_first_token_is_refused() -> None:
    model = tiny_encoder_decoder("t5")
    model.generation_config.decoder_start_token_id = None
    model.generation_config.bos_token_id = None
    with pytest.raises(UserError, match="decoder_start_token_id in its generation_config.json"):
        target_of(model)


def test_each_class_refuses_models_of_the_other(make_target, tmp_path) -> None:
    with pytest.raises(UserError, match="is an encoder-decoder model.*decoder-only"):
        Target(tiny_encoder_decoder("t5"))
    with pytest.raises(UserError, match="not an encoder-decoder model"):
        EncoderDecoderTarget(make_target().model)
    tiny_encoder_decoder("bart").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path} is an encoder-decoder model"):
        load_decoder_only(tmp_path)
    assert isinstance(load_target(tmp_path), EncoderDecoderTarget)


def test_a_table_of_positions_ends_sources_and_answers() -> None:
    decoder = Decoder(target_of(tiny_encoder_decoder("bart")))
    source = torch.randint(8, VOCAB, (LONGEST,)).tolist()
    answer = decoder.generate(source, max_new_tokens=100).sequences[0]
    start = len(decoder.target.decoder_prompt)
    assert answer == generated(decoder.target.model, source, LONGEST - start)
    with pytest.raises(UserError, match="65 tokens, but the encoder reads 64"):
        decoder.generate([*source, 8])


def test_t5_has_no_longest_text() -> None:
    target = target_of(tiny_encoder_decoder("t5"))
    source = random_prompts(1)[0] * 10
    answer = Decoder(target).generate(source, max_new_tokens=100).sequences[0]
    assert answer == generated(target.model, source, 100)
