"""An annotated listing of the path that breaks a rule: the wait, the access and its parameter are marked."""

from __future__ import annotations

from pdl_stress.audit.findings import Case, Finding, Severity
from pdl_stress.audit.kernel import Kernel
from pdl_stress.audit.opcodes import TRIGGER, WAIT
from pdl_stress.audit.order import Order


def explain(case: Case, found: tuple[Finding, ...]) -> str:
    """The findings of a kernel, worst first, each with the path to it."""
    kernel = case.kernel
    lines = [f"{kernel.name} ({kernel.arch})", _parameters(case), ""]
    for finding in found:
        if finding.severity is Severity.NOTE:
            continue
        lines.append(f"{finding.severity.word}: {finding.rule}: {finding.message}")
        lines += [f"  at {site.place}: {site.text}{_line(site.line)}" for site in finding.sites[:8]]
        if finding.state is not None and finding.block is not None and kernel.order is not None:
            lines += ["  a path to it:", *_path(kernel, kernel.order, finding), ""]
    if len(lines) == 3:
        lines.append("nothing to explain: no finding but notes")
    return "\n".join(lines)


def _parameters(case: Case) -> str:
    words = [
        f"{case.names.get(p.ordinal, f'parameter {p.ordinal}')} at c[0x0][{p.offset:#x}], {p.size} bytes"
        for p in case.kernel.parameters
    ]
    return f"parameters: {'; '.join(words) or 'none known'}"


def _line(line: tuple[str, int] | None) -> str:
    return f"  ({line[0] or 'source'}:{line[1]})" if line else ""


def _path(kernel: Kernel, order: Order, finding: Finding) -> list[str]:
    """The blocks on the way, with the instructions that matter and what is known of the thread there."""
    if finding.block is None or finding.state is None:
        return []
    ends = [state for block, state in order.before if block == finding.block and state.status is finding.state.status]
    if not ends:
        return []
    same = [state for state in ends if finding.state.facts.implies(state.facts)]
    way = order.way_to(finding.block, (same or ends)[0])
    wanted = {site.place for site in finding.sites}
    touched = {touch.place: touch for touch in kernel.touches}
    lines = []
    for index, state in way:
        block = order.graph.blocks[index]
        if not block.instructions:
            continue
        first, last = block.instructions[0], block.instructions[-1]
        lines.append(f"    {block.place(first)}..{last.offset:#x}  thread: {state.facts}")
        for instruction in block.instructions:
            place = block.place(instruction)
            if place in wanted and index == finding.block:
                touch = touched.get(place)
                what = f"{touch.access} of {finding.subject}, not ordered behind a wait" if touch else "here"
                lines.append(f"      >>> {instruction.offset:#x}  {instruction}   <- {what}")
            elif instruction.base == WAIT:
                lines.append(f"      --- {instruction.offset:#x}  {instruction}   <- wait")
            elif instruction.base == TRIGGER:
                lines.append(f"          {instruction.offset:#x}  {instruction}   <- trigger")
            elif instruction is last or instruction.base in ("BAR", "SYNCS") or place in touched:
                lines.append(f"          {instruction.offset:#x}  {instruction}")
    waits = ", ".join(dict.fromkeys(mark.place for mark in kernel.waits)) or "none"
    return [*lines, f"    waits of the kernel: {waits}"]
