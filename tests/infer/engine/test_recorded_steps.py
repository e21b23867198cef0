"""Steps as a GPU runs them: recorded once for each shape, then repeated.

A rehearsal stands for CUDA graphs, and the functions are not compiled, so this needs neither.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, tiny_model
from rehearsal import Rehearsal, rehearse
from stages import more
from tiny import BUSHY, END, VOCAB, random_prompts, tiny_llama
from transformers import GenerationConfig

from drafthead.backends.cuda.recorded_target import RecordedTarget
from drafthead.backends.cuda.tree_kernels import is_old
from drafthead.core.drafting.drafter import Drafter, DraftSession
from drafthead.core.errors import UserError
from drafthead.core.kv_cache.cache_memory import CacheMemory, power_of_two
from drafthead.core.sampling import NO_TOKEN
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import PADDING, Budget, TokenTree
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.infer.decoder import Decoder, decoder_for
from drafthead.infer.engine import stepper
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.engine.step import Launched
from drafthead.infer.request.request import Request
from drafthead.infer.scheduling.running_rows import ServedRows
from drafthead.infer.serving import ServeRequest
from drafthead.infer.verifiers.base import follow
from drafthead.lab.exactness.oracle import OracleDecoder


@pytest.fixture
def rehearsal(monkeypatch) -> Rehearsal:
    """What every graph is recorded by, from now on."""
    return rehearse(monkeypatch)


def test_recorded_steps_decode_what_plain_decoding_does(
    drafter_name: str,
    target: Target,
    make_drafter: Callable[[str, Target], Drafter],
    rehearsal: Rehearsal,
) -> None:
    recorded, drafter = RecordedTarget(target), make_drafter(drafter_name, target)
    drafter.compile(recorded)
    prompts = random_prompts(5)
    compiled = Decoder(recorded, drafter)
    expected = OracleDecoder(target).generate(prompts, max_new_tokens=24).sequences
    assert compiled.generate(prompts, max_new_tokens=24).sequences == expected
    assert rehearsal.recorded > 0


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3}], ids=["greedy", "drawn"])
def test_static_trees_of_several_sizes_give_the_text_of_plain_decoding(
    target: Target, make_head, rehearsal: Rehearsal, sampling: dict[str, Any]
) -> None:
    """Greedy and matched."""
    recorded = RecordedTarget(target)
    head = make_head("medusa", recorded, output="shared")
    head.path_counts = {(): 9, (0,): 6, (1,): 3, (0, 0): 2, (0, 1): 1, (0, 0, 0): 1}
    drafter = drafter_for(head, recorded)
    drafter.compile(recorded)
    prompts, ask = random_prompts(3), {"max_new_tokens": 30, "seed": 5, **sampling}
    expected = OracleDecoder(target).generate(prompts, **ask).sequences
    for nodes in (2, 5):
        decoder = Decoder(recorded, drafter, Budget(nodes, min(3, nodes - 1)))
        assert decoder.generate(prompts, **ask).sequences == expected


def test_a_warm_up_also_records_for_the_last_row_of_a_batch(
    target: Target, rehearsal: Rehearsal
) -> None:
    recorded = RecordedTarget(target)
    Decoder(recorded).warm_up([4])
    made = [each for calls in recorded.backend.made for each in calls.recordings.values()]
    assert {each.places[0].shape[0] for each in made} == {4, 1}


def test_a_record_of_scores_changes_neither_rule_nor_text(
    target: Target, rehearsal: Rehearsal
) -> None:
    """Only the pass is recorded then, but tokens are still matched, as the seed wants."""
    ask = {"max_new_tokens": 20, "temperature": 1.0, "seed": 5}
    prompts = random_prompts(1)
    found = Decoder(RecordedTarget(target)).generate(prompts, **ask, logprobs=1)
    assert found.sequences == OracleDecoder(target).generate(prompts, **ask).sequences
    expected = Decoder(target).generate(prompts, **ask, logprobs=1).logprobs
    for here, there in zip(found.logprobs, expected, strict=True):
        assert here.processed == pytest.approx(there.processed, abs=1e-4)
        assert here.raw == pytest.approx(there.raw, abs=1e-4)


def test_a_recorded_decoder_is_a_custom_generate_as_well(
    target: Target, rehearsal: Rehearsal
) -> None:
    ids = torch.tensor([[9, 10, 11], [12, 9, 30], [40, 41, 9]])
    expected = target.model.generate(ids, max_new_tokens=20)
    function = Decoder(RecordedTarget(target)).as_custom_generate()
    assert target.model.generate(ids, max_new_tokens=20, custom_generate=function).equal(expected)


def test_passes_and_drafts_are_recorded_again_once_weights_were_replaced(
    make_target, make_head, rehearsal: Rehearsal
) -> None:
    target = make_target(seed=0, layers=1)
    recorded = RecordedTarget(target)
    drafter = drafter_for(make_head("eagle3", recorded), recorded)
    drafter.compile(recorded)
    decoder = Decoder(recorded, drafter, Budget(2, 1))

    def recordings() -> dict[int, object]:
        """Those that an answer leaves, kept: freed memory is used again."""
        decoder.generate(random_prompts(1), max_new_tokens=6)
        made = (*recorded.backend.made, *drafter.backend.made)
        return {id(each): each for calls in made for each in calls.recordings.values()}

    before = recordings()
    assert before and recordings().keys() == before.keys()
    embedding = target.model.get_input_embeddings()
    embedding.weight = torch.nn.Parameter(-embedding.weight.detach())
    assert not recordings().keys() & before.keys()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recorded_passes_serve_every_kind_of_mask(name: str, rehearsal: Rehearsal) -> None:
    """The sizes that recordings are made for are more than a prompt's, and masks follow them."""
    target = Target(tiny_model(name, ARCHITECTURES[name]))
    prompts, ask = random_prompts(2), {"max_new_tokens": 4}
    expected = OracleDecoder(target).generate(prompts, **ask).sequences
    decoder = Decoder(RecordedTarget(target))
    for positions in (None, 3):
        reading = GenerationConfig(prefill_chunk_size=positions)
        assert decoder.generate(prompts, generation_config=reading, **ask).sequences == expected


def test_the_function_of_a_step_gives_the_same_text_eagerly(
    target: Target, make_drafter: Callable[[str, Target], Drafter], monkeypatch
) -> None:
    """The backend alone makes the difference between an eager step and a recorded one."""
    prompts = random_prompts(3)
    for name in ("medusa:own", "eagle3:own"):
        drafter = make_drafter(name, target)
        for temperature in (0.0, 1.0):
            rule = "match" if temperature else "greedy"
            ask = {"max_new_tokens": 20, "temperature": temperature, "seed": 5, "verifier": rule}
            expected = OracleDecoder(target).generate(prompts, **ask).sequences
            with monkeypatch.context() as there:
                there.setattr(stepper, "steps_in_one_call", lambda *_: True)
                there.setattr(stepper.Stepper, "verify_in_calls", None)
                decoder = Decoder(target, drafter)
                found = decoder.generate(prompts, **ask)
            assert found.sequences == expected


# Of a long mixed run: recordings of the step by rows, widths, capacities and nodes.
GREEDY: dict[str, Any] = {}
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": [3, 4, 5, 6]}


@pytest.mark.parametrize(
    ("name", "law", "goes"),
    [
        ("none", GREEDY, True),
        ("none", DRAWN, True),
        ("medusa:tree", GREEDY, True),
        ("medusa:tree", DRAWN, True),
        ("eagle:own", GREEDY, True),
        ("parallel:own", GREEDY, True),
        ("draft-model", GREEDY, False),  # reads the tokens
    ],
)
def test_the_next_step_is_asked_for_before_the_tokens_are_read(
    name: str,
    law: dict[str, Any],
    goes: bool,
    target: Target,
    make_drafter: Callable[..., Drafter],
    rehearsal: Rehearsal,
    monkeypatch,
) -> None:
    """And rows that end early or join change no text."""
    ahead: list[int] = []
    lead_on = stepper.Stepper.lead_on

    def noted(self: stepper.Stepper, session: DraftSession, launched: Launched) -> None:
        ahead.append(launched.num_nodes)
        lead_on(self, session, launched)

    monkeypatch.setattr(stepper.Stepper, "lead_on", noted)
    recorded, drafter = RecordedTarget(target), name != "none" and make_drafter(name, target)
    if drafter:
        drafter.compile(recorded)
    decoder = decoder_for(recorded, drafter or None, 8 if drafter else None, compile=False)
    prompts, oracle = random_prompts(4), OracleDecoder(target)
    expected = oracle.generate(prompts, max_new_tokens=30, **law).sequences
    assert decoder.generate(prompts, max_new_tokens=30, **law).sequences == expected
    assert bool(ahead) == goes
    limits = [30, 4, 9, 17]
    requests = [
        ServeRequest(prompt, number, limits[number], law.get("seed", [0] * 4)[number])
        for number, prompt in enumerate(prompts)
    ]
    asked = {key: value for key, value in law.items() if key != "seed"}
    answers = {each.id: each.tokens for each in decoder.serve(requests, max_rows=2, **asked)}
    assert [answers[n] for n in range(4)] == [expected[n][: limits[n]] for n in range(4)]


MOST_RECORDED = 150
TREES = (2, 3, 5, 7, 9, 12, 16, 17)


def counted(target: RecordedTarget, rehearsal: Rehearsal) -> tuple[int, int]:
    """Recordings and sets of memory that were made so far."""
    assert isinstance(target.memory, CacheMemory)
    return rehearsal.recorded, target.memory.sets_made


@pytest.mark.parametrize("name", ["medusa:own", "eagle:own", "draft-model", "own-layers"])
def test_a_second_answer_makes_no_recording_and_takes_no_memory(
    name: str, target: Target, make_drafter: Callable[..., Drafter], rehearsal: Rehearsal
) -> None:
    drafter, compiled = make_drafter(name, target), RecordedTarget(target)
    drafter.compile(compiled)
    decoder = decoder_for(compiled, drafter, tree_nodes=4, compile=False)
    decoder.generate(random_prompts(3), max_new_tokens=24)
    first = counted(compiled, rehearsal)
    decoder.generate(random_prompts(3), max_new_tokens=24)
    assert counted(compiled, rehearsal) == first


def test_a_long_mixed_run_makes_few_recordings(
    make_drafter: Callable[..., Drafter], rehearsal: Rehearsal
) -> None:
    target = Target(tiny_llama(0, max_position_embeddings=512, eos_token_id=END, pad_token_id=0))
    drafter, compiled = make_drafter("medusa:own", target), RecordedTarget(target)
    drafter.compile(compiled)
    chance, oracle = random.Random(3), OracleDecoder(target)
    for _ in range(40):
        rows, nodes = chance.randint(1, 4), chance.choice(TREES)
        prompts = [chance.choices(range(8, VOCAB), k=chance.randint(1, 300)) for _ in range(rows)]
        decoder = decoder_for(compiled, drafter, nodes, compile=False)
        answer = decoder.generate(prompts, max_new_tokens=12)
        assert answer.sequences == oracle.generate(prompts, max_new_tokens=12).sequences
    recorded, sets = counted(compiled, rehearsal)
    assert recorded <= MOST_RECORDED
    assert sets <= 8  # 4 numbers of rows, 2 capacities


@pytest.mark.parametrize("following", [NO_TOKEN, PADDING, 0, 9])
def test_nodes_that_fill_up_a_tree_are_never_accepted(following: int) -> None:
    tree = TokenTree.from_shape(BUSHY, torch.full((2, BUSHY.num_nodes), 9))
    accepted = follow(tree.padded(16), torch.full((2, 16), following))
    assert accepted.path.max() < BUSHY.num_nodes
    assert accepted.length.tolist() == [4 if following == 9 else 1] * 2


def test_tables_that_rows_share_are_padded_once() -> None:
    tree = TokenTree.from_shape(BUSHY, torch.zeros(3, BUSHY.num_nodes, dtype=torch.long))
    padded = tree.padded(16)
    tables = padded.parents, padded.depths, padded.ancestors
    assert [table.stride(0) for table in tables] == [0, 0, 0]
    assert padded.ancestors[0].diagonal().all()
    assert padded.ancestors[0, 10:].sum().item() == 6
    assert padded.padded(16) is padded


def test_nan_logits_end_padded_steps_with_the_usual_error(
    target: Target, make_drafter: Callable[..., Drafter], rehearsal: Rehearsal
) -> None:
    drafter, compiled = make_drafter("medusa:tree", target), RecordedTarget(target)
    decoder = Decoder(compiled, drafter)
    steps = decoder.steps(random_prompts(1), max_new_tokens=24)
    next(steps)
    head = target.model.lm_head
    handle = head.register_forward_hook(lambda *given: given[2] * torch.nan)
    try:
        with pytest.raises(UserError, match="no token can be chosen"):
            for _ in steps:
                pass
    finally:
        handle.remove()


def test_rows_shrink_to_powers_of_two_where_sizes_must_be_few() -> None:
    request = Request(prompts=[[3]] * 6, limits=[1] * 3 + [9] * 3, seeds=[0] * 6)
    batch = BatchRun(request, torch.device("cpu"))
    batch.take([[8]] * 6)
    assert batch.drop_idle(count=power_of_two) == [0, 3, 4, 5]
    assert batch.running == [0, 3, 4, 5]
    assert batch.drop_idle(count=power_of_two) is None
    assert batch.drop_idle() == [1, 2, 3]


@pytest.mark.parametrize(("place", "allowed"), [("cpu", True), ("cuda", False)])
def test_passes_on_a_gpu_make_no_plan_for_each_length_and_add_up_in_float32(
    place: str, allowed: bool, target: Target, monkeypatch
) -> None:
    monkeypatch.setattr(Target, "device", torch.device(place))
    products = torch.backends.cuda.matmul
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        Decoder(target)
        assert torch.backends.cuda.cudnn_sdp_enabled() == allowed
        assert products.allow_bf16_reduced_precision_reduction == allowed
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
        products.allow_bf16_reduced_precision_reduction = True


@pytest.mark.parametrize(("capability", "old"), [((7, 5), True), ((8, 0), False)])
def test_chips_before_ampere_have_no_kernels_for_trees(
    capability: tuple[int, int], old: bool, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert is_old(torch.device("cuda")) == old
    assert not is_old(torch.device("cpu"))


@pytest.mark.parametrize(
    "name", ["eagle3:own", *(more(name) for name in ("none", "medusa:tree", "parallel:own+lookup"))]
)
def test_served_batches_have_few_sizes_and_no_row_runs_on_alone(
    name: str, rehearsal: Rehearsal, make_target, make_drafter, monkeypatch
) -> None:
    """Seven requests at a time, one after the other: the eighth row is nobody's."""
    monkeypatch.setattr(stepper, "IDLE_LEAD", 5)
    target = make_target(seed=0)
    drafter = None if name == "none" else make_drafter(name, target)
    alone = Decoder(target, drafter)
    compiled = RecordedTarget(target)
    decoder = Decoder(compiled, drafter)
    decoder.end_ids = alone.end_ids = frozenset()
    if drafter is not None:
        drafter.compile(compiled)
    steps, step = [], ServedRows.step

    def noted(rows: ServedRows) -> None:
        """A step; what it leaves are the lengths of rows, and whether these are active."""
        step(rows)
        active = [row.active for row in rows.stepper.run.running_rows()]
        steps.append((rows.stepper.lengths, active))

    monkeypatch.setattr(ServedRows, "step", noted)
    limits, prompts = [14 + 5 * n % 11 for n in range(24)], random_prompts(24)
    asked = [ServeRequest(*each) for each in zip(prompts, range(24), limits, strict=True)]
    for answer in decoder.serve(asked, max_rows=7):
        expected = alone.generate(prompts[answer.id], max_new_tokens=limits[answer.id])
        assert answer.tokens == expected.sequences[0]
    assert {len(lengths) for lengths, _ in steps} <= {1, 2, 4, 8}
    leads = [
        max(lengths) - max(length for length, on in zip(lengths, active, strict=True) if on)
        for lengths, active in steps
        if any(active)
    ]
    assert max(leads) <= 5 and sum(not all(active) for _, active in steps) > 20


def test_idle_rows_that_have_run_on_become_copies_of_the_shortest() -> None:
    assert stepper.shortened([900, 80, 60], [False, True, True]) == [2, 1, 2]
    assert stepper.shortened([330, 80, 60], [False, True, True]) is None
    assert stepper.shortened([900, 80], [False, False]) is None
