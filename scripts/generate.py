"""`drafthead generate`: decode from the shell, as `Decoder` does from Python."""

import sys
from typing import Annotated

import typer
from transformers.generation.configuration_utils import GenerationConfig

from drafthead.heads.errors import UserError
from drafthead.infer import Decoder, DecodeStats
from drafthead.infer.decoder import DEFAULT_CHAIN
from drafthead.scripts import options


def main(
    target: options.TargetName,
    prompt: Annotated[
        str | None, typer.Option(help="The user's message; by default standard input.")
    ] = None,
    head: options.HeadFolder = None,
    draft_model: options.DraftModelName = None,
    prompt_lookup: options.PromptLookupSwitch = False,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            help="Keep tokens with at least this share of the best one's probability; 0 keeps all."
        ),
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens of prompt and answer become less probable.")
    ] = 1.0,
    frequency_penalty: Annotated[
        float,
        typer.Option(help="Subtracted from a token's logit for each time it occurs in the answer."),
    ] = 0.0,
    presence_penalty: Annotated[
        float,
        typer.Option(help="Subtracted from the logit of every token that occurs in the answer."),
    ] = 0.0,
    no_repeat_ngram_size: Annotated[
        int, typer.Option(help="No n-gram of this size is repeated; 0 is off.")
    ] = 0,
    min_new_tokens: Annotated[int, typer.Option(help="Fewest new tokens.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")
    ] = None,
    verifier: Annotated[
        str,
        typer.Option(
            help="auto, greedy, rejection, traversal, match are lossless; typical and lenient are "
            "lossy: they change the output."
        ),
    ] = "auto",
    typical_epsilon: Annotated[
        float | None,
        typer.Option(help="With --verifier typical: highest threshold; by default 0.09."),
    ] = None,
    typical_delta: Annotated[
        float | None,
        typer.Option(help="With --verifier typical: threshold by entropy; by default 0.3."),
    ] = None,
    lenience: Annotated[
        float | None,
        typer.Option(
            help="With --verifier lenient: tokens become up to 1 / lenience times as probable as "
            "they should be; by default 0.5."
        ),
    ] = None,
    tree_nodes: options.TreeNodes = None,
    draft_tokens: options.DraftTokens = DEFAULT_CHAIN,
    compile: options.CompileSwitch = False,
    draft_temperature: Annotated[
        float | None,
        typer.Option(help="Temperature of sampled drafts; changes speed, never the distribution."),
    ] = None,
    seed: options.Seed = 0,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = "auto",
) -> None:
    """Answer a prompt, printing the text while it is decoded, and report the speed.

    At most one of --head, --draft-model and --prompt-lookup; with none of them, plain decoding.
    The answer goes to standard output, the speed to standard error.
    """
    text = prompt_text(prompt)
    decoder = Decoder.from_pretrained(
        target, head, draft_model, prompt_lookup, tree_nodes, draft_tokens, dtype, device,
        compile=compile, draft_temperature=draft_temperature,
    )  # fmt: skip
    config = GenerationConfig(
        do_sample=temperature > 0, min_p=min_p or None, repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty, presence_penalty=presence_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size, min_new_tokens=min_new_tokens,
        stop_strings=stop,
    )  # fmt: skip
    stream = decoder.stream(
        text,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        verifier=verifier,
        typical_epsilon=typical_epsilon,
        typical_delta=typical_delta,
        lenience=lenience,
        seed=seed,
        generation_config=config,
    )
    for piece in stream:
        print(piece, end="", flush=True)
    print()
    print(summary(stream.stats), file=sys.stderr)


def prompt_text(prompt: str | None) -> str:
    """The prompt, or standard input; raises UserError when it is empty."""
    text = prompt if prompt is not None else sys.stdin.read()
    if not text.strip():
        raise UserError("the prompt is empty: pass --prompt or text on standard input")
    return text


def summary(stats: DecodeStats) -> str:
    """One line: tokens, speed, tau and the time of each phase."""
    phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in stats.seconds.items())
    tokens = sum(stats.decoded_tokens) + len(stats.decoded_tokens)
    return (
        f"[{tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, {stats.steps} steps, "
        f"tau {stats.tau:.2f}; {phases}]"
    )
