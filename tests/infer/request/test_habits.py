"""What one types from habit of other software: it is taken, or answered with the right word."""

import asyncio
from typing import Any

import pytest
import torch
from hidden_answers import generated
from tiny import byte_tokenizer, tiny_llama, write_target
from transformers import GenerationConfig

from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.infer import Decoder, Target
from drafthead.infer.request.options import NAMES
from drafthead.infer.request.other_words import OF_CALLS
from drafthead.lab.tracing import trace

WORD = [{"role": "user", "content": "hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": letter} for letter in "hi"]}]


@pytest.fixture(scope="module")
def speaking() -> Decoder:
    """A decoder of bytes."""
    model = tiny_llama(vocab_size=len(byte_tokenizer()))
    return Decoder.from_pretrained(model, tokenizer=byte_tokenizer())


def with_template(template: str) -> Decoder:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return Decoder.from_pretrained(tiny_llama(vocab_size=len(tokenizer)), tokenizer=tokenizer)


def prompt_of(decoder: Decoder, messages: Any, **options: Any) -> str:
    """What the model reads for messages."""
    ids = trace(decoder, messages, max_new_tokens=1, **options).prompt
    return str(decoder.tokenizer.decode(ids))


# ---- words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ({"do_sample": True}, "temperature above 0"),
        ({"stop": "x"}, "use stop_strings"),
        ({"max_tokens": 3}, "use max_new_tokens"),
        ({"max_length": 3}, "use max_new_tokens, or generation_config"),
        ({"return_dict_in_generate": True}, "always returned"),
        ({"use_cache": True}, r"generation_config=GenerationConfig\(use_cache"),
        ({"tools": []}, "chat_template_kwargs={'tools'"),
        ({"assistant_model": None}, "from_pretrained"),
        ({"stop_string": "x"}, "did you mean 'stop_strings'"),
    ],
)
def test_options_of_other_software_are_answered_with_ours(speaking, option, instead) -> None:
    with pytest.raises(UserError, match=instead):
        speaking.generate("hi", **option)


def test_what_becomes_a_processor_is_a_keyword_or_comes_in_a_config(speaking) -> None:
    penalty = {"repetition_penalty": 1.8, "frequency_penalty": 0.5}
    in_config = GenerationConfig(no_repeat_ngram_size=2, **penalty)
    expected = speaking.generate("hi", generation_config=in_config, max_new_tokens=24)
    config = GenerationConfig(no_repeat_ngram_size=2)
    found = speaking.generate("hi", generation_config=config, **penalty, max_new_tokens=24)
    assert found.sequences == expected.sequences and config.repetition_penalty is None
    assert found.sequences != speaking.generate("hi", max_new_tokens=24).sequences
    with pytest.raises(UserError, match="repetition_penalty must be a number, got 'x'"):
        speaking.generate("hi", repetition_penalty="x")


def test_no_option_is_called_another_word() -> None:
    assert not OF_CALLS.keys() & {*NAMES}


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"device_map": "auto"}, "use device"),
        ({"load_in_8bit": True}, 'dtype="int8"'),
        ({"attn_implementation": "eager"}, "pass the loaded model and tokenizer="),
        ({"dtype": 5}, "the name of a type or a torch type, got 5"),
        ({"dtype": "bf16", "torch_dtype": torch.bfloat16}, "are the same"),
        ({"tokenizer": 5}, "tokenizer must be one of transformers or its name"),
        ({"tokenizer": "/nowhere/at/all"}, "cannot load the tokenizer /nowhere/at/all"),
    ],
)
def test_words_of_transformers_at_loading(tmp_path, given, instead) -> None:
    write_target(tmp_path)
    with pytest.raises(UserError, match=instead):
        Decoder.from_pretrained(tmp_path, **given)


@pytest.mark.parametrize("given", [{"dtype": torch.bfloat16}, {"dtype": "bf16"}])
def test_types_have_several_names(tmp_path, given) -> None:
    write_target(tmp_path)
    for words in (given, {"torch_dtype": given["dtype"]}):
        decoder = Decoder.from_pretrained(tmp_path, device=torch.device("cpu"), **words)
        assert decoder.target.dtype == torch.bfloat16
    assert load_decoder_only(tmp_path, **given).dtype == torch.bfloat16


# ---- prompts ----------------------------------------------------------------------------------


def test_a_tokenizers_output_comes_by_its_names(speaking) -> None:
    inputs = speaking.tokenizer(["hi", "hello"], padding=True, return_tensors="pt")
    by_name = speaking.generate(**inputs, max_new_tokens=4)
    assert by_name.sequences == speaking.generate(inputs, max_new_tokens=4).sequences
    marks = torch.zeros_like(inputs["input_ids"])
    marked = speaking.generate(**inputs, token_type_ids=marks, max_new_tokens=4)
    assert marked.sequences == by_name.sequences
    with pytest.raises(UserError, match="twice"):
        speaking.generate("hi", **inputs)
    with pytest.raises(UserError, match="no prompt to decode"):
        speaking.generate(max_new_tokens=4)


def test_a_loaded_model_takes_a_tokenizer_and_answers_without_one_have_no_texts(speaking) -> None:
    alone = Decoder.from_pretrained(speaking.target.model)
    assert alone.tokenizer is None and speaking.generate("hi", max_new_tokens=4).texts
    with pytest.raises(UserError, match="no tokenizer.*tokenizer="):
        alone.generate("hi")
    result = alone.generate([1, 2], max_new_tokens=4)
    with pytest.raises(UserError, match="no tokenizer.*or read sequences"):
        _ = result.texts


def test_parts_that_are_texts_are_joined_and_others_refused(speaking) -> None:
    assert prompt_of(speaking, PARTS) == prompt_of(speaking, WORD)
    image = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}]
    with pytest.raises(UserError, match="part of type 'image', and only texts"):
        speaking.generate(image)


def test_a_template_that_reads_parts_alone_gets_parts() -> None:
    """On a string its loop runs over letters, which have no type."""
    decoder = with_template(
        "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}"
        "{{ part.text }}{% endif %}{% endfor %}{% endfor %}!"
    )
    assert {prompt_of(decoder, prompt) for prompt in (WORD, PARTS, "hi")} == {"hi!"}


LATE = [{"role": "developer", "content": "be brief"}, *WORD]


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (
            "{% for m in messages if m.role != 'developer' %}{{ m.content }}{% endfor %}",
            "writes nothing of the message of role 'developer': give it the role 'system'",
        ),
        (
            "{% for m in messages %}{% if m.role == 'developer' %}"
            "{{ raise_exception('which role?') }}{% endif %}{% endfor %}",
            "which role.; give the developer's the role 'system'",
        ),
    ],
)
def test_a_developers_message_is_written_or_refused(speaking, template, complaint) -> None:
    assert "be brief" in prompt_of(speaking, LATE)
    with pytest.raises(UserError, match=complaint):
        with_template(template).generate(LATE)


def test_a_template_may_change_what_it_writes() -> None:
    decoder = with_template("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    assert prompt_of(decoder, WORD) == "HI"


def test_an_answer_that_was_begun_goes_on_if_one_says_so(speaking) -> None:
    begun = [*WORD, {"role": "assistant", "content": "well"}]
    assert prompt_of(speaking, begun, continue_final_message=True).endswith("<|assistant|>well")
    turn = prompt_of(speaking, begun, continue_final_message=False)
    assert turn.endswith("well<|end|><|assistant|>")
    with pytest.raises(UserError, match="continue_final_message to True"):
        speaking.generate(begun)
    with pytest.raises(UserError, match="continue_final_message is for messages"):
        speaking.generate("hi", continue_final_message=True)


# ---- what one prints and waits for ------------------------------------------------------------


def test_decoders_and_results_are_printed_in_a_line(speaking) -> None:
    assert repr(speaking) == "Decoder(LlamaForCausalLM, no drafter, float32 on cpu)"
    drafting = Decoder.from_pretrained(speaking.target, draft="lookup")
    assert repr(drafting) == "Decoder(LlamaForCausalLM, PromptLookup, float32 on cpu)"
    printed = repr(speaking.generate("hi", max_new_tokens=4))
    assert printed.startswith("DecodeResult(1 answers of 4 tokens, length, ")
    assert "tau 1.00" in printed


def test_streams_are_read_by_async_for_while_the_loop_goes_on(speaking) -> None:
    async def heard() -> tuple[str, bool]:
        pieces, ran = [], False

        async def beside() -> None:
            nonlocal ran
            ran = True

        task = asyncio.create_task(beside())
        async for piece in speaking.stream("hi", max_new_tokens=6):
            pieces.append(piece)
        await task
        return "".join(pieces), ran

    assert asyncio.run(heard()) == (speaking.generate("hi", max_new_tokens=6).texts[0], True)


def test_targets_are_exported_beside_the_decoder() -> None:
    model = tiny_llama()
    answer = Decoder(Target(model)).generate([9, 10], max_new_tokens=4).sequences[0]
    assert answer == generated(model, [9, 10], 4)
