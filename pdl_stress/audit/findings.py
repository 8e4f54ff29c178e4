"""Findings, the rules that make them, and what a rule is given to look at."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from pdl_stress.audit.declared import Declared
from pdl_stress.audit.expressions import Origin
from pdl_stress.audit.kernel import Kernel, Mark, Touch, When
from pdl_stress.audit.opcodes import Access, Proxy
from pdl_stress.audit.states import Cause, State


class Severity(IntEnum):
    """Worst first."""

    ERROR = 0
    """Against a rule of PDL, or against the kernel's declared contract."""
    REVIEW = 1
    """Against the strict rule, which takes every operand to be dependent; the kernel has no contract that says more."""
    UNKNOWN = 2
    """Not decided."""
    NOTE = 3

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Site:
    """Where: function and offset, the instruction in words, and the source line where the cubin has one."""

    place: str
    text: str
    line: tuple[str, int] | None = None


@dataclass(frozen=True)
class Finding:
    """subject: the operand, or what else it is about. state and block: where a path may be shown to."""

    rule: str
    severity: Severity
    kernel: str
    arch: str
    message: str
    subject: str = ""
    sites: tuple[Site, ...] = ()
    block: int | None = None
    state: State | None = None
    file: str = ""

    @property
    def fingerprint(self) -> str:
        """The same for the same finding in another build: it holds no offset."""
        key = "\0".join((self.rule, self.kernel, self.arch, self.subject))
        return hashlib.sha256(key.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Case:
    """A kernel and what is said about it.

    strict: every operand counts as dependent, and the kernel as launched with the PDL attribute. attribute: whether it
    is launched with it, None where not known.
    """

    kernel: Kernel
    declared: Declared | None = None
    strict: bool = False
    attribute: bool | None = None

    @property
    def names(self) -> dict[int, str]:
        return self.declared.names if self.declared else {}

    @property
    def severity(self) -> Severity:
        """Of what is against the strict rule: an error only where someone said what the kernel promises."""
        return Severity.ERROR if self.strict or self.declared else Severity.REVIEW

    def operand(self, origin: Origin) -> str:
        return self.kernel.describe(origin, self.names)

    def subject(self, touch: Touch) -> str:
        """What an access touches; several operands where its address may be from any of them."""
        return " or ".join(dict.fromkeys(self.operand(origin) for origin in touch.origins[:3]))

    def allowed(self, touch: Touch) -> bool:
        """Whether the contract lets it be made before the wait."""
        if self.declared is None:
            return False
        operands = [self.declared.operand(origin.ordinal) for origin in touch.origins if origin.ordinal >= 0]
        free = {*self.declared.contract.independent, *self.declared.ignored}
        return bool(operands) and all(operand in free for operand in operands)

    def early(self, cause: Cause, *accesses: Access) -> list[Touch]:
        """The accesses that may come before the wait for this reason, in a kernel that waits."""
        if not self.kernel.waits:
            return []
        return [
            touch
            for touch in self.kernel.touches
            if touch.when is When.BEFORE
            and reason(touch) is cause
            and (not accesses or touch.access in accesses)
            and not self.allowed(touch)
        ]


def reason(touch: Touch) -> Cause:
    """The one cause that a finding names.

    What is sure to be followed by a wait comes early, whatever wait was passed by before it; so does a load that the
    compiler may have taken over a wait.
    """
    if touch.wait_follows or (touch.non_coherent and touch.wait_may_follow):
        return Cause.EARLY
    return next((cause for cause in (Cause.PATH, Cause.WARPS, Cause.EARLY) if cause in touch.causes), Cause.EARLY)


Check = Callable[[Case], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """id: stable, for baselines and reports. fault: of docs/faults.md. example: code that breaks the rule."""

    id: str
    title: str
    text: str
    fault: str
    example: str
    severity: Severity
    check: Check


def site(mark: Touch | Mark) -> Site:
    return Site(mark.place, str(mark.instruction), mark.instruction.line)


def by_operand(
    case: Case, rule: str, touches: Iterable[Touch], message: str, severity: Severity | None = None
) -> Iterator[Finding]:
    """One finding for each operand; `{operand}` in the message stands for it."""
    groups: dict[str, list[Touch]] = {}
    for touch in touches:
        groups.setdefault(case.subject(touch), []).append(touch)
    for operand, group in groups.items():
        first = group[0]
        yield Finding(
            rule,
            case.severity if severity is None else severity,
            case.kernel.name,
            case.kernel.arch,
            message.format(operand=operand),
            operand,
            tuple(dict.fromkeys(map(site, group))),
            first.block,
            first.before,
        )


def about_kernel(
    case: Case, rule: str, message: str, severity: Severity, marks: Iterable[Mark | Touch] = (), subject: str = ""
) -> Finding:
    sites = tuple(dict.fromkeys(map(site, marks)))
    return Finding(rule, severity, case.kernel.name, case.kernel.arch, message, subject, sites)


def synchronous(touches: Iterable[Touch]) -> list[Touch]:
    return [touch for touch in touches if touch.proxy is not Proxy.ASYNC]


def located(finding: Finding, file: str) -> Finding:
    return replace(finding, file=file)
