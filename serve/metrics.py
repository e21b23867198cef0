"""Metrics of a server, under vLLM's names: dashboards and load testers read them unchanged."""

import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import prometheus_client as prometheus

LABELS = ("model_name", "engine")
FIRST = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96)
BETWEEN = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.32, 0.64, 1.28)
WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0)


class Metrics:
    """The counters of one server."""

    def __init__(self, model_name: str):
        self.registry = prometheus.CollectorRegistry()
        self.labels = (model_name, "0")
        counter = partial(self._made, prometheus.Counter)
        gauge = partial(self._made, prometheus.Gauge)
        times = partial(self._made, prometheus.Histogram, text="Seconds.")
        self.drafts = counter("spec_decode_num_drafts", "Steps that verified a draft.")
        self.proposed = counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Accepted drafts.")
        of_places = "Drafts that were accepted, by their place after the last token."
        self.by_place = counter("spec_decode_num_accepted_tokens_per_pos", of_places, "position")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = counter("prompt_tokens_cached", "Of these, read before.")
        self.new_tokens = counter("generation_tokens", "Tokens of answers.")
        self.ended = counter("request_success", "Answers, by why they ended.", "finished_reason")
        self.running = gauge("num_requests_running", "Answers that are being decoded.")
        self.waiting = gauge("num_requests_waiting", "Requests that wait for a row.")
        self.first = times("time_to_first_token_seconds", buckets=FIRST)
        self.between = times("inter_token_latency_seconds", buckets=BETWEEN)
        self.whole = times("e2e_request_latency_seconds", buckets=WHOLE)

    def _made(self, kind: Any, name: str, text: str, by: str = "", **options: Any) -> Any:
        """A counter, a gauge or a histogram with this server's labels; `by` one more: one each."""
        labels = [*LABELS, by] if by else LABELS
        made = kind(f"vllm:{name}", text, labels, registry=self.registry, **options)
        return partial(made.labels, *self.labels) if by else made.labels(*self.labels)

    def page(self) -> bytes:
        """Return the page that Prometheus scrapes."""
        return prometheus.generate_latest(self.registry)

    def note_step(self, proposed: int, accepted: int) -> None:
        """Count one verified draft."""
        self.drafts.inc()
        self.proposed.inc(proposed)
        self.accepted.inc(accepted)
        for place in range(accepted):
            self.by_place(str(place)).inc()


@dataclass
class AnswerMetrics:
    """The time, steps and drafts of one answer, counted for the server as well."""

    server: Metrics
    began: float = field(default_factory=time.monotonic)
    last: float | None = None  # when tokens came
    steps: Counter[int] = field(default_factory=Counter)  # by accepted drafts
    proposed: int = 0

    def note_prompt(self, tokens: int, cached: int) -> None:
        """Count a prompt that was read, and how many of its tokens had been read before."""
        self.server.prompt_tokens.inc(tokens)
        self.server.cached_tokens.inc(cached)

    def note(self, tokens: int, proposed: int, accepted: int) -> None:
        """Count a pass that brought tokens."""
        now = time.monotonic()
        if self.last is None:
            self.server.first.observe(now - self.began)
        else:
            for _ in range(tokens):
                self.server.between.observe((now - self.last) / tokens)
        self.last = now
        self.server.new_tokens.inc(tokens)
        if proposed:
            self.steps[accepted] += 1
            self.proposed += proposed
            self.server.note_step(proposed, accepted)

    def end(self, reason: str) -> None:
        """Count the end of an answer."""
        self.server.whole.observe(time.monotonic() - self.began)
        self.server.ended(reason).inc()


def speculation(answers: list[AnswerMetrics]) -> dict[str, Any]:
    """Return statistics of the drafts in some answers, in vLLM's form."""
    steps = sum((answer.steps for answer in answers), Counter[int]())
    count = steps.total()
    accepted = sum(length * times for length, times in steps.items())
    proposed = sum(answer.proposed for answer in answers)
    return {
        "mean_acceptance_length": 1 + accepted / count if count else 1.0,
        "draft_acceptance_rate": accepted / proposed if proposed else 0.0,
        "acceptance_histogram": [steps[length] for length in range(max(steps, default=-1) + 1)],
        "num_spec_steps": count,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": proposed,
    }
