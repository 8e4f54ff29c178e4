"""Tables for a terminal: what ran, what it showed, and why the verdict is what it is."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable
from math import prod

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..outcome import Outcome
from ..results import CaseResult, ControlResult
from .contracts import agreement_table, contracts_table

_COLOURS = {
    Outcome.PASS: "bold green",
    Outcome.ORDERED: "bold cyan",
    Outcome.INCONCLUSIVE: "bold yellow",
    Outcome.ERROR: "bold magenta",
    Outcome.FAIL: "bold red",
}
_GOOD = {"caught": ("caught", "refuted"), "clean": ("clean", "ordered")}
_MOST_REASONS = 8


def coloured(outcome: Outcome) -> str:
    """The outcome as rich markup."""
    return f"[{_COLOURS[outcome]}]{outcome}[/]"


def render(case: CaseResult, width: int = 120) -> str:
    """One case, with all details, as plain text."""
    text = io.StringIO()
    Console(file=text, width=width, no_color=True).print(summary([case]), details(case), *caveats([case]))
    return text.getvalue()


def print_cases(cases: Iterable[CaseResult], console: Console, *, everything: bool = False) -> None:
    """All cases: a line each, what the controls showed, and a closer look at those that need it."""
    cases = list(cases)
    console.print(summary(cases))
    controls = [control for case in cases for control in case.controls]
    if controls:
        console.print(controls_summary(controls))
    for case in cases:
        if case.rules != "documented":
            console.print(f"{escape(case.chain)}: {escape(case.model)}", soft_wrap=True)
        if case.faults is not None and not case.planted:
            chosen = ", ".join(case.faults) or "none"
            console.print(f"{escape(case.chain)}: only some controls ran ({escape(chosen)})", soft_wrap=True)
        if everything or case.verdict not in (Outcome.PASS, Outcome.ORDERED):
            console.print(details(case) if everything else _reasons(case))


NO_KERNEL = "No kernel ran: the model judged the contracts. For evidence from hardware, run this on a GPU with PDL."


def caveats(cases: list[CaseResult]) -> list[str]:
    """What must be said beside any table."""
    return [NO_KERNEL] if any(case.machine == "model" for case in cases) else []


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table. Names come from users and files, so titles and cells that hold them are escaped."""
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    for column in columns:
        # The first column names the row: better to squeeze a number than a name.
        table.add_column(
            column, justify="right" if column in right else "left", overflow="fold", no_wrap=not table.columns
        )
    return table


def summary(cases: list[CaseResult]) -> Table:
    """One line per chain. *Window*: from there on every kind of broken twin is caught with 95 % probability."""
    on_gpu = any(case.machine == "cuda" for case in cases)
    numbers = ("arms", "replays", "mismatches", "replays/s", "window") if on_gpu else ()
    tail = ("data edges", "must catch", "must be clean")
    table = _table("chains", "chain", "verdict", *numbers, *tail, right=(*numbers, *tail))
    for case in cases:
        row = [escape(case.chain), coloured(case.verdict)]
        if on_gpu:
            rate = f"{case.replays_per_second:,.0f}" if case.replays_per_second else "-"
            window = "-" if case.window_us is None else f"{case.window_us:g} us"
            row += [str(len(case.arms)), f"{case.replays:,}", f"{case.mismatches:,}", rate, window]
        row += [str(len(case.data_edges)), _share(case.controls, "caught"), _share(case.controls, "clean")]
        table.add_row(*row)
    return table


def _share(controls: list[ControlResult], expected: str) -> str:
    found = [c for c in controls if c.expected == expected]
    return f"{sum(c.verdict in _GOOD[expected] for c in found)}/{len(found)}" if found else "-"


def controls_summary(controls: list[ControlResult]) -> Table:
    """Controls of all chains by fault. Of the broken ones: how many showed at all in each window, for a power curve."""
    on_gpu = any(c.replays for c in controls)
    delays = sorted({c.delay_us for c in controls}) if on_gpu else []
    seen = tuple(f"seen at {delay:g} us" for delay in delays)
    columns = ("must catch", "must be clean", "unpromised")
    table = _table("controls (deliberately broken twins)", "fault", *columns, *seen, right=(*columns, *seen))
    groups: dict[str, list[ControlResult]] = defaultdict(list)
    for control in controls:
        groups[control.fault].append(control)
    for fault, members in groups.items():
        row = [escape(fault), _share(members, "caught"), _share(members, "clean")]
        row.append(str(sum(c.expected == "unpromised" for c in members)) if on_gpu else _allowed(members))
        for delay in delays:
            at_risk = {_key(c) for c in members if c.expected == "caught"}
            here = [c for c in members if c.delay_us == delay and _key(c) in at_risk]
            row.append(f"{sum(c.kills > 0 for c in here)}/{len(here)}" if here else "-")
        table.add_row(*row)
    return table


def _allowed(members: list[ControlResult]) -> str:
    found = [c for c in members if c.expected == "unpromised"]
    return f"{len(found)} allowed" if found else "-"


def _key(control: ControlResult) -> tuple[str, str, str, str]:
    """A control without its window."""
    return control.variant, control.writer, control.reader, control.buffer


def _reasons(case: CaseResult) -> Group:
    """Why the verdict is what it is."""
    parts: list[RenderableType] = [
        f"\n[bold]{escape(case.chain)}[/] {coloured(case.verdict)}   ops: {escape(case.ops)}"
    ]
    if case.planted:
        parts.append(f"  planted: {escape(case.planted)}")
    if case.model:
        parts.append(f"  model: {escape(case.model)}")
    parts += [f"  - {escape(reason)}" for reason in case.reasons[:_MOST_REASONS]]
    if len(case.reasons) > _MOST_REASONS:
        parts.append(f"  - and {len(case.reasons) - _MOST_REASONS} more, in results.json")
    if case.timeline:
        parts.append("  what the rules allow:")
        # Wrapped, not cropped: what went wrong stands at the end of a line.
        parts += [Padding(Text(line), (0, 0, 0, 4), expand=False) for line in case.timeline]
    return Group(*parts)


def details(case: CaseResult) -> Group:
    """Everything about one case."""
    parts: list[RenderableType] = [_reasons(case)]
    if case.arms:
        parts.append(_arms(case))
    if case.nodes:
        parts.append(_nodes(case))
    if case.contracts:
        parts += [contracts_table(case), agreement_table(case)]
    if case.edges:
        parts.append(_edges(case))
    if case.controls:
        parts.append(_controls(case))
    return Group(*parts)


def _arms(case: CaseResult) -> Table:
    numbers = ("delay us", "replays", "mismatches", "upper bound (95 %)", "us a replay")
    table = _table(f"{case.chain}: clean arms", "arm", "delayed step", *numbers, right=numbers)
    for arm in case.arms:
        table.add_row(
            escape(arm.name),
            escape(arm.step or ""),
            "" if arm.delay_us is None else f"{arm.delay_us:g}",
            f"{arm.replays:,}",
            f"{arm.mismatches:,}",
            "-" if arm.upper_bound_95 is None else f"{arm.upper_bound_95:.2g}",
            f"{arm.seconds / arm.replays * 1e6:.1f}" if arm.replays else "-",
        )
    return table


def _nodes(case: CaseResult) -> Table:
    """The census: what the graph of one replay consists of."""
    numbers = ("CTAs", "threads", "waits", "triggers")
    table = _table(f"{case.chain}: graph as deployed", "step", "node", *numbers, "in", "machine code", right=numbers)
    for node in case.nodes:
        counts = ["?" if count is None else str(count) for count in (node.waits, node.triggers)]
        cells = [str(prod(node.grid)), str(prod(node.block)), *counts] if node.kind == "kernel" else [""] * 4
        table.add_row(*map(escape, (node.step, node.name or node.kind, *cells, "/".join(node.incoming), node.code)))
    return table


def _edges(case: CaseResult) -> Table:
    table = _table(f"{case.chain}: edges", "edge", "kind", "overlap as deployed", "overlapped / exposed in")
    table.caption = case.exposure and escape(f"by {case.exposure}")
    for edge in case.edges:
        overlap = "-" if edge.overlap is None else f"{edge.overlap:.0%}"
        row = (f"{edge.source} -> {edge.target}", f"graph, {edge.kind}", overlap, "; ".join(edge.overlapped_in) or "-")
        table.add_row(*map(escape, row))
    for data in case.data_edges:
        exposed = "; ".join(data.exposed_by) or "-"
        table.add_row(*map(escape, (f"{data.writer} -> {data.reader}", f"data, {data.buffer}", "", exposed)))
    return table


def _controls(case: CaseResult) -> Table:
    """Controls by fault and edge, delays side by side: where the kills begin is what the test can see."""
    delays = sorted({c.delay_us for c in case.controls})
    on_model = case.machine == "model"
    groups: dict[tuple[str, ...], dict[float, ControlResult]] = defaultdict(dict)
    for control in case.controls:
        groups[control.fault, *_key(control)][control.delay_us] = control
    windows = tuple("model" if on_model else f"{delay:g} us" for delay in delays)
    table = _table(f"{case.chain}: controls", "fault", "variant", "data edge", "expected", *windows, right=windows)
    for (fault, variant, writer, reader, _), by_delay in groups.items():
        expected = by_delay[max(by_delay)].expected
        cells = [_cell(by_delay.get(delay)) for delay in delays]
        names = (fault, variant, f"{writer} -> {reader}", _EXPECTED.get(expected, expected))
        table.add_row(*map(escape, names), *cells)
    return table


_EXPECTED = {"caught": "must catch", "clean": "must be clean"}


def _cell(control: ControlResult | None) -> str:
    if control is None:
        return ""
    text = f"{control.kills}/{control.replays}" if control.replays else control.verdict
    if control.verdict in ("missed", "dirty", "error"):
        return f"[bold red]{text} {control.verdict}[/]" if control.replays else f"[bold red]{text}[/]"
    return escape(text)


def founding_table(case: CaseResult, writer: str, reader: str) -> Table | None:
    """F00 on one data edge: trigger place x window, the consumer waiting or not. ``None`` without an F00 there."""
    controls = {
        (c.variant, c.delay_us): c for c in case.controls if (c.fault, c.writer, c.reader) == ("F00", writer, reader)
    }
    if not controls:
        return None
    delays = sorted({delay for _, delay in controls})
    places = list(dict.fromkeys(variant.split(",")[0].removeprefix("trigger ") for variant, _ in controls))
    replays = max(c.replays for c in controls.values())
    on_model = case.machine == "model"
    windows = tuple("model" if on_model else f"{delay:g} us" for delay in delays)
    what = f"kills of {replays:,} replays, by window between trigger and stores"
    title = f"{case.chain}, {writer} -> {reader}: {'what the model says; no kernel ran' if on_model else what}"
    table = _table(title, "producer triggers", "consumer", *windows, right=windows)
    for consumer in ("waits", "does not wait"):
        for place in places:
            cells = [controls.get((f"trigger {place}, consumer {consumer}", delay)) for delay in delays]
            table.add_row(escape(place), consumer, *[_founding_cell(c, consumer == "waits") for c in cells])
        table.add_section()
    if not on_model:
        table.caption = "[green]0[/]: ordered by the wait   [bold red]n[/]: caught   [yellow]0[/]: broken, and not seen"
    return table


def _founding_cell(control: ControlResult | None, waits: bool) -> str:
    if control is None:
        return ""
    if not control.replays:
        return escape(control.verdict)
    colour = "bold red" if control.kills else "green" if waits else "yellow"
    return f"[{colour}]{control.kills:,}[/]"
