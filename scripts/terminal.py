"""Answers in a terminal: printed while they are decoded, with a line about their speed."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.errors import UserError
from drafthead.core.printing import shown, visible
from drafthead.infer import Decoder, DecodeResult, Logprobs
from drafthead.infer.chat_session import ChatSession
from drafthead.infer.engine.stats import DecodeStats
from drafthead.infer.request.stopping import FinishReason
from drafthead.infer.request.text_pieces import GrowingAnswer

PROMPT = "> "
QUIT = "/quit"
DRAFTED = "green"
CUT = {"length": "; cut off: raise --max-new-tokens for more", "cancelled": "; stopped"}


def prompt_text(prompt: str | None) -> str:
    """The prompt, or standard input; raises UserError when it is empty."""
    text = prompt if prompt is not None else sys.stdin.read()
    if not text.strip():
        raise UserError("the prompt is empty: use --prompt, or pipe text into standard input")
    return text


def print_answer(decoder: Decoder, prompt: str, how: dict[str, Any]) -> DecodeResult:
    """Print the answer while it is decoded, or several answers together, and return them."""
    config = how.get("generation_config")
    if config is None or not (
        (config.num_return_sequences or 1) > 1 or (config.num_beams or 1) > 1
    ):
        stream = decoder.stream(prompt, **how)
        for piece in stream:
            print(piece, end="", flush=True)
        print()
        return stream.result
    result = decoder.generate(prompt, **how)
    for number, text in enumerate(result.texts):
        score = "" if result.scores is None else f" score {result.scores[number]:.4f}"
        print(f"[{number}]{score}\n{text}")
    return result


def logprob_lines(
    tokens: Sequence[int], record: Logprobs, tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """A line for each token: log-probability when chosen, the target's own, and alternatives."""

    def named(token: int) -> str:
        return shown(tokenizer.decode([token]))

    yield "chosen   target   token"
    for token, processed, raw, top in zip(
        tokens, record.processed, record.raw, record.top, strict=True
    ):
        others = ", ".join(f"{named(other)} {value:.3f}" for other, value in top)
        yield f"{processed:8.3f} {raw:8.3f} {named(token)}{' | ' if others else ''}{others}"


def summary(result: DecodeResult) -> str:
    """One line: tokens, why the answer ended, speed, tau and the time of each phase."""
    stats = result.stats
    phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in stats.seconds.items())
    tokens = sum(map(len, result.sequences))
    ends = ", ".join(dict.fromkeys(str(reason) for reason in result.finish_reasons))
    return (
        f"[{tokens} tokens, ended by {ends}, {stats.tokens_per_second:.1f} tokens/s, "
        f"{stats.steps} steps, tau {stats.tau:.2f}; {phases}]"
    )


def messages() -> Iterator[str]:
    """The lines that the user writes, until /quit or the end of the input."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # `input` then has a history, and arrow keys
    prompt = PROMPT if sys.stdin.isatty() else ""
    while True:
        try:
            message = input(prompt).strip()
        except EOFError:
            return
        if message == QUIT:
            return
        if message:
            yield message


def print_turn(session: ChatSession, message: str, console: Console, show_drafts: bool) -> None:
    """Print the answer to a message while it is decoded, then a line about its speed."""
    passes = session.steps(message)
    text = GrowingAnswer(session.tokenizer, after=session.prompt)
    try:
        for tokens in passes:
            for place, token in enumerate(tokens):
                drafted = show_drafts and place < len(tokens) - 1
                console.print(Text(visible(text.add(token)), DRAFTED if drafted else ""), end="")
        console.print(Text(visible(text.rest())))
    except KeyboardInterrupt:
        console.print()
    finally:
        passes.close()
    (reason,) = passes.result.finish_reasons
    console.print(Text(turn_summary(passes.stats, session.reused, reason), "dim"))


def turn_summary(stats: DecodeStats, reused: int, reason: FinishReason | None) -> str:
    """One line about a turn: tokens, speed, tau, what of the prompt was read before, and whether
    the answer was cut.
    """
    tokens = sum(stats.decoded_tokens) + len(stats.decoded_tokens)
    return (
        f"[{tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, tau {stats.tau:.2f}, "
        f"{reused} positions of the prompt reused{CUT.get(reason or '', '')}]"
    )
