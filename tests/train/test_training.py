"""Training from conversations to a written head: features, invariances, resume, refusals.

conftest.py runs what asks for a `family` once for each head family.
"""

import json
import math
import random
import runpy
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from runs import evaluations, in_memory, run, write_inputs, write_run
from stages import more
from tiny import byte_tokenizer, write_conversations
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.target import Target
from drafthead.heads.base import HEADS, DraftHead
from drafthead.heads.formats.loading import load_head
from drafthead.heads.layers import tiled_attention
from drafthead.heads.layers.segments import positions_in_segments
from drafthead.heads.objectives.batch import MAX_RANK, HeadBatch
from drafthead.train.data.packing import RowOrder, collate, pack, pack_sequences
from drafthead.train.data.sequences import TokenSequence
from drafthead.train.data.training_rows import load_packed
from drafthead.train.features.reading import check_row_length, read_features
from drafthead.train.learning import loop
from drafthead.train.learning.evaluation import Evaluation, evaluation_of, measure
from drafthead.train.learning.loop import Trainer
from drafthead.train.learning.ranks import RankedAnchors, count_paths
from drafthead.train.learning.step import LossModule
from drafthead.train.run.config import load_run_config
from drafthead.train.run.folder import cut_log, first_difference
from drafthead.train.run.trainables import new_head, trainable
from drafthead.train.settings import DataConfig
from drafthead.train.train_heads import train

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
ROOT = Path(__file__).parents[2]
ENTRY = ROOT / "train" / "train_heads.py"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and conversations."""
    folder = tmp_path_factory.mktemp("files")
    write_inputs(folder, initializer_range=0.02)
    return folder


@pytest.fixture(scope="module")
def target(files: Path) -> Target:
    return load_decoder_only(files / "target", "float32", "cpu")


@pytest.fixture
def configure(files: Path, tmp_path: Path):
    """Writes a run's YAML into the test's folder, with some settings of its own."""

    def write(
        output: str = "run",
        family: str = "medusa",
        optimizer: dict[str, object] | None = None,
        **train_settings: object,
    ) -> Path:
        path, head = tmp_path / f"{output}.yaml", {"family": family}
        return write_run(path, files, head, optimizer or {}, train_settings)

    return write


@pytest.fixture
def entered(monkeypatch, capsys) -> Callable[[Path], tuple[int, str]]:
    """Runs the script that launchers start, in this process; gives its status and its errors."""

    def enter(config: Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [str(ENTRY), "--config", str(config)])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(ENTRY), run_name="__main__")
        return stop.value.code, capsys.readouterr().err

    return enter


def losses(folder: Path) -> list[float]:
    """The loss of each step; a step that is missing or there twice fails the test."""
    return column(folder, "loss")


def column(folder: Path, key: str) -> list[float]:
    """One number of each step."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record[key] for record in records]


def sequence(length: int, seed: int) -> TokenSequence:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 200, (length,), generator=generator, dtype=torch.int32)
    return TokenSequence(ids, torch.arange(length) >= 2)


def features(target: Target, tokens: HeadBatch, spec: FeatureSpec) -> HeadBatch:
    return read_features(target, tokens, spec, "no")


def fresh_head(family: str, target: Target) -> DraftHead:
    torch.manual_seed(0)
    counts = torch.ones(target.vocab_size, dtype=torch.long)
    return new_head(family, trainable(family).config_class(), target, counts)


# Data


def test_packing_fills_rows_and_loses_no_sequence():
    assert sorted(map(sorted, pack([5, 4, 3, 2], 7, seed=0))) == [[0, 3], [1, 2]]
    lengths = [random.Random(i).randint(1, 100) for i in range(3000)]
    rows = pack(lengths, 100, seed=0)
    assert sorted(i for row in rows for i in row) == list(range(3000))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 100
    assert sum(lengths) / (100 * len(rows)) > 0.95
    assert rows == pack(lengths, 100, seed=0) != pack(lengths, 100, seed=1)


def test_an_epoch_reads_each_row_once_and_the_next_in_another_order():
    order = RowOrder(num_rows=6, batch_rows=4, seed=0)
    stream = [row for step in range(3) for row in order.rows_of_step(step)]
    assert sorted(stream[:6]) == sorted(stream[6:]) == list(range(6))
    assert stream[:6] != stream[6:]
    assert order.rows_of_step(1) == stream[4:8]  # going back gives the same again


def test_positions_restart_in_each_segment():
    segments = torch.tensor([[1, 1, 1, 2, 2, 0]])
    assert positions_in_segments(segments).tolist() == [[0, 1, 2, 0, 1, 0]]


SIZES = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
PACKED_TARGETS = {
    "llama": {"intermediate_size": 64},
    "gpt2": {"n_positions": 64},  # learnt positions show a wrong start of a segment, rotary hide it
    "bloom": {},  # ALiBi counts keys from the start of a segment
    "gemma2": {"intermediate_size": 64, "num_key_value_heads": 2, "sliding_window": 5},
}


@pytest.mark.parametrize("name", PACKED_TARGETS)
def test_features_of_a_packed_row_equal_those_of_its_conversations_alone(name: str):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SIZES | PACKED_TARGETS[name])
    target = Target(AutoModelForCausalLM.from_config(config).eval())
    sequences = [sequence(length, length) for length in (7, 12, 5)]
    spec = FeatureSpec(layers=(0, 1), last=True)
    # The second row is longer, so that the first has padding.
    packed = features(target, collate([sequences, [sequence(40, 1)]]), spec).features
    start = 0
    for alone in sequences:
        end = start + len(alone.input_ids)
        ids = alone.input_ids.long()[None]
        expected = target.run(ids, torch.arange(end - start)[None], None, spec).features
        for tap, wanted in zip(
            (*packed.taps, packed.last), (*expected.taps, expected.last), strict=True
        ):
            torch.testing.assert_close(tap[0, start:end], wanted[0], atol=1e-5, rtol=1e-5)
        start = end


def test_packing_does_not_change_a_heads_loss(trainable_family: str, target: Target):
    head = fresh_head(trainable_family, target)
    sequences = [sequence(length, length) for length in (7, 12, 5)]
    packed = features(target, collate([sequences]), head.features_needed)
    alone = features(target, collate([[s] for s in sequences]), head.features_needed)
    torch.manual_seed(0)
    loss_packed = head.loss(packed, target)
    torch.manual_seed(0)
    loss_alone = head.loss(alone, target)
    torch.testing.assert_close(loss_packed.total, loss_alone.total, rtol=1e-4, atol=1e-4)
    assert torch.equal(loss_packed.depth_counts, loss_alone.depth_counts)


def test_tiled_attention_changes_neither_loss_nor_gradients(
    trainable_family: str, target: Target, monkeypatch: pytest.MonkeyPatch
):
    def losses_and_gradients() -> list[torch.Tensor]:
        head = fresh_head(trainable_family, target)
        rows = collate([[sequence(20, 1), sequence(13, 2)], [sequence(40, 3)]])
        batch = features(target, rows, head.features_needed)
        torch.manual_seed(0)
        total, _ = LossModule(head, target, "no")(batch)
        total.backward()
        return [total, *(p.grad for p in head.parameters() if p.grad is not None)]

    whole = losses_and_gradients()
    monkeypatch.setattr(tiled_attention, "TILE", 8)
    monkeypatch.setattr(tiled_attention, "FEWEST_SCORES", 1)
    torch.testing.assert_close(losses_and_gradients(), whole, rtol=1e-4, atol=1e-5)


def test_rows_longer_than_the_targets_positions_are_refused(target: Target):
    with pytest.raises(UserError, match=r"data.max_length is 129.*128"):
        check_row_length(target, "tiny", 129)


def test_data_has_one_fingerprint_and_other_data_another():
    tables = [in_memory([sequence(5, 0), sequence(6, seed)]) for seed in (1, 1, 2)]
    first, again, other = (pack_sequences(table, 8, seed=0) for table in tables)
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()


# Heads


def test_a_fresh_medusa_head_says_what_the_targets_output_head_says(target: Target):
    head = fresh_head("medusa", target)
    hidden = torch.randn(5, target.hidden_size)
    for index in range(head.depth):
        assert torch.equal(head.token_logits(index, hidden, target), target.project(hidden))


def test_a_head_of_another_size_than_the_target_is_refused(target: Target):
    config = HEADS["medusa"].config_class(hidden_size=64)
    with pytest.raises(UserError, match=r"head.hidden_size is 64, but the target's is 32"):
        new_head("medusa", config, target, torch.ones(target.vocab_size))


# Evaluation


def test_ranks_become_accuracies_tau_and_path_counts():
    """Four anchors, two depths; the third head guess was right twice at depth 1."""
    ranks = torch.tensor([[0, 0], [0, 2], [2, 0], [2, MAX_RANK]])
    result = measure(RankedAnchors(ranks, [(0, 1)] * 4, [5, 6, 7, 8]))
    assert result.top1 == (0.5, 0.5)
    assert result.top8 == (1.0, 0.75)
    assert result.alpha == (0.5, 0.5)
    # One step from the first root accepts two, and the token after them ends the answer.
    assert result.tau_chain == 3 / 1
    assert result.path_counts == {(): 4, (0,): 2, (2,): 2, (0, 0): 1, (0, 2): 1, (2, 0): 1}


def test_kept_paths_are_the_most_frequent_and_form_a_tree():
    ranks = torch.randint(0, MAX_RANK + 1, (500, 4), generator=torch.Generator().manual_seed(0))
    kept = count_paths(ranks, keep=40)
    assert len(kept) == 40
    assert all(path[:-1] in kept for path in kept if len(path) > 1)


# Runs


# Heads learn the answers here: a random target's own distribution is so flat that little can be
# learnt of it. EAGLE and MTP have to say them through that target's small, frozen output head.
FROM_LABELS = {
    "mtp": ("head.loss=hard", "optimizer.muon_lr=0.1", "optimizer.lr=0.02"),
    "eagle": (
        "head.loss=hard",
        "head.token_weight=1",
        "head.feature_weight=0",
        "optimizer.muon_lr=0.1",
    ),
}


def test_loss_falls_and_the_written_head_loads(family: str, configure, target: Target):
    overrides = FROM_LABELS.get(family, ("head.loss=hard",))
    folder = run(configure(family=family, max_steps=30, eval_every=15), *overrides)
    curve = losses(folder)
    assert sum(curve[-5:]) < 0.9 * sum(curve[:5])
    head = load_head(folder, target)
    assert head.path_counts
    measured = evaluations(folder)
    assert [each["step"] for each in measured] == [15, 30]
    assert measured[-1]["tau_tree"]["16"] >= measured[-1]["tau_chain"] > 1
    assert list((folder / "tensorboard").rglob("events.*"))
    record = json.loads((folder / "run.json").read_text())
    assert record["finished"]
    assert record["settings"]["head"]["family"] == family
    origin = json.loads((folder / "config.json").read_text())["provenance"]
    assert origin["target_precision"] == "float32"
    # Wheels of PyPI leave the local part, as in 2.15.0+cu132, out of their metadata.
    assert record["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


@pytest.mark.parametrize(("taus", "best"), [([1.5, 1.9, 1.7], 8), ([1.5, 1.6, 1.7], None)])
def test_the_best_head_of_a_run_is_kept_unless_it_is_the_last(
    configure, target: Target, monkeypatch, caplog, taus: list[float], best: int | None
):
    """Evaluations after steps 4, 8 and 12."""
    found = iter(taus)

    def measured(*arguments: object) -> Evaluation:
        result = evaluation_of(*arguments)
        return replace(result, tau_tree=result.tau_tree | {16: next(found)})

    monkeypatch.setattr(loop, "evaluation_of", measured)
    folder = run(configure(max_steps=12, eval_every=4))
    assert (folder / "best").exists() == (best is not None)
    if best is not None:
        assert load_head(folder / "best", target).path_counts
        assert f"was 1.90 after step {best} and is 1.70 now" in caplog.text


@pytest.mark.parametrize("trained", ["medusa", "parallel"])
def test_micro_batches_do_not_change_the_losses(configure, trained):
    """Nor the anchors that block-parallel heads draw."""
    settings: dict[str, object] = {"micro_batch_rows": 4, "max_steps": 4}
    whole = run(configure("whole", trained, **settings))
    for rows in (1, 2):
        split = run(configure(f"split-{rows}", trained, **settings | {"micro_batch_rows": rows}))
        for key in ("loss", "grad_norm"):
            assert column(split, key) == pytest.approx(column(whole, key), rel=1e-5, abs=1e-5)


def test_a_run_goes_on_from_the_older_state_when_the_newest_is_damaged(configure, caplog):
    settings = {"max_steps": 6, "save_every": 2}
    expected = losses(run(configure("whole", **settings)))
    config = configure("damaged", **settings)
    folder = interrupted(config, step=4)
    optimizer = folder / "state" / "step-000000004" / "optimizer.bin"
    optimizer.write_bytes(optimizer.read_bytes()[:1000])
    run(config)
    assert "step-000000004 is damaged (optimizer.bin" in caplog.text
    assert losses(folder) == expected


@contextmanager
def before_step(step: int, act: Callable[[], object]) -> Iterator[None]:
    """Runs within do something once they have taken so many steps."""
    take_step = Trainer._step

    def acting(trainer: Trainer, *arguments: object) -> object:
        if trainer.progress.step == step:
            act()
        return take_step(trainer, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", acting)
        yield


def interrupted(config: Path, step: int) -> Path:
    """Train until that step and stop without saving, as a kill does; gives the folder."""

    def stop() -> None:
        raise KeyboardInterrupt

    with before_step(step, stop), pytest.raises(KeyboardInterrupt):
        train(load_run_config(config))
    return config.with_suffix("")


def head_weights(folder: Path, target: Target) -> dict[str, torch.Tensor]:
    """The weights that a run has written."""
    return load_head(folder, target).state_dict()


def equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return all(some[name].equal(tensor) for name, tensor in others.items())


def test_resuming_with_other_target_weights_is_refused(configure, files: Path, tmp_path: Path):
    shutil.copytree(files / "target", tmp_path / "target")
    config = configure(max_steps=4, save_every=2)
    text = config.read_text().replace(str(files / "target"), str(tmp_path / "target"))
    config.write_text(text)
    interrupted(config, step=3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    model.lm_head.weight.data += 0.01
    model.save_pretrained(tmp_path / "target")
    with pytest.raises(UserError, match="the weights of the target are no longer"):
        run(config)


def test_kept_features_change_no_loss(trainable_family: str, configure, tmp_path: Path):
    """Over the first epoch, which writes them, and the later ones, which read them.

    A row is rounded as in the batch in which it was read first.
    """
    online = losses(run(configure("online", trainable_family, epochs=3)))
    kept = configure("kept", trainable_family, epochs=3)
    settings = f"data.feature_folder={tmp_path / 'features'}"
    assert losses(run(kept, settings)) == pytest.approx(online, rel=1e-4)


def test_features_kept_within_a_budget_change_no_loss(configure, tmp_path: Path):
    """Half of the rows are kept."""
    path = configure("kept", epochs=3)
    settings = yaml.safe_load(path.read_text())
    settings["data"] |= {
        "feature_folder": str(tmp_path / "features"),
        "feature_budget_gb": 30e-6,
    }
    path.write_text(yaml.safe_dump(settings))
    found = losses(run(path))
    assert list(tmp_path.glob("features/*/row*"))
    online = losses(run(configure("online", epochs=3)))
    assert found == pytest.approx(online, rel=1e-4)


def test_an_interrupted_run_saves_exits_with_130_and_continues(configure, entered):
    config = configure("stopped", save_every=1000)
    with before_step(5, lambda: signal.raise_signal(signal.SIGINT)):
        status, errors = entered(config)
    assert status == 130 and "the same command continues" in errors
    folder = config.parent / "stopped"
    before = losses(folder)
    assert [p.name for p in folder.glob("state/*")] == [f"step-{len(before):09d}"]
    assert len(before) == 6, "the step that has begun is taken"
    assert losses(run(config))[:6] == before and len(losses(folder)) == 12


def test_a_time_budget_reaches_the_end_of_the_schedule(configure):
    folder = run(configure(max_minutes=0.03))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    peak = max(record["lr"][0] for record in records)
    assert peak > 0.015
    assert records[-1]["lr"][0] < 0.05 * peak
    assert 1.8 <= records[-1]["seconds"] < 10


def test_epochs_decide_the_number_of_steps(configure, files: Path):
    folder = run(configure(epochs=0.5))
    data = load_packed(
        {str(files / "train.jsonl"): 1.0}, byte_tokenizer(), DataConfig("", max_length=64), seed=0
    )
    assert len(losses(folder)) == math.ceil(0.5 * len(data.rows) / 4)


def test_a_finished_run_does_nothing_when_started_again(configure, caplog):
    config = configure()
    folder = run(config)
    before = (folder / "metrics.jsonl").stat().st_mtime_ns
    with caplog.at_level("INFO", "drafthead"):
        run(config)
    assert "finished: nothing to do" in caplog.text
    assert (folder / "metrics.jsonl").stat().st_mtime_ns == before


def test_a_finished_run_goes_on_when_it_is_to_last_longer(configure):
    config = configure(max_steps=4)
    folder = run(config)
    first = losses(folder)
    longer = losses(run(config, "train.max_steps=8"))
    assert len(longer) == 8 and longer[:4] == first
    assert json.loads((folder / "run.json").read_text())["settings"]["train"]["max_steps"] == 8
    with pytest.raises(UserError, match="train.max_steps was 8 and is now 6"):
        run(config, "train.max_steps=6")
    with pytest.raises(UserError, match="optimizer.lr was"):
        run(config, "train.max_steps=9", "optimizer.lr=0.01")


@pytest.mark.parametrize(
    "of", ["medusa", "eagle3", *map(more, sorted({*HEADS} - {"medusa", "eagle3"}))]
)
def test_a_run_can_begin_with_the_weights_of_another(of: str, configure, target: Target):
    first = run(configure("first", of))
    second = configure("second", of, max_steps=1, init_from=str(first))
    frozen = ["optimizer.lr=1e-12", "optimizer.muon_lr=1e-12"]
    continued = load_head(run(second, *frozen), target).state_dict()
    for name, tensor in load_head(first, target).state_dict().items():
        torch.testing.assert_close(continued[name], tensor, msg=name)


@pytest.mark.parametrize("layered", [more("eagle"), "eagle3", more("parallel")])
def test_layers_that_the_other_head_lacks_change_nothing_at_first(layered: str, configure, target):
    first = run(configure("first", layered), "head.num_layers=1")
    same, deeper = (
        run(
            configure(f"of-{layers}", layered, max_steps=2, init_from=str(first)),
            f"head.num_layers={layers}",
        )
        for layers in (1, 2)
    )
    assert losses(deeper)[0] == pytest.approx(losses(same)[0], rel=1e-5)
    weights = load_head(deeper, target).state_dict()
    outputs = [weight for name, weight in weights.items() if name.endswith("o_proj.weight")]
    assert len(outputs) == 2 and all(weight.any() for weight in outputs), "the new one learns"


def test_weights_of_another_shape_or_family_are_refused(configure):
    first = run(configure("first", "medusa", max_steps=1))
    other = configure("second", "medusa", max_steps=1, init_from=str(first))
    with pytest.raises(
        UserError, match=r"init_from=.* has another shape: branches\.1.*is .* there"
    ):
        run(other, "head.num_heads=1")
    with pytest.raises(UserError, match=r"is a head of the family medusa, .* is hydra"):
        run(configure("third", "hydra", max_steps=1, init_from=str(first)))


def test_taps_chosen_for_another_depth_are_named(target: Target, caplog):
    config = HEADS["parallel"].config_class(taps=(0,))
    new_head("parallel", config, target, torch.ones(target.vocab_size))
    assert "head.taps is [0]; without that setting it would be [0, 1], for the" in caplog.text
    caplog.clear()
    config = HEADS["parallel"].config_class(taps=(0, 1))
    new_head("parallel", config, target, torch.ones(target.vocab_size))
    assert not caplog.text


def test_other_settings_in_the_same_folder_are_refused_unless_overwritten(configure):
    config = configure()
    run(config)
    with pytest.raises(UserError, match=r"optimizer.lr was 0.003 and is now 0.01"):
        run(config, "optimizer.lr=0.01")
    folder = run(config, "optimizer.lr=0.01", "train.overwrite=true", "train.max_steps=3")
    assert len(losses(folder)) == 3


def test_a_run_killed_before_it_was_marked_finished_finishes_without_a_second_evaluation(configure):
    config = configure()
    folder = run(config)
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "finished": False}))
    run(config)
    assert len(losses(folder)) == 12
    assert (folder / "evaluation.jsonl").read_text().count("\n") == 1
    assert json.loads((folder / "run.json").read_text())["finished"]


def test_bfloat16_training_learns_too(configure):
    curve = losses(run(configure(mixed_precision="bf16", max_steps=30)))
    assert sum(curve[-5:]) < 0.9 * sum(curve[:5])


def test_resuming_on_changed_data_is_refused(configure, files: Path, tmp_path: Path):
    data = tmp_path / "own.jsonl"
    write_conversations(data, 20, seed=3)
    config = configure(max_steps=3)
    folder = run(config, f"data.train={data}")
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "finished": False}))
    write_conversations(data, 20, seed=4)
    with pytest.raises(UserError, match="the training data is no longer"):
        run(config, f"data.train={data}")


def test_a_loss_that_is_not_finite_ends_the_run_with_advice(configure):
    with pytest.raises(UserError, match=r"lower optimizer.lr"):
        run(configure(max_steps=50), "optimizer.name=adamw", "optimizer.lr=1e30")


@pytest.mark.parametrize("damaged", ["model.norm.weight", "lm_head.weight"])
def test_numbers_of_the_target_are_told_from_a_learning_rate(
    configure, files: Path, tmp_path: Path, damaged: str
):
    model = LlamaForCausalLM.from_pretrained(files / "target")
    weight = model.get_parameter(damaged)
    weight.data.view(-1)[0] = float("nan")
    model.save_pretrained(tmp_path / "damaged")
    byte_tokenizer().save_pretrained(tmp_path / "damaged")
    with pytest.raises(UserError, match="because the target's own .* are not finite"):
        run(configure(family="eagle"), f"target.name={tmp_path / 'damaged'}")


def test_a_head_that_one_token_would_beat_is_named_at_the_end(configure, caplog):
    run(configure(max_steps=1), "optimizer.lr=1e-9")
    assert "first guess is right for" in caplog.text and "alone would be for" in caplog.text


def test_bad_input_is_one_sentence_and_exit_status_2(configure, entered):
    status, errors = entered(configure(max_step=3))
    assert status == 2
    assert "unknown setting train.max_step; did you mean train.max_steps?" in errors
    assert "Traceback" not in errors


def test_a_log_keeps_whole_lines_up_to_a_step(tmp_path: Path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    cut_log(log, 2)
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_overwriting_is_no_difference_between_runs():
    old, new = {"train": {"overwrite": False}}, {"train": {"overwrite": True}}
    assert first_difference(old, new) is None
    assert first_difference(old, {"train": {"seed": 1}}) == "train.seed was None and is now 1"


def test_a_run_goes_on_wherever_its_target_is():
    old, new = {"target": {"placement": "whole"}}, {"target": {"placement": "fsdp"}}
    assert first_difference(old, new) is None
