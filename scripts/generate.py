"""`drafthead generate`: decode from the shell, as `Decoder` does from Python."""

import sys
from collections.abc import Iterator, Sequence

from transformers.generation.configuration_utils import GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError
from drafthead.heads.formats.printing import shown
from drafthead.infer import DecodeOptions, Decoder, DecodeResult, Logprobs
from drafthead.scripts import generate_options as own
from drafthead.scripts import options


def main(
    target: options.TargetName,
    prompt: own.Prompt = None,
    head: options.HeadName = None,
    draft_model: options.DraftModelName = None,
    draft_layers: options.DraftLayers = None,
    prompt_lookup: options.PromptLookupSwitch = False,
    datastore: options.DatastoreFolder = None,
    template_argument: options.TemplateArgument = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: own.MinP = 0.0,
    repetition_penalty: own.RepetitionPenalty = None,
    frequency_penalty: own.FrequencyPenalty = 0.0,
    presence_penalty: own.PresencePenalty = 0.0,
    no_repeat_ngram_size: own.NoRepeatNgramSize = None,
    min_new_tokens: own.MinNewTokens = None,
    stop: own.StopTexts = None,
    max_time: own.MaxTime = None,
    num_return_sequences: own.NumAnswers = 1,
    num_beams: own.NumBeams = 1,
    logprobs: own.LogprobTokens = None,
    verifier: own.VerifierName = "auto",
    typical_epsilon: own.TypicalEpsilon = None,
    typical_delta: own.TypicalDelta = None,
    lenience: own.Lenience = None,
    accept_top: own.AcceptTop = None,
    accept_distance: own.AcceptDistance = None,
    min_block: own.MinBlock = None,
    tree_nodes: options.TreeNodes = None,
    draft_tokens: options.DraftTokens = None,
    compile: options.CompileSwitch = False,
    draft_temperature: own.DraftTemperature = None,
    seed: options.Seed = 0,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = "auto",
) -> None:
    """Answer a prompt, printing the text while it is decoded, and report the speed.

    --head, --draft-model or --draft-layers; --prompt-lookup or --datastore alone or beside one of
    them, whose trees then have the best guesses of both; with none of them, plain decoding.
    The answer goes to standard output, the speed to standard error. Of several answers each is
    printed when all are there, after its number. Penalties that are not given are those of the
    model's own generation config.
    """
    text = prompt_text(prompt)
    draft = options.draft_names(head, draft_model, draft_layers, prompt_lookup, datastore)
    decoder = Decoder.from_pretrained(
        target, draft, tree_nodes, draft_tokens, draft_temperature, dtype, device, compile=compile
    )
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
            "chat_template_kwargs": options.template_values(template_argument),
        },
    )
    if result.logprobs is not None and decoder.tokenizer is not None:
        for tokens, record in zip(result.sequences, result.logprobs, strict=True):
            print("", *logprob_lines(tokens, record, decoder.tokenizer), sep="\n")
    print(summary(result), file=sys.stderr)


def answer(decoder: Decoder, prompt: str, how: DecodeOptions) -> DecodeResult:
    """Print the answer while it is decoded, or several answers together, and return them."""
    if how.get("num_return_sequences") == 1 and how.get("num_beams") == 1:
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
