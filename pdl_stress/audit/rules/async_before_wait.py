"""A bulk or tensor copy (TMA) before the wait."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.findings import Case, Finding, Rule, Severity, by_operand
from pdl_stress.audit.opcodes import Proxy
from pdl_stress.audit.states import Cause

ID = "async-before-wait"


def check(case: Case) -> Iterator[Finding]:
    touches = [touch for touch in case.early(Cause.EARLY) if touch.proxy is Proxy.ASYNC]
    yield from by_operand(case, ID, touches, "a bulk or tensor copy of {operand} may be issued before the wait")


RULE = Rule(
    ID,
    "a bulk or tensor copy before the wait",
    "The async proxy reads and writes memory as any other access does: what it fetched before the wait may be old. "
    "Issue the copy behind the wait of the same thread, or of a thread that it is ordered behind.",
    "F13",
    "cp.async.bulk [smem], [x], n, [bar]; griddepcontrol.wait;",
    Severity.ERROR,
    check,
)
