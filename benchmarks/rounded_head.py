"""What a draft head loses when its products are computed in 8 bits, as GPUs can.

Emulated on a CPU: weights and inputs of each matrix are rounded as they would be, by a scale for
each row, and multiplied as before. The target is as ever, so texts are the same and only tau can
change. `python benchmarks/rounded_head.py --prompts FILE` prints JSON.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.trees.tree import Budget
from drafthead.heads.formats.loading import load_head
from drafthead.infer import Decoder
from drafthead.infer.loading.loaded import head_drafter
from drafthead.infer.request.prompts import encode
from drafthead.infer.timing.machine import describe_machine
from drafthead.train.data.conversations import read_conversations

LARGEST = {"fp8": torch.finfo(torch.float8_e4m3fn).max, "int8": 127.0}


def rounded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """x [..., D] as numbers of 8 bits with a scale for each row."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST[kind]
    scaled = x.float() / scale
    kept = scaled.to(torch.float8_e4m3fn).float() if kind == "fp8" else scaled.round()
    return (kept * scale).to(x.dtype)


def round_products(head: torch.nn.Module, kind: str) -> int:
    """Round the matrices of a head, and from now on what they are multiplied with; how many."""
    products = [part for part in head.modules() if isinstance(part, torch.nn.Linear)]
    for part in products:
        part.weight.data = rounded(part.weight.data, kind)
        part.register_forward_pre_hook(lambda _, given: (rounded(given[0], kind), *given[1:]))
    return len(products)


def main(
    prompts: Annotated[Path, typer.Option(help="Conversations whose first messages are asked.")],
    target: Annotated[str, typer.Option(help="The model.")] = "smollm2",
    head: Annotated[str, typer.Option(help="Its head.")] = "smollm2-eagle3",
    tokens: Annotated[int, typer.Option(help="Of each answer.")] = 64,
    count: Annotated[int, typer.Option(help="Prompts.")] = 24,
    nodes: Annotated[int, typer.Option(help="Of each tree.")] = 16,
) -> None:
    """Decode the prompts with the head as it is and rounded; print tau of each."""
    packed = load_decoder_only(target, "bfloat16", "cpu").packed()
    chosen = [c.messages[:1] for c in read_conversations(prompts, limit=count)]
    assert packed.tokenizer is not None
    ids = encode(chosen, packed.tokenizer)
    found: dict[str, Any] = {"machine": describe_machine(), "prompts": len(ids), "nodes": nodes}
    texts = []
    for kind in ("bfloat16", *LARGEST):
        drafter = head_drafter(load_head(Path(head), packed), packed)
        products = round_products(drafter.given, kind) if kind in LARGEST else 0  # type: ignore[attr-defined]
        decoder = Decoder(packed, drafter, Budget(nodes, drafter.budgets[-1].depth))
        steps = made = 0
        answers = []
        for prompt in ids:
            result = decoder.generate(prompt, max_new_tokens=tokens)
            answers.append(result.sequences[0])
            steps += len(result.stats.accept_lengths[0])
            made += sum(result.stats.accept_lengths[0])
        texts.append(answers)
        found[kind] = {"tau": round(made / steps, 4), "steps": steps, "products": products}
        print(kind, found[kind], flush=True)
    found["same texts"] = all(each == texts[0] for each in texts)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    typer.run(main)
