"""Audits files: finds the kernels with PDL code by their encodings, disassembles these alone, and asks the rules."""

from __future__ import annotations

import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pdl_stress.audit.declared import Declared
from pdl_stress.audit.derive import derive
from pdl_stress.audit.explain import explain
from pdl_stress.audit.findings import Case, Finding, Severity, located
from pdl_stress.audit.image import images
from pdl_stress.audit.inputs import Unreadable, cubins
from pdl_stress.audit.kernel import Kernel, When, audit_kernel
from pdl_stress.audit.listing import BadListing, disassemble
from pdl_stress.audit.rules import findings
from pdl_stress.outcome import Outcome
from pdl_stress.sass.cubin import SLOT, BadCubin, Function, architecture, functions, is_relocatable

_PDL = (0x82E, 0x82D)  # ACQBULK, PREEXIT


@dataclass(frozen=True)
class Question:
    """What to audit, and what is known of it. launches: whether a kernel is launched with the attribute, by name."""

    contracts: dict[str, Declared] = field(default_factory=dict)
    launches: dict[str, bool] = field(default_factory=dict)
    strict: bool = False
    arch: str | None = None
    explained: str = ""


@dataclass(frozen=True)
class Audited:
    """A kernel's result. touches: how many accesses are after the wait, may be before it, are unknown."""

    name: str
    arch: str
    file: str
    waits: int = 0
    triggers: int = 0
    touches: tuple[int, int, int] = (0, 0, 0)
    findings: tuple[Finding, ...] = ()
    declared: bool = False
    derived: Declared | None = None
    explanation: str = ""

    @property
    def undecided(self) -> bool:
        return any(finding.severity is Severity.UNKNOWN for finding in self.findings)


@dataclass
class Report:
    """What was found. silent: kernels without PDL code, by file; errors: what could not be read, by file."""

    kernels: list[Audited] = field(default_factory=list)
    silent: dict[str, int] = field(default_factory=dict)
    errors: list[tuple[str, str]] = field(default_factory=list)
    cubins: int = 0
    accepted: int = 0
    """Findings left out because the baseline has them."""

    def findings(self) -> list[Finding]:
        return sorted((f for kernel in self.kernels for f in kernel.findings), key=lambda f: f.severity)

    @property
    def outcome(self) -> Outcome:
        """FAIL: an error was found. ERROR: something was not read. INCONCLUSIVE: a kernel with a contract, or every
        kernel, is undecided, or there was none to decide about. ORDERED: none of these; no kernel ran."""
        found = {finding.severity for finding in self.findings()}
        if Severity.ERROR in found:
            return Outcome.FAIL
        if self.errors:
            return Outcome.ERROR
        bound = [kernel for kernel in self.kernels if kernel.declared and kernel.undecided]
        if bound or all(kernel.undecided for kernel in self.kernels):
            return Outcome.INCONCLUSIVE
        return Outcome.ORDERED

    def add(self, other: Report) -> None:
        self.kernels += other.kernels
        self.errors += other.errors
        self.cubins += other.cubins
        for file, count in other.silent.items():
            self.silent[file] = self.silent.get(file, 0) + count


def scan(
    paths: list[Path], question: Question, jobs: int = 1, progress: Callable[[str], None] = lambda text: None
) -> Report:
    """Audits every cubin of these files, one at a time, or `jobs` at a time in processes of their own."""
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        pool = ProcessPoolExecutor(jobs) if jobs > 1 else None
        try:
            for path in paths:
                progress(path.name)
                report.add(_scan_file(path, question, pool, Path(folder), jobs))
        finally:
            if pool is not None:
                pool.shutdown(cancel_futures=True)
    return report


def _scan_file(path: Path, question: Question, pool: ProcessPoolExecutor | None, folder: Path, jobs: int) -> Report:
    report = Report()
    pending: list[tuple[Future[Report], Path]] = []

    def finish(limit: int) -> None:
        while len(pending) > limit:
            future, copy = pending.pop(0)
            report.add(future.result())
            copy.unlink(missing_ok=True)

    number = question.arch.rstrip("af") if question.arch else None
    try:
        for index, source in enumerate(cubins(path, number)):
            if pool is None:
                report.add(scan_cubin(source.path, source.name, question))
                continue
            copy = folder / f"{index}.cubin"  # the next one takes the original away
            shutil.copyfile(source.path, copy)
            pending.append((pool.submit(scan_cubin, copy, source.name, question), copy))
            finish(2 * jobs)
    except Unreadable as error:
        report.errors.append((path.name, str(error)))
    finish(0)
    if not report.cubins and not report.errors:
        wanted = f" for {question.arch}" if question.arch else ""
        report.errors.append((path.name, f"it holds no cubin{wanted}"))
    return report


def scan_cubin(path: Path, name: str, question: Question) -> Report:
    """Audits the kernels of one cubin."""
    report = Report(cubins=1)
    try:
        code = path.read_bytes()
        arch = architecture(code)
        if question.arch and question.arch.rstrip("af") != arch.rstrip("af"):
            return Report(cubins=1)
        if is_relocatable(code):
            raise BadCubin("it was compiled to be linked (-rdc=true): audit the linked file")
        chosen, silent = _chosen(code, question)
        report.silent[name] = silent
        if chosen:
            report.kernels = list(_audited(code, arch, name, chosen, question))
    except (BadCubin, BadListing) as error:
        report.errors.append((name, str(error)))
    except OSError as error:
        report.errors.append((name, f"it cannot be read: {error.strerror}"))
    except (struct.error, ValueError, KeyError, IndexError, RecursionError) as error:
        # What a damaged file may still do to the reader: an error of this file, never a pass.
        report.errors.append((name, f"damaged, or not understood: {type(error).__name__}: {error}"))
    return report


def _chosen(code: bytes, question: Question) -> tuple[list[Function], int]:
    """The kernels to disassemble, and how many are left out because they hold no PDL code."""
    every = functions(code)
    shared = any(_has_pdl(code, function) for function in every if not function.kernel)
    kernels = [function for function in every if function.kernel]
    chosen = [
        function
        for function in kernels
        if shared
        or question.strict
        or question.explained == function.name
        or function.name in question.contracts
        or function.name in question.launches
        or _has_pdl(code, function)
    ]
    return chosen, len(kernels) - len(chosen)


def _has_pdl(code: bytes, function: Function) -> bool:
    """Whether a slot of the function is a wait or a trigger."""
    slots = function.size // SLOT
    words = np.frombuffer(code, dtype="<u2", count=slots * SLOT // 2, offset=function.offset)[:: SLOT // 2]
    return bool(np.isin(words & 0xFFF, _PDL).any())


def _audited(code: bytes, arch: str, name: str, chosen: list[Function], question: Question) -> Iterator[Audited]:
    helpers = [function for function in functions(code) if not function.kernel]
    listed = disassemble(code, [*chosen, *helpers])
    facts = images(code, tuple(function.name for function in chosen))
    for function in chosen:
        reach = {helper.name: listed[helper.name] for helper in helpers if helper.name in listed}
        if function.name not in listed:
            raise BadListing(f"nvdisasm does not list {function.name}")
        reach[function.name] = listed[function.name]
        kernel = audit_kernel(function.name, arch, reach, facts[function.name])
        yield _judged(kernel, name, question)


def _judged(kernel: Kernel, file: str, question: Question) -> Audited:
    declared = question.contracts.get(kernel.name)
    case = Case(kernel, declared, question.strict, question.launches.get(kernel.name))
    found = tuple(located(finding, file) for finding in findings(case))
    counts = [sum(touch.when is when for touch in kernel.touches) for when in When]
    return Audited(
        kernel.name,
        kernel.arch,
        file,
        len({mark.place for mark in kernel.waits}),
        len({mark.place for mark in kernel.triggers}),
        (counts[0], counts[1], counts[2]),
        found,
        declared is not None or question.strict,
        derive(kernel),
        explain(case, found) if question.explained and question.explained in kernel.name else "",
    )
