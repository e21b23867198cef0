"""transformers' assisted generation with an assistant of another tokenizer, as a baseline."""

from tiny import LETTERS, letters_model

from drafthead.core.sampling import SamplingConfig
from drafthead.infer import Decoder
from drafthead.lab.races.contestants import Transformers, changeable


def test_greedy_answers_with_another_tokenizer_are_the_targets_own() -> None:
    target, draft = letters_model(LETTERS), letters_model(LETTERS[::-1], ("ab", "cd"), seed=1)
    assisted = Transformers("assisted", "draft", SamplingConfig(), target, draft, 3)
    answers = assisted.decode([[0, 1, 2]], 24, seed=0)
    assert answers.sequences == Decoder(target).generate([0, 1, 2], max_new_tokens=24).sequences
    assert 0 < answers.decoded_tokens < 24  # the first pass may have given several


def test_sampling_changes_only_a_copy_that_shares_the_weights() -> None:
    target, draft = letters_model(LETTERS), letters_model(LETTERS[::-1], ("ab", "cd"), seed=1)
    twin, warm = changeable(draft), SamplingConfig(temperature=1.0)
    head = draft.model.get_output_embeddings()
    for length in (None, 3):
        answers = Transformers("assisted", "draft", warm, target, twin, length).decode(
            [[0, 1, 2]], 24, seed=0
        )
        assert len(answers.sequences[0]) == 24
    assert draft.model.get_output_embeddings() is head
    assert type(twin.model.get_output_embeddings()) is not type(head)
    for name, weight in draft.model.named_parameters():
        if "layers" in name:
            assert dict(twin.model.named_parameters())[name] is weight
