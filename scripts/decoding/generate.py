"""`drafthead generate`: decode from the shell, as `Decoder` does from Python."""

import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from transformers.generation.configuration_utils import GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError
from drafthead.heads.formats.printing import shown
from drafthead.infer import DecodeOptions, Decoder, DecodeResult, Logprobs
from drafthead.scripts import options


def main(
    target: options.TargetName,
    prompt: Annotated[
        str | None, typer.Option(help="The user's message; by default standard input.")
    ] = None,
    head: options.HeadFolder = None,
    draft_model: options.DraftModelName = None,
    draft_layers: options.DraftLayers = None,
    prompt_lookup: options.PromptLookupSwitch = False,
    datastore: options.DatastoreFolder = None,
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
    max_time: Annotated[
        float | None, typer.Option(help="Seconds after which the answer ends as it is.")
    ] = None,
    num_return_sequences: Annotated[
        int,
        typer.Option(help="Answers; several need a temperature above 0 or as many --num-beams."),
    ] = 1,
    num_beams: Annotated[
        int,
        typer.Option(
            help="Beam search with up to 8 beams, printed at its end with the answer's score; 1 is "
            "off."
        ),
    ] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Print each token's log-probability, and so many of the target's most probable "
            "tokens beside it; 0 for none."
        ),
    ] = None,
    verifier: Annotated[
        str,
        typer.Option(
            help="auto, greedy, rejection, traversal, match are lossless; typical and lenient, and "
            "at temperature 0 top_k and distance, are lossy: they change the output."
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
    accept_top: Annotated[
        int | None,
        typer.Option(
            help="With the lossy --verifier top_k: drafted tokens stay when they are among so many "
            "most probable ones; by default 2, and 1 is exact."
        ),
    ] = None,
    accept_distance: Annotated[
        int | None,
        typer.Option(
            help="With the lossy --verifier distance, for tokens whose numbers are an order, such "
            "as pixels, and senseless for text: how far a drafted number may lie from the most "
            "probable one; by default 2, and 0 is exact."
        ),
    ] = None,
    min_block: Annotated[
        int | None,
        typer.Option(
            help="With --verifier top_k or distance: tokens that a step adds at least, wrong ones "
            "too; by default 1."
        ),
    ] = None,
    tree_nodes: options.TreeNodes = None,
    draft_tokens: options.DraftTokens = None,
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

    --head, --draft-model or --draft-layers; --prompt-lookup or --datastore alone or beside one of
    them, whose trees then have the best guesses of both; with none of them, plain decoding.
    The answer goes to standard output, the speed to standard error. Of several answers each is
    printed when all are there, after its number.
    """
    text = prompt_text(prompt)
    decoder = Decoder.from_pretrained(
        target, head, draft_model, prompt_lookup, tree_nodes, draft_tokens, dtype, device,
        compile=compile, draft_temperature=draft_temperature, datastore=datastore,
        draft_layers=draft_layers,
    )  # fmt: skip
    config = GenerationConfig(
        do_sample=temperature > 0, min_p=min_p or None, repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty, presence_penalty=presence_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size, min_new_tokens=min_new_tokens,
    )  # fmt: skip
    result = answer(
        decoder,
        text,
        {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "stop_strings": stop,
            "max_time": max_time,
            "num_return_sequences": num_return_sequences,
            "num_beams": num_beams,
            "logprobs": logprobs,
            "verifier": verifier,
            "typical_epsilon": typical_epsilon,
            "typical_delta": typical_delta,
            "lenience": lenience,
            "accept_top": accept_top,
            "accept_distance": accept_distance,
            "min_block": min_block,
            "seed": seed,
            "generation_config": config,
        },
    )
    if result.logprobs is not None and decoder.tokenizer is not None:
        for tokens, record in zip(result.sequences, result.logprobs, strict=True):
            print("", *logprob_lines(tokens, record, decoder.tokenizer), sep="\n")
    print(summary(result), file=sys.stderr)


def answer(decoder: Decoder, prompt: str, options: DecodeOptions) -> DecodeResult:
    """Print the answer while it is decoded, or several answers together, and return them."""
    if options.get("num_return_sequences") == 1 and options.get("num_beams") == 1:
        stream = decoder.stream(prompt, **options)
        for piece in stream:
            print(piece, end="", flush=True)
        print()
        return stream.result
    result = decoder.generate(prompt, **options)
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


def prompt_text(prompt: str | None) -> str:
    """The prompt, or standard input; raises UserError when it is empty."""
    text = prompt if prompt is not None else sys.stdin.read()
    if not text.strip():
        raise UserError("the prompt is empty: pass --prompt or text on standard input")
    return text


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
