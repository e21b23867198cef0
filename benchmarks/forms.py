"""Answers in a form, drafted by the form, by lookup and by a head: `benchmarks/forms.py --help`.

Prompts and schemas are those of the Berkeley Function Calling Leaderboard (Apache-2.0, by Patil
et al.), from a folder that you name: `bfcl_eval/data` of https://github.com/ShishirPatil/gorilla.
Each answer is decoded in turns: plainly under the same grammar, which has to give the same text,
and with each of the drafts. Half of the answers are calls of a tool, half are the arguments alone
as JSON without other properties, as OpenAI's strict forms are.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from recorded import write_record
from tqdm import tqdm

from drafthead.infer import Decoder, DecodeStats
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.request.options import read_options
from drafthead.lab.reports.report import Table, number, print_table
from drafthead.serve.json_grammar import Form, GrammarMask, JsonGrammars, schema_grammar

FILES = ("simple_python", "multiple", "live_simple", "live_multiple", "parallel")
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
LONGEST_PROMPT = 1500  # tokens
PLAIN, FORM = "plain", "form"


@dataclass(frozen=True)
class Task:
    """A prompt, and the form of its answer."""

    kind: str
    messages: list[dict[str, str]]
    form: Form


def as_json_schema(schema: Any) -> Any:
    """A schema of BFCL with the types of JSON Schema, and nothing that is not of a form."""
    if isinstance(schema, list):
        return [as_json_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {"type", "properties", "required", "items", "enum", "description"}
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            found[key] = {name: as_json_schema(each) for name, each in value.items()}
        elif key == "type":
            found[key] = TYPES.get(value.lower(), value.lower())
        elif key in kept:
            found[key] = as_json_schema(value)
    return found


def tasks_in(folder: Path) -> Iterator[Task]:
    """The tasks of a folder, files in turns, calls and arguments in turns."""
    rows = []
    for name in FILES:
        lines = (folder / f"BFCL_v4_{name}.json").read_text().splitlines()
        rows.append([json.loads(line) for line in lines])
        Random(0).shuffle(rows[-1])
    for place, row in enumerate(row for turn in zip(*rows, strict=False) for row in turn):
        functions = [
            {**each, "parameters": as_json_schema(each["parameters"])} for each in row["function"]
        ]
        question = row["question"][0][-1]["content"]
        if place % 2:
            schema = {**functions[0]["parameters"], "additionalProperties": False}
            text = f"Answer as JSON that follows this schema: {json.dumps(schema)}"
            form = Form("response_format", schema_grammar(schema, "response_format"), thinks=False)
        else:
            text = f"You may call these tools: {json.dumps(functions)}"
            form = Form("tools", None, functions, row["id"].startswith("parallel"), False)
        messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
        yield Task(form.field, messages, form)


def answer(
    decoder: Decoder, task: Task, mask: GrammarMask, options: dict[str, Any], drafts: bool
) -> tuple[list[int], DecodeStats]:
    """The answer's tokens, and what its steps took."""
    settings = read_options({**options, "logits_processor": [mask]})
    request = decoder.request(task.messages, settings)
    request = replace(request, drafts=None if drafts else frozenset())
    run = BatchRun(request, decoder.target.device)
    for _ in decoder.method(run).decoding(run):
        pass
    return run.rows[0].tokens, run.stats


def main(
    bfcl: Annotated[Path, typer.Option(help="Folder of BFCL's data.")],
    output: Annotated[Path, typer.Option(help="JSON file for what is found.")],
    target: Annotated[str, typer.Option(help="The target.")] = "smollm2",
    head: Annotated[str, typer.Option(help="Its head; empty for none.")] = "smollm2-eagle3",
    dtype: Annotated[str, typer.Option(help="Number type of its weights.")] = "bfloat16",
    answers: Annotated[int, typer.Option(help="Answers to decode, beside two to begin.")] = 40,
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable.")] = None,
) -> None:
    """Decode the same answers plainly and with drafts, in turns."""
    ways = {FORM: [], "lookup": ["lookup"]} | ({"head, lookup": [head, "lookup"]} if head else {})
    plain = Decoder.from_pretrained(target, dtype=dtype)
    decoders = {way: plain.with_drafts(draft or None) for way, draft in ways.items()}
    grammars, seconds, counts = JsonGrammars(plain), defaultdict(float), defaultdict(int)
    passes, differing = defaultdict(int), 0
    fitting = (task for task in tasks_in(bfcl) if fits(task))
    for place, task in enumerate(tqdm(islice(fitting, answers + 2), total=answers + 2)):
        for heat in temperature or [0.0, 0.7]:
            options = {"max_new_tokens": tokens, "temperature": heat, "seed": place}
            length = len(plain.request(task.messages, read_options(options)).prompts[0])
            texts = []
            order = [PLAIN, *decoders]
            for way in order[place % len(order) :] + order[: place % len(order)]:
                mask = grammars.mask(task.form, length, 0)
                decoder = plain if way == PLAIN else decoders[way]
                found, stats = answer(decoder, task, mask, options, way != PLAIN)
                texts.append(found)
                if place < 2:  # what is slow once is not counted
                    continue
                key = f"{heat}", task.kind, way
                seconds[key] += stats.decode_seconds
                counts[key] += len(found) - 1
                passes[key] += stats.steps
            differing += any(text != texts[0] for text in texts)
    rows = [
        {
            "temperature": heat,
            "answers": kind,
            "drafts": way,
            "tokens": counts[key],
            "tokens_per_second": counts[key] / seconds[key],
            "tau": counts[key] / passes[key],
            "speedup": counts[key] / seconds[key] / (counts[base] / seconds[base]),
        }
        for key in seconds
        for heat, kind, way in [key]
        for base in [(heat, kind, PLAIN)]
    ]
    rows.sort(key=lambda row: (row["temperature"], row["answers"], row["speedup"]))
    names = ("temperature", "answers", "drafts", "tokens_per_second", "tau", "speedup")
    cells = [
        [number(v) if isinstance(v := row[name], float) else v for name in names] for row in rows
    ]
    print_table(Table("Answers in a form", names, cells))
    print(f"answers whose text differs: {differing}")
    write_record(output, {"target": target, "head": head, "rows": rows, "differing": differing})


def fits(task: Task) -> bool:
    """Whether the prompt is short enough."""
    return len(str(task.messages)) < 3 * LONGEST_PROMPT


if __name__ == "__main__":
    typer.run(main)
