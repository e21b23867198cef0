"""What each architecture of `AutoModelForCausalLM` can do: tried in processes of their own.

    python tests/census.py              # all, in ten minutes: writes tests/census.json
    python tests/census.py lfm2 bart    # these alone, in the file as well

A model is tiny, in float32, with random weights, and used for text alone. `docs/architectures.md`
has the counts of these records, see `counts`; a test compares them.
"""

import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from architectures import ARCHITECTURES, FEW, LATENT, OTHERS, SIZES, STATEFUL, tiny_model
from drafters import drafter_for
from hidden_answers import CHAIN, TREE, Oracle, generated
from tiny import HIDDEN, VOCAB
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from drafthead.core.drafting.drafter import Drafter
from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.train.data.packing import collate
from drafthead.train.data.sequences import TokenSequence
from drafthead.train.features.reading import read_features
from drafthead.train.run.trainables import new_head, trainable

FILE = Path(__file__).with_name("census.json")
NEW, LENGTHS = 16, (3, 17, 9)
SECONDS = 120  # for one architecture
MOST = 20_000_000  # parameters
# Settings that make more of them small; none of these works.
HALVES = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
REFUSED: dict[str, dict[str, object]] = {
    "plbart": HALVES,
    "whisper": {**HALVES, "d_model": HIDDEN, "decoder_layers": 2},
    "reformer": {"is_decoder": True},
    "xlnet": {"d_model": HIDDEN, "n_layer": 2, "n_head": 4, "d_inner": 48},
}
COLUMNS = ("equal", "chain", "tree", "batch", "head")
Record = dict[str, Any]


def built(name: str) -> PreTrainedModel:
    """A small model of an architecture; raises whatever its code does where none can be made."""
    known = {**ARCHITECTURES, **OTHERS, **REFUSED}.get(name)
    *others, last = [known] if known is not None else [FEW, {**FEW, **LATENT}]
    for settings in others:
        try:
            return small(name, settings)
        except Exception:  # as many kinds as there are models
            continue
    return small(name, last)


def small(name: str, settings: dict[str, object]) -> PreTrainedModel:
    """A random model; raises ValueError where these settings do not make it small."""
    with torch.device("meta"):
        config = AutoConfig.for_model(name, **SIZES | settings)
        size = AutoModelForCausalLM.from_config(config).num_parameters()
    if size > MOST:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    return tiny_model(name, settings)


def answers_alike(target: Target, prompts: list[list[int]], answers: list[list[int]]) -> Record:
    """Which ways of decoding give transformers' own answers, with all right tokens accepted."""
    texts = [p + a for p, a in zip(prompts, answers, strict=True)]
    wanted = [answer[:NEW] for answer in answers]
    right = {
        "equal": None,
        "chain": Oracle(CHAIN, [1, 2, 3], texts),
        "tree": Oracle(TREE, [2, 5, 6], texts),
    }

    def holds(drafter: Drafter | None, batch: int) -> bool:
        decoder = Decoder(target, drafter)
        for start in range(0, len(prompts), batch):
            result = decoder.generate(prompts[start : start + batch], max_new_tokens=NEW)
            accepted = {n for row in result.stats.accept_lengths for n in row}
            if result.sequences != wanted[start : start + batch]:
                return False
            if accepted != ({1} if drafter is None else {4}):
                return False
        return True

    found = {way: holds(drafter, 1) for way, drafter in right.items()}
    return found | {"batch": all(holds(drafter, len(prompts)) for drafter in right.values())}


def head_works(target: Target, prompts: list[list[int]], answers: list[list[int]]) -> bool:
    """Whether an EAGLE-3 head learns of packed rows, and decodes the target's own text."""
    head = new_head("eagle3", trainable("eagle3").config_class(), target, torch.ones(VOCAB))
    rows = [
        TokenSequence(torch.tensor(p + a, dtype=torch.int32), torch.arange(len(p + a)) >= len(p))
        for p, a in zip(prompts, answers, strict=True)
    ]
    optimizer, losses = torch.optim.Adam(head.parameters(), 3e-3), []
    batch = read_features(target, collate([rows]), head.features_needed, "no")
    for _ in range(20):
        loss = head.loss(batch, target).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    drafter = drafter_for(head.eval().requires_grad_(False), target, CHAIN)
    result = Decoder(target, drafter).generate(prompts, max_new_tokens=NEW)
    return losses[-1] < losses[0] and result.sequences == [answer[:NEW] for answer in answers]


def tried(name: str) -> Record:
    """The record of one architecture."""
    torch.set_num_threads(1)
    try:
        model = built(name)
        torch.manual_seed(1)
        prompts = [torch.randint(1, VOCAB, (n,)).tolist() for n in LENGTHS]
    except Exception as error:
        return {"unbuilt": f"{type(error).__name__}: {first(error)}"}
    try:
        target = Target(model)
    except UserError as error:
        return {"refused": first(error)}
    answers = [generated(model, prompt, NEW + 4) for prompt in prompts]
    found = answers_alike(target, prompts, answers)
    try:
        return found | {"head": head_works(target, prompts, answers)}
    except UserError as error:
        return found | {"head": first(error)}


def first(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [""])[0][:300]


def in_process(job: Callable[[str], Record], name: str) -> Record:
    """The record of a job in a process of its own, which may fail and is not waited for forever."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def run() -> None:
        try:
            queue.put(job(name))
        except BaseException as error:
            queue.put({"failed": f"{type(error).__name__}: {first(error)}"})

    process = context.Process(target=run)
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        return {"failed": f"no end within {SECONDS} s"}
    return {"failed": "the process died"} if queue.empty() else queue.get()


def works(record: Record) -> bool:
    """Whether all ways of decoding are exact, heads aside."""
    return all(record.get(way) is True for way in COLUMNS[:-1])


def counts(records: dict[str, Record]) -> str:
    """The sentence of the docs."""
    kinds = Counter(
        "works" if works(r) else next((k for k in ("refused", "unbuilt") if k in r), "failed")
        for r in records.values()
    )
    built_ones = len(records) - kinds["unbuilt"]
    states = sum(works(records[name]) for name in STATEFUL)
    return (
        f"Of {len(records)} names, {built_ones} could be built small with the text alone: "
        f"{kinds['works']} work, {states} of them with a running state, and {kinds['refused']} are "
        f"refused; {kinds['failed'] or 'none'} crashes or answers differently."
    )


def main(names: list[str]) -> None:
    """Try architectures, all without names, and write down what was found."""
    known = json.loads(FILE.read_text())["records"] if names else {}
    for name in names or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        known[name] = in_process(tried, name)
        print(name, json.dumps(known[name]), flush=True)
    lines = ",\n".join(f'  "{name}": {json.dumps(known[name])}' for name in sorted(known))
    about = f"transformers {transformers.__version__}"
    FILE.write_text(f'{{\n "about": "{about}",\n "records": {{\n{lines}\n }}\n}}\n')
    print(counts(known))


if __name__ == "__main__":
    main(sys.argv[1:])
