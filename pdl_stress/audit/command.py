"""What `pdl-stress audit` does once its options are read."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from pdl_stress.audit import declared
from pdl_stress.audit.declared import Declared
from pdl_stress.audit.inputs import files
from pdl_stress.audit.output import as_json, as_sarif, print_table, without_accepted
from pdl_stress.audit.scan import Question, Report, scan
from pdl_stress.errors import UsageError

FORMATS = ("table", "json", "sarif")


@dataclass(frozen=True)
class Options:
    """As on the command line."""

    paths: list[Path]
    packages: list[str] = field(default_factory=list)
    arch: str | None = None
    contracts: Path | None = None
    launches: Path | None = None
    strict: bool = False
    format: str = "table"
    out: Path | None = None
    baseline: Path | None = None
    explain: str = ""
    derive: bool = False
    notes: bool = False
    jobs: int = 1


def run(options: Options, console: Console, known: dict[str, Declared] | None = None) -> int:
    """Audits, writes what was asked for, and gives the exit code. known: contracts that need no file."""
    if options.format not in FORMATS:
        raise UsageError(f"--format {options.format!r}: expected one of {', '.join(FORMATS)}")
    if options.jobs < 1:
        raise UsageError(f"--jobs {options.jobs}: expected 1 or more")
    if options.arch is not None and not options.arch.startswith("sm_"):
        raise UsageError(f"--arch {options.arch!r}: expected an architecture such as sm_90a")
    if not options.paths and not options.packages:
        raise UsageError("nothing to audit: name files or folders, or use --package or --native")
    contracts = {**(known or {}), **(declared.load(options.contracts) if options.contracts else {})}
    question = Question(contracts, _launches(options.launches), options.strict, options.arch, options.explain)
    report = scan(files(options.paths, options.packages), question, options.jobs)
    if options.baseline:
        without_accepted(report, options.baseline)
    if options.explain:
        _write(_explained(report, options.explain), options, console)
    elif options.derive:
        found = {kernel.name: kernel.derived for kernel in report.kernels if kernel.derived is not None}
        _write(declared.as_json(found), options, console)
    elif options.format == "table":
        _table(report, options, console)
    else:
        _write(as_json(report) if options.format == "json" else as_sarif(report), options, console)
    return report.outcome.exit_code


def _launches(path: Path | None) -> dict[str, bool]:
    """Whether each kernel is launched with the PDL attribute, by mangled name."""
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--launches {path.name}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not all(isinstance(value, bool) for value in content.values()):
        raise UsageError(
            f'--launches {path.name}: expected {{"kernel": true}}, true if launched with the PDL attribute'
        )
    return content


def _explained(report: Report, name: str) -> str:
    texts = list(dict.fromkeys(kernel.explanation for kernel in report.kernels if kernel.explanation))
    if not texts and not report.errors:
        some = ", ".join(kernel.name for kernel in report.kernels[:5]) or "none"
        raise UsageError(f"--explain {name!r}: no audited kernel has that in its name; audited were {some}")
    failed = [f"not read: {file}: {reason}" for file, reason in report.errors]
    return "\n".join([*texts, *failed]) + "\n"


def _table(report: Report, options: Options, console: Console) -> None:
    if options.out is None:
        print_table(report, console, options.notes)
        return
    text = io.StringIO()
    print_table(report, Console(file=text, width=160, highlight=False), options.notes)
    _write(text.getvalue(), options, console)


def _write(text: str, options: Options, console: Console) -> None:
    if options.out is None:
        console.print(text, markup=False, soft_wrap=True, end="")
        return
    try:
        options.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {str(options.out)!r} cannot be written: {error.strerror}") from None
