"""Train the demo target and the demo draft model from Python sources; rerun it to resume.

    python -m drafthead.scripts.build_demo_models --work runs/demo-models --output assets

One to two hours on 2 cores, minutes on a GPU. A killed run continues from its last checkpoint.
"""

import json
import logging
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from drafthead.scripts.demo_corpus import Pair, package_versions, read_corpus
from drafthead.train.optimizers import OptimizerConfig, build_optimizers, build_schedulers

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


@dataclass(frozen=True)
class Recipe:
    """Architecture and training of one demo model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    epochs: float
    seed: int = 0
    batch_tokens: int = 6144
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(
            name="muon", lr=3e-3, muon_lr=0.02, schedule="linear", warmup_ratio=0.04
        )
    )


# One decoder layer and the output head are each 6 to 7 % of the target, as in a large model.
RECIPES = {
    "target": Recipe(
        hidden_size=320, intermediate_size=864, num_layers=14, num_heads=5, epochs=1.3
    ),
    "draft": Recipe(hidden_size=256, intermediate_size=688, num_layers=2, num_heads=4, epochs=1.3),
}


def train_tokenizer(pairs: list[Pair]) -> PreTrainedTokenizerFast:
    """Byte-level BPE on the training pairs, with the chat template inside."""
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


def encode(tokenizer: PreTrainedTokenizerBase, pairs: list[Pair]) -> list[list[int]]:
    """Each pair as the token ids of a two-message conversation."""
    rows = []
    for pair in pairs:
        messages = [
            {"role": "user", "content": pair.question},
            {"role": "assistant", "content": pair.answer},
        ]
        rows.append(list(tokenizer.apply_chat_template(messages, return_dict=False)))
    return rows


def batches_of_epoch(
    rows: list[list[int]], batch_tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """Row indices of each batch: rows of similar length, at most `batch_tokens` after padding."""
    generator = random.Random(f"{seed}-{epoch}")
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i]) // 8, generator.random()))
    batches: list[list[int]] = []
    for index in order:
        length = len(rows[index])
        if not batches or length * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    generator.shuffle(batches)
    return batches


def pad_batch(rows: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids [B, T] and labels [B, T] with -100 on padding.

    No attention mask is needed: a causal model never looks right, where the padding is.
    """
    longest = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    padding = torch.arange(longest)[None] >= lengths[:, None]
    return ids, ids.masked_fill(padding, -100)


def token_loss(
    model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Summed next-token loss in nats and the number of tokens that it counts."""
    device = next(model.parameters()).device
    ids, labels = ids.to(device), labels.to(device)
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    loss = cross_entropy(
        logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    return loss, int((labels[:, 1:] != -100).sum())


@torch.no_grad()
def held_out_loss(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]
) -> dict[str, float]:
    """Nats a token on whole conversations and on their answers alone."""
    model.eval()
    assistant = tokenizer.get_vocab()["<|assistant|>"]
    totals = {"all": [0.0, 0], "answers": [0.0, 0]}
    for batch in batches_of_epoch(rows, 8192, seed=0, epoch=0):
        ids, labels = pad_batch([rows[i] for i in batch], tokenizer.pad_token_id)
        begins = torch.eq(ids, assistant).long()
        answered = begins.cumsum(1) - begins > 0
        for name, kept in (("all", labels), ("answers", labels.masked_fill(~answered, -100))):
            loss, count = token_loss(model, ids, kept)
            totals[name][0] += loss.item()
            totals[name][1] += count
    model.train()
    return {name: total / count for name, (total, count) in totals.items()}


class Run:
    """One training run whose whole state fits in a file, so that it can be resumed exactly."""

    def __init__(
        self, name: str, rows: list[list[int]], tokenizer: PreTrainedTokenizerBase, work: Path
    ):
        self.name, self.rows, self.work = name, rows, work
        self.recipe = RECIPES[name]
        self.pad = tokenizer.pad_token_id
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(self.recipe.seed)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB_SIZE,
                hidden_size=self.recipe.hidden_size,
                intermediate_size=self.recipe.intermediate_size,
                num_hidden_layers=self.recipe.num_layers,
                num_attention_heads=self.recipe.num_heads,
                num_key_value_heads=self.recipe.num_heads,
                max_position_embeddings=MAX_POSITIONS,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=self.pad,
            )
        )
        self.model.to(self.device)  # type: ignore[arg-type]  # transformers wraps nn.Module.to
        self.batches = list(self._all_batches())
        self.optimizers = build_optimizers(self.model.named_parameters(), self.recipe.optimizer)
        self.schedulers = build_schedulers(
            self.optimizers, self.recipe.optimizer, len(self.batches)
        )
        self.step = 0
        self.tokens = 0
        self.checkpoint = work / f"{name}.pt"

    def _all_batches(self) -> Iterator[list[int]]:
        epochs, recipe = self.recipe.epochs, self.recipe
        for epoch in range(int(epochs) + 1):
            batches = batches_of_epoch(self.rows, recipe.batch_tokens, recipe.seed, epoch)
            yield from batches[: round(min(1.0, epochs - epoch) * len(batches))]

    def train_step(self) -> float:
        """One optimiser step; returns the batch's loss in nats a token."""
        rows = [self.rows[i] for i in self.batches[self.step]]
        loss, count = token_loss(self.model, *pad_batch(rows, self.pad))
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optimizer.max_grad_norm)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        self.step += 1
        self.tokens += count
        return loss.item() / count

    def save(self) -> None:
        """Write the whole state under a temporary name, then rename it."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "schedulers": [s.state_dict() for s in self.schedulers],
            "step": self.step,
            "tokens": self.tokens,
        }
        temporary = self.checkpoint.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self.checkpoint)

    def resume(self) -> None:
        """Continue from the last checkpoint, if there is one."""
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for owned, saved in zip(self.optimizers, state["optimizers"], strict=True):
            owned.load_state_dict(saved)
        for owned_schedule, saved in zip(self.schedulers, state["schedulers"], strict=True):
            owned_schedule.load_state_dict(saved)
        self.step, self.tokens = state["step"], state["tokens"]
        logger.info("%s: resumed at step %d of %d", self.name, self.step, len(self.batches))

    def train(self, save_every: int) -> None:
        """Train to the end of the schedule, saving and logging on the way."""
        log_path = self.work / f"{self.name}_log.jsonl"
        bar = tqdm(total=len(self.batches), initial=self.step, desc=self.name, mininterval=10)
        while self.step < len(self.batches):
            started = time.perf_counter()
            before = self.tokens
            loss = self.train_step()
            seconds = time.perf_counter() - started
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            if self.step % save_every == 0 or self.step == len(self.batches):
                self.save()
            with log_path.open("a") as log:
                speed = round((self.tokens - before) / seconds)
                log.write(json.dumps({"step": self.step, "loss": loss, "tokens_s": speed}) + "\n")
        bar.close()


def write_prompts(pairs: list[Pair], output: Path) -> None:
    """Write questions as conversations: training files for distillation, held-out for reports."""
    output.mkdir(parents=True, exist_ok=True)
    limits = {"train": 3000, "validation": 300, "test": 300}
    for split, limit in limits.items():
        chosen = [p for p in pairs if p.split == split]
        random.Random(0).shuffle(chosen)
        with (output / f"{split}.jsonl").open("w") as file:
            for pair in chosen[:limit]:
                messages = [{"role": "user", "content": pair.question}]
                file.write(json.dumps({"id": pair.source, "messages": messages}) + "\n")


def build(name: str, pairs: list[Pair], work: Path, output: Path, save_every: int) -> None:
    """Train one model and write it as bfloat16 safetensors with tokenizer and training record."""
    tokenizer = train_tokenizer(pairs)
    by_split = {s: [p for p in pairs if p.split == s] for s in ("train", "validation")}
    rows = encode(tokenizer, by_split["train"])
    run = Run(name, rows, tokenizer, work)
    run.resume()
    run.train(save_every)
    losses = held_out_loss(run.model, tokenizer, encode(tokenizer, by_split["validation"]))
    record = {
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "recipe": asdict(run.recipe),
        "tokens_trained": run.tokens,
        "tokens_in_an_epoch": sum(map(len, rows)),
        "pairs": {s: sum(p.split == s for p in pairs) for s in ("train", "validation", "test")},
        "validation_loss_nats_per_token": losses,
        "sources": package_versions(),
    }
    folder = output / f"demo_{name}"
    model = run.model
    model.to("cpu", torch.bfloat16)  # type: ignore[arg-type]  # transformers wraps nn.Module.to
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "training_record.json").write_text(json.dumps(record, indent=2) + "\n")
    logger.info("%s: %s", name, losses)


def main(
    work: Annotated[Path, typer.Option(help="Checkpoints and logs.")] = Path("runs/demo-models"),
    output: Annotated[Path, typer.Option(help="Folder of models and prompts.")] = Path("assets"),
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 50,
) -> None:
    """Train the demo target and the demo draft model; rerun the same command to resume."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    work.mkdir(parents=True, exist_ok=True)
    pairs = read_corpus()
    write_prompts(pairs, output / "demo_prompts")
    for name in RECIPES:
        build(name, pairs, work, output, save_every)


if __name__ == "__main__":
    typer.run(main)
