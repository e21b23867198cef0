"""How the demo's questions, answers and lessons are cut, on examples written down here."""

import ast
from pathlib import Path

import torch

from demo_models.corpus import cut_function, pairs_in_file, split_of
from demo_models.rollouts import Rollout, lesson
from demo_models.training import (
    IGNORE,
    LEARN,
    UNLEARN,
    Example,
    batches_of_epoch,
    pad_batch,
    token_loss,
)
from drafthead.infer.answers.results import repeats

SOURCE = '''
class Counter:
    def double(self, x):
        """Twice x."""
        result = 2 * x
        return result

    def no_docstring(self):
        return 1

    @property
    def decorated(self):
        """Decorators would be lost."""
        return self.value_that_is_long
'''


def test_question_is_signature_and_docstring_and_answer_the_function_without_it(tmp_path) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    (pair,) = pairs_in_file("package/module.py", path)
    assert pair.question == 'def double(self, x):\n    """Twice x."""'
    assert pair.answer == "def double(self, x):\n    result = 2 * x\n    return result"
    assert pair.source == "package/module.py:3"


def test_functions_that_make_no_pair_are_left_out() -> None:
    for source in ('def f():\n    """Only words."""', 'def f(): "x"; return 1'):
        node = ast.parse(source).body[0]
        assert cut_function(node, source.splitlines()) is None


def test_broken_files_are_skipped(tmp_path: Path) -> None:
    for name, content in (("a.py", b"def f(:"), ("b.py", b"\xff\xfe\x00")):
        (tmp_path / name).write_bytes(content)
        assert list(pairs_in_file(name, tmp_path / name)) == []


def test_files_are_split_the_same_everywhere() -> None:
    assert split_of("torch/nn/modules/linear.py") == "train"
    names = [f"package/file_{n}.py" for n in range(2000)]
    shares = [sum(split_of(n) == s for n in names) / 2000 for s in ("validation", "test")]
    assert all(0.02 < share < 0.06 for share in shares)


def test_repeats_mark_the_end_of_every_8gram_that_came_before() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [i for i, again in enumerate(repeats(tokens)) if again] == [16, 17]
    assert not any(repeats(list(range(30))))


def test_good_answers_are_learnt_and_repetitions_unlearnt() -> None:
    good = lesson(Rollout([9, 9], [1, 2, 3], finished=True))
    assert good == Example([9, 9, 1, 2, 3], [IGNORE, IGNORE, LEARN, LEARN, LEARN])
    looping = lesson(Rollout([9], [5] * 10, finished=False))
    assert looping.signs == [IGNORE] * 9 + [UNLEARN] * 2
    assert lesson(Rollout([9], [1, 2, 3], finished=False)) is None


def test_learning_raises_and_unlearning_lowers_a_tokens_probability(target) -> None:
    ids, model = [3, 8, 9], target.model
    model.requires_grad_(True)
    for sign, rises in ((LEARN, True), (UNLEARN, False)):
        batch = pad_batch([Example(ids, [IGNORE, IGNORE, sign])])
        loss, count = token_loss(model, *batch)
        assert count == 1
        (gradient,) = torch.autograd.grad(loss, model.lm_head.weight)
        # A descent step moves the token's output row along its hidden state if it is to rise.
        hidden = model.model(torch.tensor([ids[:2]])).last_hidden_state[0, -1]
        assert bool((-gradient[9] @ hidden > 0) == rises)
    model.requires_grad_(False)


def test_batches_hold_every_example_once_and_keep_to_their_size() -> None:
    examples = [Example([0] * n, [LEARN] * n) for n in (5, 9, 30, 7, 12, 3, 28)]
    batches = batches_of_epoch(examples, batch_tokens=40, seed=1, epoch=0)
    assert sorted(i for batch in batches for i in batch) == list(range(7))
    assert all(max(len(examples[i].ids) for i in b) * len(b) <= 40 for b in batches)
    assert batches == batches_of_epoch(examples, batch_tokens=40, seed=1, epoch=0)
