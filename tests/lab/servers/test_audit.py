"""The audit of a server: a right one passes, and each fault that servers have had is found."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from completion_server import Completions, serving
from tiny import llama_config
from transformers import LlamaForCausalLM, RepetitionPenaltyLogitsProcessor
from written import EAGLE3, random_head

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.request.prompts import encode_one
from drafthead.lab.diagnosis.findings import Finding
from drafthead.lab.races.record import QUESTIONS
from drafthead.lab.servers.acceptance import by_position, misread, rebuilt, same
from drafthead.lab.servers.asked import AskedServer, DraftCounters, counted
from drafthead.lab.servers.audit import CHECKS, Audit

MODEL = Path(__file__).parents[3] / "assets" / "demo_target"
NEW = 8


@dataclass
class Faulty(Completions):
    """A server of the embedded model, which may be wrong in one way."""

    fault: str = ""
    drafts: int = 0  # counted
    known: ClassVar[dict[tuple[int, ...], torch.Tensor]] = {}  # logits after texts, of all tests

    def shown(self, path: str) -> dict | str | None:
        if path != "/metrics":
            return super().shown(path)
        return (
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {self.drafts}.0\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} 3.0\n'
        )

    def answered(self, path: str, body: dict) -> dict:
        tokenizer = self.decoder.tokenizer
        if path.endswith("/chat/completions"):
            question = body["messages"][0]["content"]
            prompt = encode_one(question, tokenizer)
            if self.fault == "BOS":
                prompt = [tokenizer.bos_token_id, *prompt]
            if self.fault == "template":
                prompt = encode_one(f"Please: {question}", tokenizer)
            if self.fault == "no template":
                prompt = list(tokenizer(question)["input_ids"])
        else:
            prompt = body["prompt"]
        temperature = body["temperature"] * (1.6 if self.fault == "temperature" else 1)
        penalty = body.get("repetition_penalty", 1.8 if self.fault == "penalty" else 1.0)
        ids, logprobs = self.drawn(prompt, body["max_tokens"], temperature, body["seed"], penalty)
        if self.fault == "logprobs":
            logprobs[1:] = [0.0] * (len(ids) - 1)  # as llama.cpp's where it drafts
        if self.fault == "vocabulary":
            ids = [token + 100_000 for token in ids]
        choice = {
            "finish_reason": "length",
            "logprobs": {"token_logprobs": logprobs},
            **({"token_ids": ids, "prompt_token_ids": prompt} if self.shows_ids else {}),
        }
        text = "" if self.fault == "vocabulary" else tokenizer.decode(ids)
        choice |= {"message": {"content": text}} if "messages" in body else {"text": text}
        self.drafts += 1
        return {"choices": [choice], "usage": {"prompt_tokens": len(prompt)}}

    @torch.no_grad()
    def drawn(self, prompt, count, temperature, seed, penalty) -> tuple[list[int], list[float]]:
        """Tokens one by one; every fourth one is wrong where drafted ones are to be."""
        generator, ids, logprobs = torch.Generator().manual_seed(seed), [], []
        for place in range(count):
            text = *prompt, *ids
            with self.lock:
                if text not in self.known:
                    given = prompt, torch.tensor([ids]).long(), 1
                    self.known[text] = self.decoder.target.plain_logits(*given)[0].float()
            context, logits = torch.tensor([text]), self.known[text].clone()
            logits = RepetitionPenaltyLogitsProcessor(penalty)(context, logits)
            law = logits[0].log_softmax(-1)
            token = int(law.argmax())
            if temperature and place and self.fault == "residual":
                token = int(law.argmin())
            elif temperature:
                probs = (law / temperature).softmax(-1)
                token = int(torch.multinomial(probs, 1, generator=generator))
            elif place % 4 == 3 and self.fault == "shifted":
                token = (token + 1) % len(law)
            elif place % 4 == 3 and self.fault == "corrupt":
                token = int(law.topk(40).indices[20 + place])
            ids.append(token)
            logprobs.append(float(law[token]))
        return ids, logprobs


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    decoder = Decoder.from_pretrained(MODEL)
    decoder.tokenizer.bos_token = decoder.tokenizer.eos_token  # it has none
    return decoder


@pytest.fixture
def audited(decoder):
    """The findings about a server with a fault, by the names of the checks."""

    @contextmanager
    def audit(**options) -> Iterator[Audit]:
        completions = Faulty(decoder, **options)
        with serving(completions) as url:
            server = AskedServer(url, None, str(MODEL), decoder.tokenizer)
            prompts = [encode_one(text, decoder.tokenizer) for text in QUESTIONS[:3]]
            yield Audit(server, decoder.target, prompts, NEW, samples=120)

    def findings(*names: str, **options) -> dict[str, Finding]:
        with audit(**options) as one:
            chosen = {name: look for name, look in CHECKS.items() if not names or name in names}
            return {name: found for name, look in chosen.items() if (found := look(one))}

    return findings


TEXT, COPIES, TEMPLATE = "text at temperature 0", "identifiers that are copied", "chat template"
LOGPROBS, SAMPLING, DRAFTS = "log-probabilities", "sampling at temperature 1", "accepted drafts"


def test_a_right_server_passes(audited):
    found = audited()
    assert set(found) == {TEXT, COPIES, TEMPLATE, LOGPROBS, SAMPLING, DRAFTS}
    assert not [name for name, one in found.items() if one.is_fault]
    assert "24 tokens in 3 answers" in found[TEXT].evidence
    assert "of 3 drafts 0%" in found[DRAFTS].evidence  # what was counted before is no part of it


def test_a_penalty_of_the_models_own_files_is_switched_off(audited):
    """vLLM and `drafthead serve` apply it where a request does not say otherwise."""
    found = audited(TEXT, COPIES, TEMPLATE, LOGPROBS, fault="penalty", shows_ids=False)
    assert not [name for name, one in found.items() if one.is_fault]


def test_settings_that_no_request_switches_off_are_a_likely_cause(audited, decoder, monkeypatch):
    monkeypatch.setattr(decoder.target.model.generation_config, "no_repeat_ngram_size", 3)
    found = audited(TEXT, fault="corrupt")[TEXT]
    assert found.remedy.startswith("what its generation config says may be applied (no_repeat_")


def test_a_right_server_that_shows_text_alone_passes(audited):
    found = audited(shows_ids=False)
    assert not [name for name, one in found.items() if one.is_fault]
    assert "encoded again" in found[TEXT].evidence
    assert "not tested" in found[SAMPLING].evidence


@pytest.mark.parametrize(
    ("fault", "shows_ids", "check", "told"),
    [
        ("BOS", True, TEMPLATE, "BOS twice"),
        ("BOS", False, TEMPLATE, "BOS twice"),
        ("template", True, TEMPLATE, r"another template: from token \d+ on .*Please"),
        ("template", False, TEMPLATE, "another template"),
        ("no template", False, TEMPLATE, "no chat template"),
        ("shifted", True, TEXT, r"right ones \+1: the vocabulary has an offset"),
        ("corrupt", True, TEXT, "single tokens are not the target's: drafts are accepted"),
        ("corrupt", True, COPIES, "single tokens are not the target's"),
        ("temperature", True, SAMPLING, r"as at temperature 1\.[4-8]"),
        ("residual", True, SAMPLING, "those that drafting brings do not"),
        ("logprobs", True, LOGPROBS, "most are 0.0"),
    ],
)
def test_a_fault_is_found_and_named(audited, fault, shows_ids, check, told):
    found = audited(TEXT, check, fault=fault, shows_ids=shows_ids)[check]
    assert found.is_fault
    assert re.search(told, found.remedy), found


def test_tokens_that_the_target_does_not_have_name_another_model(audited):
    with pytest.raises(UserError, match=r"answered with token 10\d+, and --target has \d+ tokens"):
        audited(TEXT, fault="vocabulary")


@pytest.mark.parametrize("fault", ["", "logprobs"])
def test_the_verb_prints_a_verdict_and_its_status_says_it(decoder, fault, tmp_path, drafthead):
    record = tmp_path / "audit.json"
    with serving(Faulty(decoder, fault=fault)) as url:
        words = ("--limit", "2", "--samples", "40", "--max-new-tokens", "8", "--output", record)
        status, out, _ = drafthead("audit", url, "--target", MODEL, *words)
    assert status == bool(fault)
    assert ("FAIL: log-probabilities" if fault else "PASS: ") in out and TEMPLATE in out
    assert bool(json.loads(record.read_text())["findings"][LOGPROBS]["remedy"]) == bool(fault)


def test_counters_are_read_by_any_of_their_names():
    llama = """# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 40
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 20
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 10
"""
    assert counted(llama) == DraftCounters(40, (20, 10))
    assert counted('sglang:spec_accept_length{model_name="m"} 2.25') == DraftCounters(0, (), 2.25)
    two = [f'vllm:spec_decode_num_drafts_total{{engine="{e}"}} 1.5e+01\n' for e in (0, 1)]
    assert counted("".join(two)).drafts == 30 and counted("<html>") == DraftCounters(0, ())
    assert DraftCounters(40, (20, 10)).since(DraftCounters(10, (5,))) == DraftCounters(30, (15, 10))


def test_counts_that_differ_by_chance_are_the_same():
    ours = DraftCounters(1000, (600, 400))
    assert same(DraftCounters(1000, (620, 390)), ours) and not same(
        DraftCounters(1000, (600, 300)), ours
    )
    assert "only later" in by_position(DraftCounters(1000, (600, 300)), ours)
    assert "hardly a first" in by_position(DraftCounters(1000, (30, 5)), ours)
    assert "first guesses are worse" in by_position(DraftCounters(1000, (450, 200)), ours)
    assert same(DraftCounters(0, (), 1.9), DraftCounters(9, (9,)))
    assert not same(DraftCounters(0, (), 1.2), DraftCounters(9, (9,)))


def test_drafts_that_are_not_compared_are_refused_before_anything_is_asked():
    with pytest.raises(UserError, match="--head mtp: drafts of head, model, lookup, ngrams are"):
        Audit(None, None, [], NEW, samples=0, draft="mtp")


def test_a_head_can_be_misread_in_each_known_way():
    torch.manual_seed(0)
    target = Target(LlamaForCausalLM(llama_config(num_hidden_layers=8)))
    head = random_head("eagle3", target, {**EAGLE3, "draft_vocab_size": 20})
    found = dict(misread(head))
    assert len(found) == 5 and all(other.depth == head.depth for other in found.values())
    taps = [other.config.taps for name, other in found.items() if name.startswith("tapped")]
    assert taps == [tuple(t + 1 for t in head.config.taps), tuple(t - 1 for t in head.config.taps)]
    assert rebuilt(head).config == head.config
