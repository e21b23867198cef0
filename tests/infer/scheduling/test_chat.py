"""Turns of a conversation are answered as in a new decoding, without reading it all again."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import byte_tokenizer, tiny_llama
from transformers import PreTrainedTokenizerFast

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.serving import ServeRequest

# Those that differ in what they know of a row.
CHATTING = ["none", "prompt-lookup", "draft-model", "own-layers", "medusa:tree", "hydra:own",
            "eagle:own", "eagle3:own", "parallel:own", "parallel:own+lookup"]  # fmt: skip
TURNS = ["hello", "and then?", "", "why"]
# Shows only the last answer: earlier turns are rewritten, so less of them can be reused.
FORGETFUL = (
    "{% for message in messages %}{% if message['role'] != 'assistant' or loop.index0 + 2 >= "
    "loop.length %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}<|assistant|>"
)


def chat_target(template: str | None = None) -> Target:
    tokenizer: PreTrainedTokenizerFast = byte_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    end = tokenizer.eos_token_id
    model = tiny_llama(vocab_size=len(tokenizer), eos_token_id=end, max_position_embeddings=512)
    return Target(model, tokenizer)


def decoder_with(name: str, target: Target, make_drafter) -> Decoder:
    return Decoder(target, None if name == "none" else make_drafter(name, target))


@pytest.mark.parametrize("name", CHATTING)
@pytest.mark.parametrize("template", [None, FORGETFUL], ids=["growing", "forgetful"])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8, "verifier": "match", "seed": 4}], ids=["greedy", "drawn"]
)
def test_every_turn_is_that_of_a_new_decoding(make_drafter, name, template, options) -> None:
    target = chat_target(template)
    decoder = decoder_with(name, target, make_drafter)
    session = decoder.chat("be brief", max_new_tokens=12, **options)
    reused = []
    for turn in TURNS:
        messages = [*session.messages, {"role": "user", "content": turn}]
        expected = Decoder(target).generate(messages, max_new_tokens=12, **options).texts[0]
        assert session.say(turn) == expected
        assert session.messages == [*messages, {"role": "assistant", "content": expected}]
        reused.append(session.reused)
    assert reused[0] == 0 and all(reused[1:])
    if template is None:
        assert reused == sorted(reused), "what was read stays"


@pytest.mark.parametrize("name", CHATTING)
def test_drafts_after_a_reused_prefix_are_those_of_a_new_decoding(make_drafter, name) -> None:
    decoder = decoder_with(name, chat_target(), make_drafter)
    session, lengths = decoder.chat(max_new_tokens=12), []
    begin = session.begin

    def watched(messages):
        run, method = begin(messages)
        lengths.append(run.stats.accept_lengths)
        return run, method

    session.begin = watched
    for turn in TURNS:
        messages = [*session.messages, {"role": "user", "content": turn}]
        session.say(turn)
        assert lengths[-1] == decoder.generate(messages, max_new_tokens=12).stats.accept_lengths


@pytest.mark.parametrize("name", ["none", "draft-model", "eagle3:own"])
def test_a_turn_that_is_broken_off_stays_as_it_is(make_drafter, name) -> None:
    target = chat_target()
    session = decoder_with(name, target, make_drafter).chat(max_new_tokens=30)
    pieces = session.stream("hello")
    first = next(pieces)
    pieces.close()
    assert session.messages[-1]["content"].startswith(first)
    messages = [*session.messages, {"role": "user", "content": "more"}]
    assert session.say("more") == Decoder(target).generate(messages, max_new_tokens=30).texts[0]
    assert session.reused > 0


def test_a_turn_that_fails_leaves_the_conversation_as_it_was() -> None:
    target = chat_target()
    session = Decoder(target).chat(max_new_tokens=8)
    session.say("hello")
    before = list(session.messages)
    with pytest.raises(UserError, match="context holds 512"):
        session.say("x" * 600)
    assert session.messages == before
    assert session.say("go on")


def test_chat_needs_a_template(target) -> None:
    with pytest.raises(UserError, match="chat template"):
        Decoder(target).chat()


QUICK = (
    "{% for t in tools or [] %}{{ t.name }}{% endfor %}{% for message in messages %}"
    "{{ message['content'] + '<|end|>' }}{% endfor %}<|assistant|>"
    "{{ 'quick' if quick else 'slow' }}"
)


def test_arguments_of_the_template_reach_every_prompt() -> None:
    decoder = Decoder(chat_target(QUICK))
    tokenizer = decoder.tokenizer
    assert tokenizer is not None
    arguments = {"quick": True, "tools": [{"type": "function", "name": "call"}]}
    ids = tokenizer("callhi<|end|><|assistant|>quick")["input_ids"]
    [expected] = decoder.generate(ids, max_new_tokens=8).sequences
    options = {"max_new_tokens": 8, "chat_template_kwargs": arguments}
    assert decoder.generate("hi", **options).sequences == [expected]
    assert decoder.generate([{"role": "user", "content": "hi"}], **options).sequences == [expected]
    session = decoder.chat(**options)
    session.say("hi")
    assert session.past.tokens == [*ids, *expected]
    asked = [ServeRequest("hi", options={"chat_template_kwargs": arguments}), "hi"]
    own, other = sorted(decoder.serve(asked, max_new_tokens=8), key=lambda answer: answer.id)
    assert own.tokens == expected != other.tokens
    decoder.remember("hi", arguments)
    assert decoder.generate("hi", **options).stats.reused >= len(ids) - 1


@pytest.mark.parametrize(
    ("prompt", "arguments", "sentence"),
    [
        ("hi", {"quik": True}, "does not read quik"),
        ("hi", {"tokenize": True}, "tokenize is set by drafthead"),
        ([5, 6], {"quick": True}, "for prompts that are texts or messages"),
        ("hi", ["quick"], "must be a mapping of names"),
    ],
)
def test_arguments_without_effect_are_refused(prompt, arguments, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        Decoder(chat_target(QUICK)).generate(prompt, chat_template_kwargs=arguments)


@pytest.mark.parametrize("change", ["weights", "adapter"])
def test_a_turn_after_a_change_is_that_of_a_new_decoding(change) -> None:
    target = chat_target()
    options = LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = get_peft_model(target.model, options)
    target = Target(adapted, target.tokenizer)
    session = Decoder(target).chat(max_new_tokens=12)
    session.say("hello there")
    if change == "adapter":
        adapted.base_model.disable_adapter_layers()
    else:
        with torch.no_grad():
            target.layers[0].mlp.up_proj.weight.mul_(1.5)
    messages = [*session.messages, {"role": "user", "content": "and now?"}]
    expected = Decoder(target).generate(messages, max_new_tokens=12).texts[0]
    assert session.say("and now?") == expected and session.reused == 0
    session.say("still?")
    assert session.reused > 0, "what the new weights have read"
