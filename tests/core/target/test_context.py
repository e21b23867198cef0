"""How long a text the positions of a target allow: the text of transformers, or a sentence."""

import pytest
import torch
from hidden_answers import generated
from tiny import VOCAB, llama_config, tiny_llama

from drafthead.core.errors import UserError
from drafthead.core.target.context import Context
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.drafters.lookup import PromptLookup

TRAINED, NEW = 32, 40
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
KINDS = {"linear": {}, "yarn": {}, "dynamic": {}, "longrope": FACTORS}


def scaled(kind: str) -> Target:
    """A target that was trained on short texts, whose positions are scaled by 4."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **KINDS[kind]}
    return Target(tiny_llama(max_position_embeddings=TRAINED, rope_parameters=rope))


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("kind", ["linear", "yarn"])
@pytest.mark.parametrize("length", [20, TRAINED + 8])
def test_stretched_positions_go_on_past_what_was_trained(kind, length, prompt) -> None:
    target, long = scaled(kind), (2 * prompt)[:length]
    answer = Decoder(target, PromptLookup(depth=3)).generate(long, max_new_tokens=NEW).sequences[0]
    assert answer == generated(target.model, long, NEW)
    assert target.max_length == 4 * TRAINED


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_changing_frequencies_are_refused_and_never_reached(kind, prompt) -> None:
    target = scaled(kind)
    decoder = Decoder(target, PromptLookup(depth=3))
    room = TRAINED - len(prompt)
    with pytest.raises(UserError, match=f"past {TRAINED}.*{kind}.*to at most {room}$"):
        decoder.generate(prompt, max_new_tokens=room + 1)
    answer = decoder.generate(prompt, max_new_tokens=room).sequences[0]
    assert answer == generated(target.model, prompt, room)


def test_changing_frequencies_are_refused_with_custom_generate(prompt) -> None:
    target = scaled("dynamic")
    custom = Decoder(target).as_custom_generate()
    with pytest.raises(UserError, match="to at most 12$"):
        target.model.generate(torch.tensor([prompt]), max_new_tokens=13, custom_generate=custom)


def test_parameters_for_each_kind_of_layer_are_not_stretched_again() -> None:
    """Gemma 3's parameters have a factor, and max_position_embeddings counts it already."""
    config = llama_config(max_position_embeddings=TRAINED)
    config.rope_parameters = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert Context.of(config) == Context(TRAINED)
