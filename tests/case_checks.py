"""The ways of decoding that a case may go: each yields what is wrong with its answers."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from case_answers import (
    CLOSE,
    CLOSE_STATES,
    Built,
    Mismatch,
    Texts,
    answer_of,
    answers_of,
    by_transformers,
    compared,
    config_of,
    differences,
    is_refused,
    shared_options,
)
from cases import ANSWER, Case
from fastapi.testclient import TestClient
from hidden_answers import TREE, Oracle
from listening import Listener
from serve_stream import events
from tiny import ENCODER_DECODERS
from transformers import PreTrainedModel

from drafthead.infer import Decoder
from drafthead.infer.answers.results import DecodeResult
from drafthead.infer.request.options import read_options
from drafthead.infer.scheduling.running_rows import Ticket
from drafthead.infer.serving import ServeRequest
from drafthead.serve.answer_text import AnswerText
from drafthead.serve.app import make_app
from drafthead.serve.decode_loop import DecodeLoop, Inbox, Job
from drafthead.serve.errors import ApiError
from drafthead.serve.metrics import AnswerMetrics, Metrics
from drafthead.serve.server_options import ServerOptions
from drafthead.serve.waiting import Queue

IMPOSSIBLE = -1e8  # the score of an answer of which a token is forbidden


def check_whole(case: Case, built: Built) -> Iterator[Mismatch]:
    """`generate`: the batch, and each row alone."""
    expected, options = answers_of(case, built), shared_options(case)
    decoder = built.decoder
    # Lossy rules take other tokens of its tree, too.
    if case.drafter == "hidden" and not case.lossy:
        pairs = zip(case.prompts, expected, strict=True)
        texts = [[*prompt, *answer, *[9] * 30] for prompt, answer in pairs]
        decoder = Decoder(built.target, Oracle(TREE, [2, 5, 6], texts))
    prompts = [list(prompt) for prompt in case.prompts]
    form = case.chance("form")
    given: Any = prompts
    if form.random() < 0.2:
        given, options["attention_mask"] = padded(prompts, at_left=form.random() < 0.5)
    found = decoder.generate(given, seed=case.seed, logprobs=form.choice([None, 2]), **options)
    options.pop("attention_mask", None)
    yield from compared("batch", case, built, expected, found.sequences)
    yield from wrong_logprobs(case, built, found)
    row = case.chance("row").randrange(len(prompts))
    alone = decoder.generate(prompts[row], seed=case.seed + row, **options).sequences[0]
    yield from differences(
        "alone", case, built, prompts[row], case.seed + row, expected[row], alone
    )
    if case.text == "words":  # bytes may complete a character that the prompt begins
        whole = built.target.tokenizer.batch_decode(found.sequences, skip_special_tokens=True)
        if found.texts != whole:
            yield Mismatch("texts", (), case.seed, whole, found.texts)


def padded(prompts: Texts, at_left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as ids [B, T] and their mask [B, T]."""
    rows = []
    for prompt in prompts:
        padding = [0] * (max(map(len, prompts)) - len(prompt))
        pair = [*zip(prompt, [1] * len(prompt), strict=True)], [(each, 0) for each in padding]
        rows.append([*pair[1], *pair[0]] if at_left else [*pair[0], *pair[1]])
    both = torch.tensor(rows)
    return both[..., 0], both[..., 1]


@torch.no_grad()
def wrong_logprobs(case: Case, built: Built, found: DecodeResult) -> Iterator[Mismatch]:
    """Where the target's own log-probabilities are not those of a plain pass over the text."""
    for prompt, answer, noted in zip(
        case.prompts, found.sequences, found.logprobs or (), strict=False
    ):
        logits = plain_logits(built, prompt, answer)
        law = logits.float().log_softmax(-1)
        right = law.gather(1, torch.tensor(answer)[:, None])[:, 0]
        if not torch.allclose(torch.tensor(noted.raw), right, atol=1e-3):
            yield Mismatch("logprobs", prompt, case.seed, right.tolist(), noted.raw)


def plain_logits(built: Built, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """The target's own logits [T, V] of an answer of T tokens."""
    states = built.target.stateful_layers
    if states is None or states.cache_class.reads_alike:
        return built.target.plain_logits(prompt, torch.tensor([answer]), len(answer) + 1)[0, :-1]
    # Single tokens leave other states than texts do, in transformers as well.
    found, cache = list[torch.Tensor](), None
    for ids in [[*prompt], *([token] for token in answer[:-1])]:
        output = built.model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits[0, -1])
    return torch.stack(found)


def check_pieces(case: Case, built: Built) -> Iterator[Mismatch]:
    """`stream`, `steps`, two that take turns, a streamer, `model.generate`, threads."""
    expected, options = answers_of(case, built), shared_options(case)
    prompts, decoder = [list(prompt) for prompt in case.prompts], built.decoder
    chance = case.chance("pieces")
    rows: Texts = [[] for _ in prompts]
    others = decoder.steps(prompts[0], seed=case.seed, **options)
    other: list[int] = []
    for emitted in decoder.steps(prompts, seed=case.seed, **options):
        for row, tokens in emitted.items():
            rows[row] += tokens
        if chance.random() < 0.6:
            other += next(others, {}).get(0, [])
    other += [token for emitted in others for token in emitted.get(0, [])]
    yield from compared("steps", case, built, expected, rows)
    yield from differences("in turns", case, built, prompts[0], case.seed, expected[0], other)
    stream = decoder.stream(prompts[0], seed=case.seed, **options)
    said = "".join(stream)
    if said != stream.result.texts[0]:
        yield Mismatch("stream", prompts[0], case.seed, stream.result.texts[0], said)
    whole = stream.result.sequences[0]
    yield from differences("stream", case, built, prompts[0], case.seed, expected[0], whole)
    listener = Listener()
    decoder.generate(prompts[0], seed=case.seed, streamer=listener, **options)
    tokens = [token for each in listener.heard[1:-1] for token in each]  # after the prompt
    yield from differences("streamer", case, built, prompts[0], case.seed, expected[0], tokens)
    with ThreadPoolExecutor(2) as pool:
        numbers = range(len(prompts))
        found = pool.map(
            lambda n: decoder.generate(prompts[n], seed=case.seed + n, **options), numbers
        )
        yield from compared("threads", case, built, expected, [f.sequences[0] for f in found])
    # With a callable transformers loses the tokenizer that its stop strings need.
    encodes = built.model.config.is_encoder_decoder
    if case.temperature == 0 and not (encodes or case.lossy or case.stops):
        ids, _ = by_transformers(
            case, built, prompts[0], custom_generate=decoder.as_custom_generate()
        )
        tokens = ids[0, len(prompts[0]) :].tolist()
        yield from differences("custom", case, built, prompts[0], 0, expected[0], tokens)


Asked = tuple[Case, list[int], int]  # a request as a case, its prompt and its seed


def requests_of(case: Case) -> list[Asked]:
    """Requests that differ in prompts, limits, seeds, sampling and stops, each as a case."""
    chance = case.chance("requests")
    found = []
    for number in range(chance.randint(2, 6)):
        prompt = case.prompts[number % len(case.prompts)]
        prompt = prompt[: chance.randint(1, len(prompt))] if chance.random() < 0.5 else prompt
        own = replace(case, prompts=(prompt,), new=chance.choice([1, 3, 8, 14]))
        if chance.random() < 0.3 and case.rule == "auto":
            temperature = chance.choice([0.0, 1.0])
            filters = {n: v for n, v in case.filters.items() if n in ("top_k", "top_p")}
            own = replace(own, temperature=temperature, filters=filters if temperature else {})
        if chance.random() < 0.2 and case.architecture not in ENCODER_DECODERS:
            own = replace(own, stops=() if case.stops else ("a", "b"))
        found.append((own, list(prompt), chance.randrange(1000)))
    return found


def check_served(case: Case, built: Built) -> Iterator[Mismatch]:
    """`serve`: requests that come and go."""
    case = replace(case, filters={n: v for n, v in case.filters.items() if n in ("top_k", "top_p")})
    asked = requests_of(case)
    names = ("temperature", "top_k", "top_p")
    requests = [
        ServeRequest(
            prompt, n, own.new, seed,
            {"stop_strings": own.stops or None}
            | {k: v for k, v in own_sampling(own).items() if k in names},
        )
        for n, (own, prompt, seed) in enumerate(asked)
    ]  # fmt: skip
    base = replace(case, temperature=0.0, filters={}, stops=())
    warm = {"generation_config": config_of(base)} if case.rule == "auto" else {}
    options = {**shared_options(case), **warm, "stop_strings": []}
    if case.rule == "auto":
        options = {k: v for k, v in options.items() if k not in names}
    if case.chance("memory").random() < 0.4 and case.architecture not in ENCODER_DECODERS:
        built.decoder.remember(list(case.prompts[0]))
    rows = case.chance("rows").choice([1, 2, 3, 8])
    answers = {a.id: a for a in built.decoder.serve(requests, max_rows=rows, **options)}
    for number, (own, prompt, seed) in enumerate(asked):
        answer = answers[number]
        if answer.error is not None:
            if not is_refused(own, built, prompt, seed):
                yield Mismatch("served", prompt, seed, None, answer.error)
            continue
        right = answer_of(own, built, prompt, seed)
        yield from differences("served", own, built, prompt, seed, right, answer.tokens)


def own_sampling(case: Case) -> dict[str, Any]:
    """How a request samples."""
    return {"temperature": case.temperature, **case.filters}


def check_rows(case: Case, built: Built) -> Iterator[Mismatch]:
    """Rows that join and leave at certain steps, some of which are given up; answers are kept."""
    asked = requests_of(case)
    found, left, failed = come_and_go(case, built.decoder, asked)
    for number, (own, prompt, seed) in enumerate(asked):
        if number in failed:
            if not is_refused(own, built, prompt, seed):
                yield Mismatch("row failed", prompt, seed)
            continue
        right, answer = answer_of(own, built, prompt, seed), found[number]
        if number in left and answer == right[: len(answer)]:
            continue
        yield from differences("row", own, built, prompt, seed, right, answer)


def come_and_go(
    case: Case, decoder: Decoder, asked: Sequence[Asked]
) -> tuple[dict[int, list[int]], set[int], set[int]]:
    """The answers to requests by number, and the numbers of those that left and that failed."""
    chance, waiting = case.chance("schedule"), [*enumerate(asked)]
    encodes = case.architecture in ENCODER_DECODERS  # of which nothing is kept
    decoder.memory.most_kept = 0 if encodes else chance.choice([0, 2, 8])
    rows = decoder.running_rows(chance.choice([1, 2, 4]))
    found: dict[int, list[int]] = {number: [] for number, _ in waiting}
    left, failed = set[int](), set[int]()
    while waiting or rows.count:
        if waiting and rows.count < rows.max_rows and chance.random() < 0.6:
            free = min(rows.max_rows - rows.count, chance.randint(1, 3))
            new, waiting = waiting[:free], waiting[free:]
            rows.admit([ticket(decoder, number, *each) for number, each in new])
        gains = rows.step()
        if chance.random() < 0.05:
            left.add(chance.choice([*found]))
            gains += rows.cancel(left)
        for gain in gains:
            found[gain.ticket.id] += gain.tokens
            if gain.ended and gain.row.failed:
                failed.add(gain.ticket.id)
    return found, left, failed


def ticket(decoder: Decoder, number: int, case: Case, prompt: list[int], seed: int) -> Ticket:
    """A request as running rows take it."""
    options = read_options({**shared_options(case), "seed": seed})
    return Ticket(number, decoder.request([prompt], options))


def check_chat(case: Case, built: Built) -> Iterator[Mismatch]:
    """Turns of a conversation, some of them broken off; between two the weights may change."""
    chance, tokenizer = case.chance("chat"), built.target.tokenizer
    options = shared_options(case)
    system = chance.choice([None, "be the", "x"])
    session = built.decoder.chat(system, seed=case.seed, **options)
    for _ in range(chance.choice([2, 3])):
        words = "".join(chance.choices("abeht hexyz", k=chance.randint(0, 8)))
        messages = [*session.messages, {"role": "user", "content": words}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        if len(prompt) + case.new > 120:
            return
        if is_refused(case, built, prompt, case.seed):
            return
        passes = session.steps(words)
        said, breaks = [], chance.random() < 0.25
        for tokens in passes:
            said += tokens
            if breaks and chance.random() < 0.4:
                passes.close()
                break
        right = answer_of(case, built, prompt, case.seed)
        if breaks and said == right[: len(said)]:
            right = said
        yield from differences("turn", case, built, prompt, case.seed, right, said)
        text = tokenizer.decode(said, skip_special_tokens=True)
        # Of random bytes those of an answer may complete a character that a message has begun.
        if case.text == "words" and session.messages[-1]["content"] != text:
            yield Mismatch("turn's text", prompt, case.seed, text, session.messages[-1]["content"])
        if chance.random() < 0.15:
            change_weights(built.model, chance)


def change_weights(model: PreTrainedModel, chance: random.Random) -> None:
    """In place or by other tensors, as an adapter or a checkpoint would."""
    names = [n for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n]
    name = chance.choice([n for n in names if "head" not in n] or names)
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    with torch.no_grad():
        if chance.random() < 0.5:
            getattr(module, last).mul_(1.5)
        else:
            weight = getattr(module, last)
            setattr(module, last, torch.nn.Parameter(weight * 1.5, requires_grad=False))


def check_remembered(case: Case, built: Built) -> Iterator[Mismatch]:
    """`generate` after `remember`, before and after the weights change, and after `forget`."""
    chance, decoder = case.chance("memory"), built.decoder
    options = shared_options(case)
    prompts = [list(prompt) for prompt in case.prompts]
    for prompt in chance.sample(prompts, chance.randint(1, len(prompts))):
        decoder.remember(prompt[: chance.randint(1, len(prompt))])
    for step in range(3):
        expected = answers_of(case, built)
        found = decoder.generate(prompts, seed=case.seed, **options).sequences
        yield from compared(f"remembered, {step}", case, built, expected, found)
        if chance.random() < 0.6:
            change_weights(built.model, chance)
        if chance.random() < 0.3:
            decoder.forget()
        if chance.random() < 0.4:
            decoder.remember(chance.choice(prompts))


def check_beams(case: Case, built: Built) -> Iterator[Mismatch]:
    """Beam search, answers and scores."""
    chance = case.chance("beams")
    beams = chance.choice([2, 3, 4, 8])
    options: dict[str, Any] = {
        "num_beams": beams, "num_return_sequences": chance.randint(1, beams),
        "length_penalty": chance.choice([-1.0, 0.0, 1.0, 2.0]),
        "early_stopping": chance.choice([True, False, "never"]),
    }  # fmt: skip
    prompts = [list(prompt) for prompt in case.prompts]
    found = built.decoder.generate(prompts, **shared_options(case), **options)
    pairs = [*zip(found.sequences, found.scores or (), strict=True)]
    count = options["num_return_sequences"]
    for row, prompt in enumerate(prompts):
        output, begun = by_transformers(
            case, built, prompt, return_dict_in_generate=True, output_scores=True,
            # Its cache leaves MiniMax's states where they are when beams change their places.
            use_cache=case.architecture != "minimax", **options
        )  # fmt: skip
        answers = [until(tokens, case.ends) for tokens in output.sequences[:, begun:].tolist()]
        scores = output.sequences_scores.tolist()
        for place, (answer, score) in enumerate(pairs[row * count : (row + 1) * count]):
            if max(score, scores[place]) < IMPOSSIBLE:  # transformers fills up with these
                continue
            close = CLOSE if built.target.stateful_layers is None else CLOSE_STATES
            apart = abs(score - scores[place]) > close * max(1, abs(score))
            if answer != answers[place] or apart:
                right = (answers[place], scores[place])
                yield Mismatch("beams", prompt, 0, right, (answer, score), not apart)


def until(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """The tokens up to the first end token."""
    places = [place for place, token in enumerate(tokens) if token in ends]
    return tokens[: places[0] + 1] if places else tokens


def check_loop(case: Case, built: Built) -> Iterator[Mismatch]:
    """The server's thread: answers that are asked for while others run, some of them given up."""
    yield from asyncio.run(looped(case, built))


async def looped(case: Case, built: Built) -> list[Mismatch]:
    """What is wrong with answers of the server's thread."""
    chance, metrics, faults = case.chance("arrivals"), Metrics("tiny"), []
    asked = [(replace(own, stops=(), criteria=0), *rest) for own, *rest in requests_of(case)]
    built.decoder.memory.most_kept = 4
    loop = DecodeLoop(built.decoder, metrics, chance.choice([1, 2, 4]), Queue(100, 600.0))
    loop.thread.start()

    async def answered(own: Case, prompt: list[int], seed: int, leaves: bool) -> None:
        request = ticket(built.decoder, 0, own, prompt, seed).request
        text = AnswerText(built.target.tokenizer, own.stops)
        request = replace(request, stops=[text])
        job = Job(request, Inbox(), text, AnswerMetrics(metrics))
        loop.submit([job])
        tokens, said, reason = [], "", None
        while reason is None:
            _, piece = await job.inbox.pieces.get()
            if isinstance(piece, ApiError):
                if is_refused(own, built, prompt, seed):
                    return
                faults.append(Mismatch(f"loop: {piece}", prompt, seed))
                return
            tokens, said = tokens + piece.tokens, said + piece.text
            reason = piece.finish_reason
            if leaves:
                loop.cancel([job])
                return
        right = answer_of(own, built, prompt, seed)
        faults.extend(differences("loop", own, built, prompt, seed, right, tokens))
        shown = tokens[:-1] if tokens[-1] in own.ends else tokens
        whole = built.target.tokenizer.decode(shown, skip_special_tokens=True)
        if said != whole:
            faults.append(Mismatch("loop's text", prompt, seed, whole, said))

    tasks = []
    for each in asked:
        tasks.append(asyncio.create_task(answered(*each, chance.random() < 0.15)))
        await asyncio.sleep(chance.choice([0, 0, 0.003, 0.01]))
    try:
        await asyncio.gather(*tasks)
    finally:
        loop.stop()
    return faults


def check_http(case: Case, built: Built) -> Iterator[Mismatch]:
    """Completions of a server, in whole and in pieces, several at a time."""
    chance, asked = case.chance("http"), requests_of(case)
    named = ("repetition_penalty", *ANSWER)
    known = {n: v for n, v in case.processors.items() if n in named}
    asked = [(replace(own, processors=known, ends=()), *rest) for own, *rest in asked]
    streams = [chance.random() < 0.5 for _ in asked]
    app = make_app(built.decoder, ServerOptions("tiny", max_batch=chance.choice([1, 2, 4])))

    def answered(number: int) -> list[int]:
        own, prompt, seed = asked[number]
        body = {
            "prompt": prompt, "max_tokens": own.new, "seed": seed, "stream": streams[number],
            "return_token_ids": True, "ignore_eos": True, **own.processors,
            **{n: v for n, v in own_sampling(own).items() if n != "typical_p"},
        }  # fmt: skip
        response = client.post("/v1/completions", json=body)
        response.raise_for_status()
        if not streams[number]:
            return response.json()["choices"][0]["token_ids"]
        choices = [event["choices"][0] for event in events(response.text)]
        return [token for choice in choices for token in choice["token_ids"]]

    with TestClient(app) as client, ThreadPoolExecutor(4) as pool:
        found = [*pool.map(answered, range(len(asked)))]
    for (own, prompt, seed), tokens in zip(asked, found, strict=True):
        filters = {n: v for n, v in own.filters.items() if n != "typical_p"}
        own = replace(own, filters=filters, stops=())
        right = answer_of(own, built, prompt, seed)
        yield from differences("http", own, built, prompt, seed, right, tokens)


CHECKS: dict[str, Callable[[Case, Built], Iterator[Mismatch]]] = {
    "whole": check_whole,
    "pieces": check_pieces,
    "served": check_served,
    "rows": check_rows,
    "chat": check_chat,
    "remembered": check_remembered,
    "beams": check_beams,
    "loop": check_loop,
    "http": check_http,
}
