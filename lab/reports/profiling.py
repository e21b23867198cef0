"""Profiles, where a step's time goes, and plans, what each size of tree costs and brings."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from drafthead.lab.profiling.bandwidth import BandwidthBound
from drafthead.lab.profiling.measured import Profile
from drafthead.lab.profiling.pass_times import PassTimes
from drafthead.lab.profiling.plan_table import PlanRow
from drafthead.lab.races.ledger import HOST, STEP_PHASES
from drafthead.lab.reports.report import BASELINE, OURS, Columns, Report, Table, table_of

PLAN_COLUMNS: Columns = {
    "nodes": lambda row: str(row.nodes),
    "depth": lambda row: str(row.depth),
    "step ms": lambda row: f"{1000 * row.step_seconds:.2f}",
    "tokens a step": lambda row: f"{row.tokens:.2f}",
    "tokens/s": lambda row: f"{row.tokens_per_second:.1f}",
    "speedup": lambda row: f"{row.speedup:.2f}",
    "choice": lambda row: "" if not row.chosen else "<--" if row.depth else "none: plain decoding",
}


def profile_report(profile: Profile, about: Mapping[str, Any]) -> Report:
    """The ledger, the passes alone, and what memory allows; in seconds and bytes as JSON."""
    passes, bound = profile.passes, profile.bandwidth
    columns = ["of an average step"]
    for name in profile.ledgers:
        columns += [f"{name}, ms", "share"]
    content = {
        **about,
        "ledgers": {
            name: ledger.as_fields()
            | {"weight_bytes": profile.weight_bytes[name]}
            | {"weight_bytes_per_second": profile.weight_rate(name)}
            for name, ledger in profile.ledgers.items()
        },
        "passes_alone": {
            "columns": passes.columns,
            "verify": [{"nodes": n, "seconds": seconds} for n, seconds in passes.verify.items()],
            "draft": [asdict(b) | {"seconds": seconds} for b, seconds in passes.draft.items()],
        },
        "bandwidth": {**asdict(bound), "seconds": bound.seconds, "reached": bound.reached},
        "warm_up_seconds": profile.warm_up_seconds,
        "compile_seconds": profile.compile_seconds,
    }
    alone = f"passes alone, {passes.batch} x {passes.columns} committed tokens"
    return Report(
        [
            Table("where a step's time goes", columns, ledger_rows(profile)),
            Table(
                alone,
                ("nodes", "target ms", "over 1 node", "weights GB/s", "draft ms"),
                pass_rows(passes, bound.weight_bytes),
            ),
        ],
        [*ledger_notes(profile), *bandwidth_notes(bound)],
        content,
    )


def ledger_rows(profile: Profile) -> list[list[str]]:
    """Milliseconds and share of each phase, then the yield of a step; two cells per decoder."""
    ledgers = list(profile.ledgers.values())

    def row(label: str, cells: list[tuple[str, str]]) -> list[str]:
        return [label, *(text for pair in cells for text in pair)]

    rows = [
        row(phase, [(ms(led.seconds[phase]), f"{100 * led.share(phase):.1f} %") for led in ledgers])
        for phase in (*STEP_PHASES, HOST)
    ]
    rates = [profile.weight_rate(name) for name in profile.ledgers]
    return [
        *rows,
        row("step", [(ms(ledger.step_seconds), "100 %") for ledger in ledgers]),
        row("nodes a step", [(f"{ledger.nodes:.1f}", "") for ledger in ledgers]),
        row("tokens a step (tau)", [(f"{ledger.tau:.2f}", "") for ledger in ledgers]),
        row("tokens/s", [(f"{ledger.tokens_per_second:.1f}", "") for ledger in ledgers]),
        row("weights in verify, GB/s", [(f"{r / 1e9:.1f}" if r else "-", "") for r in rates]),
    ]


def ledger_notes(profile: Profile) -> list[str]:
    """What the ledger does not count."""
    notes = [
        f"host is the step's wall clock minus its phases; warm-up took "
        f"{profile.warm_up_seconds:.1f} s, of which compiling the target's passes "
        f"{profile.compile_seconds:.1f} s"
    ]
    if profile.compile_seconds:
        notes.append(
            "compiled greedy steps accept, move and make small drafts within one pass: all of that "
            "counts as verify"
        )
    if profile.on_gpu:
        notes.append("on a GPU a phase ends before its kernels: accept waits for those of verify")
    return notes


def pass_rows(passes: PassTimes, weight_bytes: int) -> list[list[str]]:
    """A row for each number of nodes that the target or the drafter was timed at."""
    draft = {budget.nodes: seconds for budget, seconds in passes.draft.items()}
    single = passes.verify[1]
    rows = []
    for nodes in sorted({*passes.verify, *draft}):
        verify = passes.verify.get(nodes)
        rows.append(
            [
                str(nodes),
                ms(verify) if verify else "",
                f"{verify / single:.2f}" if verify else "",
                f"{weight_bytes / verify / 1e9:.1f}" if verify else "",
                ms(draft[nodes]) if nodes in draft else "",
            ]
        )
    return rows


def bandwidth_notes(bound: BandwidthBound) -> list[str]:
    """The bound, how close plain decoding comes to it, and what was counted."""
    experts = "; all experts, in fact less is read" if bound.all_experts_counted else ""
    return [
        f"memory: a plain step reads {bound.weight_bytes / 1e6:.1f} MB of weights (decoder and "
        f"output head once, only the used rows of embeddings, no cache{experts}); this "
        f"machine copies {bound.copy_bytes_per_second / 1e9:.1f} GB/s (median copy of a buffer "
        "larger than its caches, bytes read plus bytes written as STREAM counts)",
        f"plain decoding reaches {100 * bound.reached:.0f} % of the bandwidth bound: "
        f"{ms(bound.seconds)} ms of {ms(bound.plain_step_seconds)} ms a step",
    ]


def ms(seconds: float) -> str:
    """Milliseconds as text, with more digits below 1 ms."""
    return f"{1000 * seconds:.2f}" if seconds >= 1e-3 else f"{1000 * seconds:.3f}"


def plan_report(rows: Sequence[PlanRow], notes: Sequence[str], about: dict[str, Any]) -> Report:
    """The plan of a head; the first note is the reason of the choice."""
    chosen = next(row for row in rows if row.chosen)
    choice = {"nodes": chosen.nodes, "depth": chosen.depth} if chosen.depth else None
    sizes = [asdict(row) for row in rows]
    return Report(
        [table_of(f"{about['head']} on {about['target']}", PLAN_COLUMNS, rows)],
        notes,
        {**about, "choice": choice, "reason": notes[0], "sizes": sizes},
        draw=lambda: draw_plan(rows, f"{about['head']} on {about['target']}, {about['dtype']}"),
    )


def draw_plan(rows: Sequence[PlanRow], title: str) -> Figure:
    """Expected tokens/s against nodes, the choice marked, plain decoding as a line."""
    plain = rows[0]
    chosen = next(row for row in rows if row.chosen)
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot([r.nodes for r in rows], [r.tokens_per_second for r in rows], "o", ms=4, color=OURS)
    best: dict[int, float] = {}  # of each number of nodes, over its depths
    for row in rows:
        best[row.nodes] = max(row.tokens_per_second, best.get(row.nodes, 0.0))
    counts = sorted(best)
    axes.plot(counts, [best[nodes] for nodes in counts], color=OURS)
    axes.plot(chosen.nodes, chosen.tokens_per_second, "o", ms=12, mfc="none", color=OURS)
    label = f"{chosen.nodes} nodes, {chosen.speedup:.2f}x" if chosen.depth else "plain decoding"
    point = (chosen.nodes, chosen.tokens_per_second)
    axes.annotate(label, point, (0, 9), textcoords="offset points", ha="center", fontsize=9)
    axes.axhline(plain.tokens_per_second, ls="--", color=BASELINE, lw=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(nodes) for nodes in counts])
    axes.minorticks_off()
    axes.set_ylim(0, 1.15 * max(r.tokens_per_second for r in rows))
    axes.set_xlabel("nodes of the tree (1: plain decoding)")
    axes.set_ylabel("expected tokens/s per row")
    axes.set_title(title, fontsize=9)
    return figure
