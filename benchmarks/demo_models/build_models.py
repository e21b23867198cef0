"""Trains the demo target and the demo draft model on Python sources; run it again to resume.

    python -m demo_models.build_models --work runs/demo-models --output assets

One to two hours on 2 cores, minutes on a GPU. A killed run continues from its last checkpoint.
"""

import json
import logging
import platform
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from demo_models.cards import write_card
from demo_models.corpus import Pair, package_versions, read_corpus
from demo_models.rollouts import ASKED, Polishing, greedy_behaviour, polish
from demo_models.training import IGNORE, LEARN, Example, Recipe, TrainingRun, mean_loss
from drafthead.core.storage.files import write_text
from drafthead.train.settings import OptimizerConfig

logger = logging.getLogger(__name__)

VOCAB_SIZE = 4096
MAX_POSITIONS = 1024
ROLES = ("system", "user", "assistant")
PAD, END = "<|pad|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PRETRAINING = OptimizerConfig(
    name="muon", lr=3e-3, muon_lr=0.02, schedule="linear", warmup_ratio=0.04
)
POLISHING = OptimizerConfig(
    name="muon", lr=3e-4, muon_lr=0.002, schedule="linear", warmup_ratio=0.1
)
HELD_OUT = 256  # validation pairs whose loss is measured
PROMPTS = {"train": 3000, "validation": 300, "test": 300}


@dataclass(frozen=True)
class Blueprint:
    """One demo model: its shape, its pretraining, and what it learns from its own answers."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    pretraining: Recipe
    polishing: Polishing | None = None


# One decoder layer and the output head are each 6 to 7 % of the target, as in a large model.
BLUEPRINTS = {
    "target": Blueprint(
        hidden_size=320,
        intermediate_size=864,
        num_layers=14,
        num_heads=5,
        pretraining=Recipe(epochs=1.1, optimizer=PRETRAINING),
        polishing=Polishing(Recipe(epochs=1.0, optimizer=POLISHING)),
    ),
    "draft": Blueprint(
        hidden_size=256,
        intermediate_size=688,
        num_layers=2,
        num_heads=4,
        pretraining=Recipe(epochs=1.1, optimizer=PRETRAINING),
    ),
}


def train_tokenizer(pairs: list[Pair]) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on the training pairs, with the chat template."""
    specials = [PAD, END, *(f"<|{role}|>" for role in ROLES)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for p in pairs if p.split == "train" for text in (p.question, p.answer))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=specials[2:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def encode(
    tokenizer: PreTrainedTokenizerBase, pairs: list[Pair], answers_only: bool = False
) -> list[Example]:
    """Each pair as a two-message conversation; all of it or only the answer is learnt."""
    answer_begins = tokenizer.get_vocab()["<|assistant|>"]
    examples = []
    for pair in pairs:
        messages = [
            {"role": "user", "content": pair.question},
            {"role": "assistant", "content": pair.answer},
        ]
        ids = list(tokenizer.apply_chat_template(messages, return_dict=False))
        asked = ids.index(answer_begins) + 1 if answers_only else 0
        examples.append(Example(ids, [IGNORE] * asked + [LEARN] * (len(ids) - asked)))
    return examples


def fresh_model(blueprint: Blueprint, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A randomly initialised model, on the GPU if there is one."""
    torch.manual_seed(blueprint.pretraining.seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=blueprint.hidden_size,
        intermediate_size=blueprint.intermediate_size,
        num_hidden_layers=blueprint.num_layers,
        num_attention_heads=blueprint.num_heads,
        num_key_value_heads=blueprint.num_heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)  # type: ignore[arg-type]  # transformers wraps nn.Module.to
    return model


def write_prompts(pairs: list[Pair], output: Path) -> None:
    """Write questions as conversations: for distillation, and held-out ones for reports."""
    output.mkdir(parents=True, exist_ok=True)
    for split, limit in PROMPTS.items():
        chosen = [p for p in pairs if p.split == split]
        random.Random(0).shuffle(chosen)
        with (output / f"{split}.jsonl").open("w") as file:
            for pair in chosen[:limit]:
                messages = [{"role": "user", "content": pair.question}]
                file.write(json.dumps({"id": pair.source, "messages": messages}) + "\n")


def build(name: str, pairs: list[Pair], work: Path, output: Path, save_every: int) -> None:
    """Train one model and write it as bfloat16 safetensors with tokenizer, record and card."""
    tokenizer = train_tokenizer(pairs)
    train, validation = (
        [p for p in pairs if p.split == split] for split in ("train", "validation")
    )
    blueprint = BLUEPRINTS[name]
    model = fresh_model(blueprint, tokenizer)
    run = TrainingRun(name, model, encode(tokenizer, train), blueprint.pretraining, work)
    run.train(save_every)
    held_out = {
        "conversations": encode(tokenizer, validation[:HELD_OUT]),
        "answers": encode(tokenizer, validation[:HELD_OUT], answers_only=True),
    }
    pretrained = {kind: mean_loss(model, examples) for kind, examples in held_out.items()}
    questions = [pair.question for pair in train]
    polished = polish(name, model, tokenizer, questions, blueprint.polishing, work, save_every)
    record = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "blueprint": asdict(blueprint),
        "tokens_trained": run.tokens,
        "pairs": {s: sum(p.split == s for p in pairs) for s in PROMPTS},
        "polishing_rounds": polished,
        "validation_nats_per_token_after_pretraining": pretrained,
        "validation_nats_per_token": {k: mean_loss(model, e) for k, e in held_out.items()},
        "sources": {"python": platform.python_version(), **package_versions()},
    }
    model.to("cpu", torch.bfloat16)  # type: ignore[arg-type]  # transformers wraps nn.Module.to
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    held_out_questions = [pair.question for pair in validation[:ASKED]]
    record["greedy_validation"] = greedy_behaviour(model, tokenizer, held_out_questions)
    folder = output / f"demo_{name}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_text(folder / "training_record.json", json.dumps(record, indent=2) + "\n")
    recipe = blueprint.polishing.recipe if blueprint.polishing is not None else None
    write_card(folder, name, record, blueprint.pretraining, recipe)
    logger.info(
        "%s: %s, %s", name, record["validation_nats_per_token"], record["greedy_validation"]
    )


def main(
    work: Annotated[Path, typer.Option(help="Checkpoints and logs.")] = Path("runs/demo-models"),
    output: Annotated[Path, typer.Option(help="Folder of models and prompts.")] = Path("assets"),
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 50,
) -> None:
    """Train the demo target and the demo draft model; run the same command again to resume."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    work.mkdir(parents=True, exist_ok=True)
    pairs = read_corpus()
    write_prompts(pairs, output / "demo_prompts")
    for name in BLUEPRINTS:
        build(name, pairs, work, output, save_every)


if __name__ == "__main__":
    typer.run(main)
