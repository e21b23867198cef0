"""Trees, acceptance and whole answers are those of the official Medusa, Hydra and EAGLE code.

Ours differs on purpose in three things. Medusa's paths that are shorter than the longest are filled
up with token 0 and the logits of the last node, so that its typical acceptance can accept tokens
that no tree held: ours is compared with what the official code gives when the filling is made
impossible, which greedy decoding never notices. Medusa takes the most probable token as an answer's
first, too, at any temperature, where ours is drawn from the target: here it is the most probable
one. EAGLE accepts children as if the draft had been certain of each, and so does `match`, with
other random numbers; `rejection` is given a draft that is certain.
"""

from dataclasses import replace

import pytest
import torch
from conftest import ScriptedRandom
from golden import Case, cases, name_of

from drafthead.core.drafting.drafter import Committed
from drafthead.core.sampling import SamplingConfig, probabilities
from drafthead.core.target.features import Features
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget, TokenTree, TreeShape, TreeTables
from drafthead.heads.base import DraftHead
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.families.recurrent import passes as recurrent_passes
from drafthead.heads.formats import load_head
from drafthead.heads.growing.levels import Guess, blind, filled_levels, levels_of
from drafthead.infer import DecodeOptions, Decoder
from drafthead.infer.engine import stepper as stepper_module
from drafthead.infer.verifiers import VERIFIERS

ALGORITHMS = "medusa_algorithms/*"


def most_probable(probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Medusa's first token in the place of a drawn one."""
    return probs.argmax(-1)


def thresholds(setting: dict) -> dict[str, float]:
    """Our names for Medusa's thresholds."""
    return {
        "typical_epsilon": setting["posterior_threshold"],
        "typical_delta": setting["posterior_alpha"],
    }


# Static trees


def leaf_rows(shape: TreeShape) -> list[list[int]]:
    """Medusa's `retrieve_indices`: nodes of the paths to all leaves, -1 behind their ends."""
    index = {(): 0} | {path: n for n, path in enumerate(shape.paths, 1)}
    inner = {path[:-1] for path in shape.paths}
    leaves = [path for path in reversed(shape.paths) if path not in inner]
    rows = [[index[path[:d]] for d in range(len(path) + 1)] for path in leaves]
    return [row + [-1] * (shape.depth + 1 - len(row)) for row in rows]


@pytest.mark.parametrize("case", cases(ALGORITHMS), ids=name_of)
def test_static_trees_are_numbered_and_filled_as_medusas(case: Case) -> None:
    for name, paths in case.about["trees"].items():
        shape, io = TreeShape.from_paths(paths), case.io
        assert torch.equal(shape.ancestors.float(), io[f"{name}.medusa_attn_mask"][0, 0])
        assert torch.equal(shape.depths, io[f"{name}.medusa_position_ids"])
        assert leaf_rows(shape) == io[f"{name}.retrieve_indices"].tolist()
        # Behind the root, 10 for each head.
        places = (1 + 10 * (shape.depths - 1) + shape.ranks)[1:]
        assert torch.equal(places, io[f"{name}.tree_indices"][1:])
        best = io[f"{name}.in_medusa_logits"][:, 0, 0].topk(10)
        root, total = io[f"{name}.in_logits"][0, :1].argmax(-1), torch.zeros(1, len(best[0]), 1)
        guess = Guess(total, best.values[None], best.indices[None], total)
        given = levels_of(shape, torch.device("cpu")), root, guess.states, blind(guess)
        tokens, _ = filled_levels(*given, SamplingConfig(), None)
        assert torch.equal(tokens, io[f"{name}.tree_candidates"])


def test_paths_to_leaves_run_from_the_last_and_end_with_filling() -> None:
    shape = TreeShape.from_paths([(0,), (2,), (0, 0), (0, 1), (0, 1, 3)])
    assert leaf_rows(shape) == [[0, 1, 4, 5], [0, 1, 3, -1], [0, 2, -1, -1]]


@pytest.mark.parametrize("case", cases(ALGORITHMS), ids=name_of)
def test_acceptance_is_medusas_without_the_filling(case: Case) -> None:
    decisions = 0
    for key in case.io:
        if not key.endswith(".accept_length_nopad"):
            continue
        name, rep, number, _ = key.split(".")
        setting = case.about["settings"][int(number.removeprefix("set"))]
        shape = TreeShape.from_paths(case.about["trees"][name])
        tree = TokenTree.from_shape(shape, case.io[f"{name}.tree_candidates"])
        logits = case.io[f"{name}.{rep}.tree_logits"]
        if setting["temperature"] == 0:
            found = VERIFIERS["greedy"].rule(tree, logits, None)
        else:
            scores = probabilities(logits, SamplingConfig(temperature=setting["temperature"]))
            random = ScriptedRandom(torch.zeros(1, 1))
            rule = VERIFIERS["typical"].with_options(thresholds(setting)).rule
            found = rule(tree, scores, random)
        best = int(case.io[f"{name}.{rep}.{number}.best_candidate_nopad"])
        accepted = leaf_rows(shape)[best][: int(case.io[key]) + 1]
        assert found.path[0, : int(found.length)].tolist() == accepted, key
        decisions += 1
    assert decisions == 72


# EAGLE's acceptance


def eagle_tree(case: Case, number: int) -> TokenTree:
    io = Case(case.path.parents[1] / "eagle3" / "draft_vocab").io
    mask = io[f"tree{number}_tree_mask"][0, 0].bool()
    depths = io[f"tree{number}_position_ids"]
    above = mask & (depths[:, None] - 1 == depths)
    parents = torch.where(depths > 0, above.int().argmax(1), -1)
    tokens = io[f"tree{number}_draft_tokens"]
    tables = TreeTables.of(tokens, parents[None], torch.zeros(tokens.shape), int(depths.max()))
    return tables.tree(int(depths.max()), width=len(tokens[0]) - 1)


@pytest.mark.parametrize("case", cases("eagle_algorithms/*"), ids=name_of)
def test_greedy_acceptance_is_eagles(case: Case) -> None:
    prefixes = [key.removesuffix(".accept_length") for key in case.io if "greedy.accept_l" in key]
    assert prefixes
    for prefix in prefixes:
        tree = eagle_tree(case, int(prefix[4]))
        found = VERIFIERS["greedy"].rule(tree, case.io[f"{prefix}.tree_logits"], None)
        length = int(case.io[f"{prefix}.accept_length"]) + 1
        best = case.io[f"{prefix}.candidates"][int(case.io[f"{prefix}.best_candidate"])]
        assert tree.tokens[0, found.path[0, :length]].tolist() == best[:length].tolist()
        assert (int(found.length), int(found.bonus)) == (
            length,
            int(case.io[f"{prefix}.next_token"]),
        )


def in_their_order(tree: TokenTree, rows: list[list[int]]) -> list[int]:
    """The nodes by depth, and of a depth in the order in which EAGLE tries them, row by row."""
    depths = tree.depths[0].tolist()
    first_seen = list(dict.fromkeys(node for row in rows for node in row if node >= 0))
    return sorted(first_seen, key=lambda node: depths[node])


def certain_draft(tree: TokenTree, num_tokens: int) -> TokenTree:
    """A tree as if its draft had been sure of each child in turn."""
    parents, tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()
    ids = torch.zeros(1, tree.num_nodes, num_tokens, dtype=torch.long)
    for node in range(tree.num_nodes):
        own = [tokens[n] for n, parent in enumerate(parents) if parent == node]
        others = [token for token in range(num_tokens) if token not in own]
        ids[0, node] = torch.tensor([*own, *others])
    surely = 10.0 ** (-12.0 * torch.arange(num_tokens, dtype=torch.float64)).clamp_min(-300)
    return replace(tree, draft_ids=ids, draft_probs=(surely / surely.sum()).expand(ids.shape))


@pytest.mark.parametrize("case", cases("eagle_algorithms/*"), ids=name_of)
def test_sampled_acceptance_is_eagles_with_its_random_numbers(case: Case) -> None:
    io, compared = case.io, 0
    for key in [k for k in io if k.endswith(".sample_p")]:
        prefix, setting = key.removesuffix(".sample_p"), int(key.split(".set")[1][0])
        name = prefix.split(".")[0]
        options = case.about["settings_stoch"][setting]
        sampling = SamplingConfig(options["temperature"], options["top_k"], options["top_p"] or 1.0)
        logits = io[f"{prefix.rsplit('.', 1)[0]}.tree_logits"].double()
        tree = eagle_tree(case, int(name.removeprefix("tree")))
        eagle3 = Case(case.path.parents[1] / "eagle3" / "draft_vocab").io
        rows = eagle3[f"{name}_retrieve_indices_sorted"].tolist()
        order = in_their_order(tree, rows)
        place = {node: index for index, node in enumerate(order)}
        above = [place.get(int(tree.parents[0, node]), -1) for node in order]
        parents, scores = torch.tensor([above]), torch.zeros(tree.tokens.shape)
        tables = TreeTables.of(tree.tokens[:, order], parents, scores, tree.max_depth)
        tree = tables.tree(tree.max_depth, width=tree.num_nodes - 1)
        tree = certain_draft(tree, logits.shape[-1])
        length = int(io[f"{prefix}.accept_length"]) + 1
        path = [place[n] for n in rows[int(io[f"{prefix}.best_candidate"])][:length]]
        # They draw a number for each child they try: up to the accepted one, or all of the last.
        tried = []
        for node, following in zip(path, [*path[1:], None], strict=True):
            children = [n for n, parent in enumerate(above) if parent == node]
            stop = len(children) if following is None else children.index(following) + 1
            tried += children[:stop]
        numbers = io[f"{prefix}.uniforms_consumed"]
        assert len(tried) == len(numbers)
        uniform = torch.full((1, tree.num_nodes), 0.5, dtype=torch.float64)
        uniform[0, tried] = numbers
        scores = probabilities(logits[:, order], sampling).double()
        left = io[key].double().flatten()
        before = left.cumsum(0) - left
        for token in left.topk(5).indices[left.topk(5).values > 1e-3].tolist():
            uniform[0, 0] = before[token] + left[token] / 2  # the bonus is drawn with this one
            found = VERIFIERS["rejection"].rule(tree, scores, ScriptedRandom(uniform))
            assert found.path[0, : int(found.length)].tolist() == path, prefix
            assert int(found.bonus) == token, prefix
            compared += 1
    assert compared > 50


# Answers


Answers = list[tuple[list[int], list[int]]]  # tokens and accepted ones of each step, by prompt


def answers(
    head: DraftHead, target: Target, budget: Budget | None, shape: TreeShape | None, run: dict
) -> Answers:
    """Tokens, and drafted tokens that each step accepted, for each prompt of a run."""
    decoder = Decoder(target, drafter_for(head, target, shape), budget)
    decoder.end_ids = frozenset()
    temperature = run.get("temperature", 0.0)
    options: DecodeOptions = {"temperature": temperature}
    if temperature > 0:
        options |= {"verifier": "typical", **thresholds(run)}
    found = []
    for prompt, count in run["inputs"]:
        result = decoder.generate([prompt], max_new_tokens=count, **options)
        # The bonus token is left out; the last step may have been cut.
        found.append((result.sequences[0], [n - 1 for n in result.stats.accept_lengths[0]][:-1]))
    return found


def expected_answers(case: Case, run: dict) -> Answers:
    return [(entry["output_ids"], entry["accept_lengths"][:-1]) for entry in run["prompts"]]


def assert_same_answers(found: Answers, expected: Answers) -> None:
    """Tokens and steps agree; the official code may take one step more.

    Our first token comes with the prompt's pass, theirs with the first step: if the answer ends
    between two steps, they need another.
    """
    for (ours, steps), (theirs, their_steps) in zip(found, expected, strict=True):
        assert ours == theirs
        assert len(their_steps) - len(steps) in (0, 1)
        assert steps == their_steps[: len(steps)]


def test_the_official_code_may_take_one_step_more_and_not_two() -> None:
    ours: Answers = [([1, 2, 3], [1, 0])]
    assert_same_answers(ours, ours)
    assert_same_answers(ours, [([1, 2, 3], [1, 0, 0])])
    for other in ([1, 0, 0, 0], [1], [1, 1], [0, 0, 0]):
        with pytest.raises(AssertionError):
            assert_same_answers(ours, [([1, 2, 3], other)])


def inputs_of(case: Case, run: dict) -> dict:
    prompts = case.decode["prompts"]
    return {
        **run,
        "inputs": [(prompts[e["prompt"]]["ids"], len(e["output_ids"])) for e in run["prompts"]],
    }


@pytest.mark.parametrize("case", cases("e2e_medusa/*", "e2e_hydra/*"), ids=name_of)
def test_answers_on_static_trees_take_the_same_steps(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepper_module, "race", most_probable)
    target = case.target
    head = load_head(case.path, target)
    for run in case.decode["runs"]:
        shape = TreeShape.from_paths(case.decode["trees"][run["tree"]])
        found = answers(head, target, None, shape, inputs_of(case, run))
        assert_same_answers(found, expected_answers(case, run))


@pytest.mark.parametrize("case", cases("e2e_medusa/*", "e2e_hydra/*"), ids=name_of)
def test_heads_that_were_not_measured_take_the_authors_tree(case: Case) -> None:
    """Without a word about trees: the mean steps are theirs, of chains they were 2.4."""
    run = next(run for run in case.decode["runs"] if run["tree"] == "mc_sim_7b_63")
    head = load_head(case.path, case.target)
    found = answers(head, case.target, Budget(64, 4), None, inputs_of(case, run))
    assert_same_answers(found, expected_answers(case, run))


@pytest.mark.parametrize("case", cases("e2e_eagle1/*", "e2e_eagle3/*"), ids=name_of)
def test_answers_on_dynamic_trees_take_the_same_steps(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = case.target
    head = load_head(case.path, target)
    for run in case.decode["runs"]:
        monkeypatch.setattr(recurrent_passes, "DYNAMIC_WIDTH", run["top_k"])
        # Their depth counts the levels below the first.
        budget = Budget(run["total_token"], run["depth"] + 1)
        found = answers(head, target, budget, None, inputs_of(case, run))
        assert_same_answers(found, expected_answers(case, run))


@pytest.mark.parametrize("case", cases("e2e_eagle1/*"), ids=name_of)
@torch.no_grad()
def test_the_first_dynamic_tree_is_eagles(case: Case) -> None:
    target, io = case.target, case.io
    head = load_head(case.path, target)
    ids, first = io["prompt0"], io["prompt0_first_token"][0]
    session = drafter_for(head, target).start(ids[None], torch.tensor([len(ids)]))
    tokens = torch.cat([ids[1:], first])[None]
    session.commit(Committed(tokens, Features(io["prompt0_features"]), torch.tensor([len(ids)])))
    tree = session.propose(Budget(60, 6), SamplingConfig(), None)
    names = ("draft_tokens", "position_ids", "mask")
    case.assert_tree(tree, *(f"prompt0_tree_{name}" for name in names))
