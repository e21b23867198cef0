"""A rule of somebody else with an option of its own: Python, the shell, and a server take it."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient
from tiny import byte_tokenizer, tiny_llama

from drafthead.core.errors import UserError
from drafthead.core.sampling import RowRandom
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import TokenTree
from drafthead.infer import Decoder, ServeRequest
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.verifiers.base import VERIFIERS, Acceptance, path_to, register_verifier
from drafthead.scripts import cli
from drafthead.serve.app import make_app
from drafthead.serve.server_options import ServerOptions

LETTERS = "abcdefgh"


@dataclass(frozen=True)
class Fixed:
    """Lossy: accept nothing, and go on with one token whatever the target thinks."""

    token: int = ord("a")

    def __call__(
        self, tree: TokenTree, scores: torch.Tensor, random: RowRandom | None
    ) -> Acceptance:
        root = torch.zeros(scores.shape[0], dtype=torch.long)
        return path_to(tree, root, torch.full_like(root, self.token))


@pytest.fixture(autouse=True)
def rule() -> Iterator[None]:
    register_verifier("fixed", lossless=False, reads="logits", greedy=True)(Fixed())
    yield
    del VERIFIERS["fixed"]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    tokenizer = byte_tokenizer()
    return Decoder(Target(tiny_llama(vocab_size=len(tokenizer)), tokenizer), PromptLookup(3))


def repeated(text: str, letter: str) -> bool:
    """Whether a text is a letter again and again, after the token that no rule has chosen."""
    return len(text) > 3 and set(text[-4:]) == {letter}


def number_of(decoder: Decoder, letter: str) -> int:
    assert decoder.tokenizer is not None
    return int(decoder.tokenizer(letter, add_special_tokens=False)["input_ids"][0])


def test_its_option_is_a_keyword_of_every_way_to_decode(decoder) -> None:
    token = number_of(decoder, "h")
    rule = {"verifier": "fixed", "token": token, "max_new_tokens": 6}
    assert repeated(decoder.generate("hi", **rule).texts[0], "h")
    assert repeated("".join(decoder.stream("hi", **rule)), "h")
    written = decoder.generate("hi", verifier=f"fixed:token={token}", max_new_tokens=6)
    assert repeated(written.texts[0], "h")
    asked = [
        ServeRequest("hi", max_new_tokens=6, options={**rule, "token": number_of(decoder, letter)})
        for letter in LETTERS
    ]
    answers = {answer.id: answer.text for answer in decoder.serve(asked, max_rows=4)}
    assert all(repeated(answers[n], letter) for n, letter in enumerate(LETTERS))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"verifier": "fixed", "token": 1.5}, "token must be an integer, got 1.5"),
        ({"verifier": "fixed", "tokens": 1}, "unknown option 'tokens': did you mean 'token'"),
        ({"verifier": "greedy", "token": 1}, "'greedy' has no option token; it is one of fixed"),
        ({"token": 1}, "'auto' has no option token; it is one of fixed"),
        ({"verifier": "fixed:max_new_tokens=999"}, "'fixed' has no option max_new_tokens"),
        ({"verifier": "fixed", "temperature": 1}, "'fixed' would ignore temperature 1"),
    ],
)
def test_a_wrong_one_is_named(decoder, given, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        decoder.generate("hi", **given)


def test_the_shell_takes_it(decoder, tmp_path: Path, monkeypatch, capsys) -> None:
    decoder.target.model.save_pretrained(tmp_path)
    decoder.tokenizer.save_pretrained(tmp_path)
    words = ["generate", "--target", str(tmp_path), "--draft", "lookup", "--prompt", "hi"]
    rules = {f"fixed:token={number_of(decoder, 'h')}": 0, "fixed:tokens=3": 2, "fixed:token=h": 2}
    for rule, status in rules.items():
        monkeypatch.setattr(
            sys, "argv", ["drafthead", *words, "--max-new-tokens", "6", "--rule", rule]
        )
        with pytest.raises(SystemExit) as stop:
            cli.main()
        said = capsys.readouterr()
        assert (stop.value.code or 0) == status, said.err
        assert repeated(said.out.strip(), "h") if status == 0 else "token" in said.err


def test_a_client_of_the_server_asks_for_it(decoder) -> None:
    body = {"prompt": "hi", "temperature": 0, "max_tokens": 6, "verifier": "fixed"}
    with TestClient(make_app(decoder, ServerOptions("tiny"))) as client:
        for letter in "hi":
            asked = body | {"token": number_of(decoder, letter)}
            whole = client.post("/v1/completions", json=asked).json()
            assert repeated(whole["choices"][0]["text"], letter)
        for wrong, named in (
            ({"token": "x"}, "token"),
            ({"tokens": 3}, "tokens"),
            ({"verifier": "other"}, "other"),
            ({"temperature": 1}, "temperature"),
            ({"rule_options": {"max_new_tokens": 999}}, "rule_options"),
        ):
            refused = client.post("/v1/completions", json=body | wrong)
            assert refused.status_code == 400, wrong
            assert named in refused.json()["error"]["message"], wrong
