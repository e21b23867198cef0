"""A profile: where a step's time goes, its passes alone, and what memory allows."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from drafthead.lab.profiling.bandwidth import BandwidthBound
from drafthead.lab.profiling.measured import Profile
from drafthead.lab.profiling.pass_times import PassTimes
from drafthead.lab.races.ledger import HOST, STEP_PHASES
from drafthead.lab.reports.report import Report, Table


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
