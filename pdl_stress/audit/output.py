"""A report as a table, as JSON, as SARIF 2.1.0; and baselines: findings that were accepted before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdl_stress._version import __version__
from pdl_stress.audit.findings import Finding, Severity
from pdl_stress.audit.rules import RULES
from pdl_stress.audit.scan import Audited, Report
from pdl_stress.errors import UsageError

_COLOURS = {Severity.ERROR: "bold red", Severity.REVIEW: "yellow", Severity.UNKNOWN: "magenta", Severity.NOTE: "dim"}
_LEVELS = {Severity.ERROR: "error", Severity.REVIEW: "warning", Severity.UNKNOWN: "warning", Severity.NOTE: "note"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def print_table(report: Report, to: Console, notes: bool) -> None:
    """Findings by kernel, then what was not read, then the sums."""
    shown = [finding for finding in report.findings() if notes or finding.severity is not Severity.NOTE]
    if shown:
        table = Table(title="findings", title_justify="left")
        for name in ("severity", "rule", "kernel", "what", "where"):
            table.add_column(name, overflow="fold")
        for finding in shown:
            table.add_row(
                f"[{_COLOURS[finding.severity]}]{finding.severity.word}[/]",
                finding.rule,
                escape(f"{finding.kernel} ({finding.arch}, {finding.file})"),
                escape(finding.message),
                escape(_where(finding)),
            )
        to.print(table)
    for file, reason in report.errors:
        to.print(f"[bold red]not read:[/] {escape(file)}: {escape(reason)}", soft_wrap=True)
    to.print(escape(summary(report, hidden=len(report.findings()) - len(shown))), soft_wrap=True)


def _where(finding: Finding) -> str:
    if not finding.sites:
        return ""
    first = finding.sites[0]
    offset = "+" + first.place.rpartition("+")[2]
    line = f" {Path(first.line[0]).name}:{first.line[1]}" if first.line else ""
    more = f" and {len(finding.sites) - 1} more" if len(finding.sites) > 1 else ""
    return f"{offset} {first.text}{line}{more}"


def summary(report: Report, hidden: int = 0) -> str:
    """One line of counts."""
    kernels = report.kernels
    clean = sum(all(f.severity is Severity.NOTE for f in kernel.findings) for kernel in kernels)
    undecided = sum(kernel.undecided for kernel in kernels)
    words = [
        f"{len(kernels)} kernels audited in {report.cubins} cubins",
        f"{clean} without a finding",
        f"{undecided} not decided",
        f"{sum(report.silent.values())} without PDL code, not looked at",
    ]
    if hidden:
        words.append(f"{hidden} notes (--notes shows them)")
    if report.accepted:
        words.append(f"{report.accepted} accepted by the baseline")
    return f"{', '.join(words)}: {report.outcome}"


def as_json(report: Report) -> str:
    """Everything, for programs. `version` changes when the meaning of a field does."""
    content = {
        "version": 1,
        "tool": f"pdl-stress {__version__}",
        "outcome": report.outcome.value,
        "cubins": report.cubins,
        "accepted": report.accepted,
        "kernels": [_kernel(kernel) for kernel in report.kernels],
        "without_pdl_code": report.silent,
        "errors": [{"file": file, "reason": reason} for file, reason in report.errors],
    }
    return json.dumps(content, indent=2) + "\n"


def _kernel(kernel: Audited) -> dict[str, Any]:
    after, before, unknown = kernel.touches
    return {
        "name": kernel.name,
        "arch": kernel.arch,
        "file": kernel.file,
        "waits": kernel.waits,
        "triggers": kernel.triggers,
        "accesses": {"after_wait": after, "may_be_before": before, "unknown": unknown},
        "findings": [_finding(finding) for finding in kernel.findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "severity": finding.severity.word,
        "fault": RULES[finding.rule].fault,
        "message": finding.message,
        "subject": finding.subject,
        "fingerprint": finding.fingerprint,
        "sites": [
            {"place": site.place, "instruction": site.text, "line": list(site.line) if site.line else None}
            for site in finding.sites
        ],
    }


def as_sarif(report: Report) -> str:
    """SARIF 2.1.0 (OASIS). A finding without source lines is located in the binary, by its kernel."""
    ids = list(RULES)
    rules = [
        {
            "id": rule.id,
            "shortDescription": {"text": rule.title},
            "fullDescription": {"text": rule.text},
            "help": {"text": f"Fault {rule.fault} of docs/faults.md. Example: {rule.example}"},
            "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        }
        for rule in RULES.values()
    ]
    run = {
        "tool": {"driver": {"name": "pdl-stress audit", "version": __version__, "rules": rules}},
        "results": [_result(finding, ids.index(finding.rule)) for finding in report.findings()],
        "invocations": [
            {
                "executionSuccessful": not report.errors,
                "toolExecutionNotifications": [
                    {"level": "error", "message": {"text": f"{file}: {reason}"}} for file, reason in report.errors
                ],
            }
        ],
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _result(finding: Finding, index: int) -> dict[str, Any]:
    locations = []
    for site in finding.sites[:10] or (None,):
        place: dict[str, Any] = {"logicalLocations": [{"name": finding.kernel, "kind": "function"}]}
        if site is not None and site.line is not None and site.line[0]:
            physical = {"artifactLocation": {"uri": site.line[0]}, "region": {"startLine": site.line[1]}}
        else:
            physical = {"artifactLocation": {"uri": finding.file or "unknown"}}
        place["physicalLocation"] = physical
        if site is not None:
            place["message"] = {"text": f"{site.place}: {site.text}"}
        locations.append(place)
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": _LEVELS[finding.severity],
        "message": {"text": f"{finding.kernel} ({finding.arch}): {finding.message}"},
        "locations": locations,
        "partialFingerprints": {"pdlStressAudit/v1": finding.fingerprint},
    }


def without_accepted(report: Report, path: Path) -> None:
    """Takes the findings away that a baseline (an earlier `--format json`) has. Raises UsageError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = {finding["fingerprint"] for kernel in content["kernels"] for finding in kernel["findings"]}
    except OSError as error:
        raise UsageError(f"--baseline {path.name}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(
            f"--baseline {path.name}: expected what `pdl-stress audit --format json --out FILE` writes"
        ) from None
    for index, kernel in enumerate(report.kernels):
        left = tuple(finding for finding in kernel.findings if finding.fingerprint not in known)
        report.accepted += len(kernel.findings) - len(left)
        report.kernels[index] = replace(kernel, findings=left)
