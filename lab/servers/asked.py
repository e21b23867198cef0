"""An OpenAI-compatible server as it is asked: tokens, their log-probabilities, and its counters."""

import re
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import requests
from tqdm import tqdm
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.train.distillation.connection import (
    PENALTY,
    UNFILTERED,
    ServerConnection,
    choice_of,
    find_model,
    stored_end_ids,
)

AT_ONCE = 4  # requests on their way
# vLLM's names; llama.cpp has the same ones, and SGLang the mean length of what a step accepts.
DRAFTS, ACCEPTED = "spec_decode_num_drafts", "spec_decode_num_accepted_tokens_per_pos"
LENGTH = "spec_accept_length"
METRIC = re.compile(r"^\w+:(\w+?)(?:_total)?(?:\{(.*)\})? ([\d.eE+-]+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Reply:
    """A server's answer to one request."""

    text: str
    ids: list[int]  # of the answer, its end included
    shows_ids: bool  # otherwise the text was encoded again, which may give other tokens
    logprobs: list[float] | None  # of the tokens
    prompt_ids: list[int] | None  # that it has read, where it says so
    prompt_tokens: int | None  # how many


@dataclass(frozen=True)
class DraftCounters:
    """Drafts of a server: how many there were, and how many were accepted to each position."""

    drafts: int
    accepted: tuple[int, ...]  # [K]
    mean_length: float | None = None  # tokens a step, of a server that says no more

    @property
    def length(self) -> float:
        """Tokens that a step gives, the target's own included."""
        if not self.drafts:
            return self.mean_length or 1.0
        return 1 + sum(self.accepted) / self.drafts

    def since(self, before: "DraftCounters") -> "DraftCounters":
        """Return what has been added since an earlier reading."""
        earlier = [*before.accepted, *[0] * len(self.accepted)]
        added = tuple(a - b for a, b in zip(self.accepted, earlier, strict=False))
        return DraftCounters(self.drafts - before.drafts, added, self.mean_length)


def counted(text: str) -> DraftCounters:
    """The counters of drafts in a page of metrics; zeros where there are none."""
    drafts, accepted, mean = 0.0, Counter[int](), None
    for name, labels, value in METRIC.findall(text):
        if name == DRAFTS:
            drafts += float(value)  # over all engines of a server
        elif name == ACCEPTED and (position := POSITION.search(labels)):
            accepted[int(position[1])] += int(float(value))
        elif name == LENGTH:
            mean = float(value)
    places = range(max(accepted, default=-1) + 1)
    return DraftCounters(int(drafts), tuple(accepted[place] for place in places), mean)


class AskedServer:
    """A model on a server, of whose target only the tokenizer is needed here."""

    def __init__(self, url: str, name: str | None, target: str, tokenizer: PreTrainedTokenizerBase):
        """The model of a name there; without one the target, or the only model that is served."""
        self.connection = ServerConnection(url)
        self.model = find_model(self.connection, name, target)
        self.tokenizer, self.end_ids = tokenizer, stored_end_ids(target, tokenizer)
        self.connection.be_patient()

    def complete(
        self, prompt: list[int], max_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> Reply:
        """The continuation of token ids; raises UserError when the server does not answer."""
        body = self._body(max_tokens, temperature, seed) | {"prompt": prompt, "logprobs": 1}
        return self._reply(self.connection.send("completions", body))

    def complete_all(
        self, prompts: Iterable[list[int]], max_tokens: int, temperature: float = 0.0
    ) -> list[Reply]:
        """The continuations of several prompts, under seeds from 0 on."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            futures = [
                pool.submit(self.complete, prompt, max_tokens, temperature, seed)
                for seed, prompt in enumerate(prompts)
            ]
            return [future.result() for future in tqdm(futures, unit="answer", leave=False)]

    def chat(self, question: str, max_tokens: int) -> Reply:
        """The greedy answer to a user's message, which the server renders itself."""
        messages = [{"role": "user", "content": question}]
        body = self._body(max_tokens, 0.0, 0) | {"messages": messages, "logprobs": True}
        return self._reply(self.connection.send("chat/completions", body))

    def counted(self) -> DraftCounters:
        """Its counters now; zeros where it shows none."""
        url = self.connection.url.removesuffix("/v1") + "/metrics"
        try:
            page = self.connection.session.get(url, timeout=10)
        except requests.RequestException:
            return DraftCounters(0, ())
        return counted(page.text if page.ok else "")

    def _body(self, max_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        """The fields of all requests: nothing of the model's own files is to change its answers."""
        return {
            "model": self.model.name,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "seed": seed,
            "return_token_ids": True,
            PENALTY: 1.0,
            **UNFILTERED,
        }

    def _reply(self, content: dict[str, Any]) -> Reply:
        """An answer, its tokens as far as the server shows them."""
        choice = choice_of(content, self.connection.url)
        text = choice.get("text")
        text = str(choice["message"].get("content") or "") if text is None else str(text)
        ids, logprobs = tokens_of(choice)
        found = self.tokenizer(text, add_special_tokens=False)["input_ids"] if ids is None else ids
        end = self.tokenizer.eos_token_id
        stopped = choice["finish_reason"] == "stop" and end is not None
        if stopped and not self.end_ids.intersection([*found][-1:]):
            found = [*found, end]  # which some servers do not show
        usage = content.get("usage") or {}
        prompt_ids = choice.get("prompt_token_ids") or content.get("prompt_token_ids")
        return Reply(
            text, [*found], ids is not None, logprobs, prompt_ids, usage.get("prompt_tokens")
        )


def tokens_of(choice: dict[str, Any]) -> tuple[list[int] | None, list[float] | None]:
    """Ids and log-probabilities of an answer, in OpenAI's two forms; None for what is not there.

    vLLM gives the ids apart, llama.cpp beside each log-probability.
    """
    ids, given = choice.get("token_ids"), choice.get("logprobs") or {}
    rows = given.get("content") or []
    if ids is None and rows and all("id" in row for row in rows):
        ids = [row["id"] for row in rows]
    found = given.get("token_logprobs") or [row["logprob"] for row in rows]
    return ids, [-float("inf") if one is None else float(one) for one in found] or None
