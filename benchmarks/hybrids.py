"""Targets with a running state, of random weights, beside transformers: `benchmarks/hybrids.py`.

Plain decoding, prompt lookup and `model.generate` answer one prompt that repeats itself, on one
thread in float32, in turns. The texts must be the same.
"""

import time
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from recorded import write_record
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.lab.reports.report import Table, number, print_table

PROMPT, NEW, PERIOD, ROUNDS = 128, 64, 24, 5  # tokens, tokens, tokens, answers of each method
COMMON = {
    "vocab_size": 32000,
    "hidden_size": 640,
    "intermediate_size": 1920,
    "num_hidden_layers": 8,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# What a form has that others have not, by `model_type`.
FORMS = {
    "lfm2": {"layer_types": [*["conv", "conv", "full_attention"] * 2, "conv", "full_attention"]},
    "qwen3_5_text": {
        "head_dim": 64,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    },
    "falcon_h1": {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1536,
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_d_ssm": 1024,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
    },
}


def raced(kind: str) -> dict[str, float]:
    """Tokens per second of processor time by method, tau of lookup and millions of parameters."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**COMMON, **FORMS[kind]})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    target = Target(model)
    plain, lookup = Decoder(target), Decoder(target, PromptLookup(4))
    tokens = torch.randint(1, config.vocab_size, (PERIOD,)).repeat(PROMPT // PERIOD + 1)[:PROMPT]
    ids, settings = tokens[None], {"max_new_tokens": NEW}

    def generate() -> list[int]:
        """What transformers writes."""
        mask = torch.ones_like(ids)
        found = model.generate(ids, attention_mask=mask, do_sample=False, **settings)
        return found[0, PROMPT:].tolist()

    ways = {
        "generate": generate,
        "plain": lambda: plain.generate(tokens, **settings).sequences[0],
        "lookup": lambda: lookup.generate(tokens, **settings).sequences[0],
    }
    expected = {name: way() for name, way in ways.items()}["generate"]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in tqdm(range(ROUNDS), desc=kind, leave=False):
        for name, way in ways.items():
            began = time.process_time()
            text = way()
            seconds[name].append(time.process_time() - began)
            if text != expected:
                raise UserError(f"{kind}: {name} writes another text than generate")
    speeds = {name: NEW / median(of) for name, of in seconds.items()}
    tau = lookup.generate(tokens, **settings).stats.tau
    return {"millions": model.num_parameters() / 1e6, **speeds, "tau of lookup": tau}


def main(output: Annotated[Path, typer.Option(help="JSON file to write.")]) -> None:
    """Race hybrid and recurrent targets of random weights against transformers."""
    torch.set_num_threads(1)
    found = {kind: raced(kind) for kind in FORMS}
    columns = ["form", *next(iter(found.values()))]
    rows = [[kind, *map(number, of.values())] for kind, of in found.items()]
    print_table(Table("tokens per second of processor time", columns, rows))
    write_record(output, {"forms": found})


if __name__ == "__main__":
    typer.run(main)
