"""The command line: ``pdl-stress run``, ``check``, ``audit``, ``list``, ``doctor``. Exit codes: PASS and ORDERED 0,
FAIL 1, usage 2, ERROR 3, INCONCLUSIVE 4."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from . import __version__, catalog, model, subjects
from .api import check_machine, choose_machine
from .campaign import Progress, run_on_gpu, run_on_model
from .catalog.ops import NATIVE, OP_SETS, op_set, refusal
from .chain import Chain
from .discovery import discover, offered
from .errors import DeviceError, PdlStressError, UsageError
from .faults import ALL_DELAYS_US, DELAYS_US, FAULTS, check_controls, plant
from .isolation import run_isolated
from .judging import run_check
from .outcome import USAGE_EXIT_CODE, Outcome
from .plan import CONTROL_REPLAYS, REPLAYS, TIME_LIMIT_S, Plan
from .record import Record, result_folder
from .report import founding_table, load_json, print_cases
from .report.contracts import agreement_table, contracts_table, declarations
from .report.table import caveats, coloured
from .results import CaseResult, RunResult
from .subjects import CheckPlan, Subject

app = typer.Typer(
    name="pdl-stress",
    help="Is a chain of CUDA kernels ordered under Programmatic Dependent Launch, and could the test have told?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class _Console(Console):
    """Survives a reader that has gone away (``| head``): what runs must finish, and its exit code must be its own."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Tables need room; where nobody looks at a terminal there is no width to respect.
console = _Console(highlight=False, width=None if sys.stdout.isatty() else 118)


def main() -> None:
    """Entry point. Whatever goes wrong ends in a message and an exit code, never in a traceback."""
    signal.signal(signal.SIGINT, _leave)
    try:
        app()
    except UsageError as error:
        _complain(error)
        sys.exit(USAGE_EXIT_CODE)
    except PdlStressError as error:
        _complain(error)
        sys.exit(Outcome.ERROR.exit_code)
    except Exception as error:
        _complain(f"{type(error).__name__}: {error}. This is a defect of pdl-stress {__version__}: please report it.")
        sys.exit(Outcome.ERROR.exit_code)


def _leave(signum: int, frame: object) -> None:
    """Ctrl-C where nothing is worth keeping. The command-line library would exit with 1, which is our FAIL."""
    _complain("interrupted")
    os._exit(Outcome.ERROR.exit_code)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt, so that what has finished can be kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _complain(error: object) -> None:
    Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"pdl-stress {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    chains: Annotated[
        list[str] | None, typer.Argument(metavar="[CHAIN]...", help="Chains to run; default: all.")
    ] = None,
    machine: Annotated[
        str, typer.Option(help="auto (the model only if there is no NVIDIA device), model, or cuda.")
    ] = "auto",
    ops: Annotated[
        str,
        typer.Option(
            metavar="SPEC",
            help=f"Kernels of the shipped chains: auto (native), {', '.join(OP_SETS)}, or a mix such as "
            "rmsnorm=native,tinygemm2=flashinfer.",
        ),
    ] = "auto",
    replays: Annotated[int, typer.Option(help="Graded replays of each clean arm.")] = REPLAYS,
    seed: Annotated[int, typer.Option(help="Seed of inputs, weights and schedules.")] = 0,
    rules: Annotated[
        str, typer.Option(help=f"Rule set of the model: {', '.join(model.RULE_SETS)}.")
    ] = model.DOCUMENTED.name,
    controls: Annotated[
        str, typer.Option(help="all, none, or faults separated by commas, such as F00@q_norm,F02.")
    ] = "all",
    delays: Annotated[
        str, typer.Option(help="Microseconds between trigger and stores, separated by commas; 'all': 0,1,2,10,100.")
    ] = ",".join(f"{d:g}" for d in DELAYS_US),
    control_replays: Annotated[int, typer.Option(help="Replays of each control.")] = CONTROL_REPLAYS,
    planted: Annotated[
        str, typer.Option("--plant", metavar="FAULT@STEP", help="Break the chain on purpose, to see a FAIL.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder for results.json; default: pdl-stress-results/<time>.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
    time_limit: Annotated[
        float, typer.Option(help="Seconds without progress after which a run counts as hung.")
    ] = TIME_LIMIT_S,
    details: Annotated[bool, typer.Option("--details", help="Print every arm, edge and control.")] = False,
) -> None:
    """Check chains: on a GPU by stress with controls, elsewhere by the model from their contracts."""
    load, own_ops = catalog.Loader(ops), op_set(ops) == NATIVE
    # A chain of another package brings its own ops. Where others are asked for it is left out, or refused if named.
    names = list(dict.fromkeys(chains or [])) or [
        name for name in catalog.names() if own_ops or name in catalog.SHIPPED
    ]
    plan = Plan(
        replays=replays,
        control_replays=control_replays,
        rules=rules,  # type: ignore[arg-type]  # a name becomes its rule set
        seed=seed,
        faults={"all": None, "none": ()}.get(controls, tuple(part.strip() for part in controls.split(","))),
        delays_us=_windows(delays),
        planted=planted,
        time_limit=time_limit,
    )
    built = [load(name) for name in dict.fromkeys(names)]
    check_controls(built, plan.faults)
    if planted:
        candidates = [chain.modelled() for chain in built] if machine == "model" else built
        built = _plantable(candidates, planted, all_of_them=bool(chains))
    check_machine(machine)
    record = Record(result_folder(out, force), shlex.join(["pdl-stress", *sys.argv[1:]]))
    try:
        with _interruptible(), _progress() as progress:
            _run(built, plan, machine, load, record, progress)
    except DeviceError as error:
        record.fail(str(error))
    except KeyboardInterrupt:
        record.fail("interrupted; what had finished is kept")
    except Exception as error:
        record.fail(f"{type(error).__name__}: {error} (a defect of pdl-stress: please report it)")
    record.finish()
    _show(record.result, details)
    console.print(f"results: {escape(str(record.path))}", soft_wrap=True)
    raise typer.Exit(record.result.verdict.exit_code)


def _run(
    chains: list[Chain], plan: Plan, machine: str, load: catalog.Loader, record: Record, progress: Progress
) -> None:
    from .cuda.device import environment

    record.result.environment = environment(machine="cuda" if machine == "cuda" else None)
    chosen = choose_machine(machine)
    record.result.environment["machine"] = chosen
    if chosen == "model":
        record.keep(run_on_model(chains, plan, progress, record.keep))
        return
    # On the model no kernel runs, so no library is needed. What shows only on import is left to the worker.
    if problem := refusal(load.ops):
        raise DeviceError(f"nothing ran: {problem}. `pdl-stress doctor` shows what is there.")
    from .cuda.worker import Worker

    with Worker(load, seed=plan.seed, time_limit=plan.time_limit) as worker:
        record.keep(run_on_gpu(chains, plan, worker, progress, record.keep))


@app.command()
def check(
    targets: Annotated[
        list[str], typer.Argument(metavar="FILE.py[::NAME]...", help="Subjects: of a file, or offered by a package.")
    ],
    replays: Annotated[int, typer.Option(help="Graded replays of each arm.")] = subjects.REPLAYS,
    control_replays: Annotated[int, typer.Option(help="Replays of each broken twin.")] = subjects.CONTROL_REPLAYS,
    delays: Annotated[
        str, typer.Option(help="Microseconds by which predecessors are late, tried in turn, separated by commas.")
    ] = ",".join(f"{d:g}" for d in subjects.DELAYS_US),
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    isolate: Annotated[
        bool, typer.Option(help="Run the kernels in a child process, which a crash or a hang cannot outlive.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results.json; default: pdl-stress-results/<time>.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
    time_limit: Annotated[
        float, typer.Option(help="Seconds without progress after which the GPU counts as hung.")
    ] = subjects.TIME_LIMIT_S,
    details: Annotated[bool, typer.Option("--details", help="Print every arm, edge and control.")] = False,
    contracts: Annotated[
        bool, typer.Option("--contracts", help="Print the measured contracts as declarations to start from.")
    ] = False,
) -> None:
    """Check any kernels: a verdict, measured contracts, and broken twins, without a contract to write."""
    plan = CheckPlan(replays, control_replays, _windows(delays), seed, time_limit)
    chosen = [found for target in targets for found in discover(target)]
    choose_machine("cuda")
    record = Record(result_folder(out, force), shlex.join(["pdl-stress", *sys.argv[1:]]))
    try:
        with _interruptible(), _progress() as progress:
            _check(chosen, plan, isolate, record, progress)
    except DeviceError as error:
        record.fail(str(error))
    except KeyboardInterrupt:
        record.fail("interrupted; what had finished is kept")
    record.finish()
    _show(record.result, details)
    for case in record.result.cases:
        if case.contracts:
            console.print(contracts_table(case))
            console.print(agreement_table(case))
            if contracts:
                console.print(declarations(case), markup=False)
    console.print(f"results: {escape(str(record.path))}", soft_wrap=True)
    raise typer.Exit(record.result.verdict.exit_code)


def _check(chosen: list[Subject], plan: CheckPlan, isolate: bool, record: Record, progress: Progress) -> None:
    from .cuda.device import environment

    record.result.environment = environment(machine="cuda")
    done: list[CaseResult] = []
    for number, one in enumerate(chosen):
        progress(one.name, number, len(chosen))
        try:
            case = (run_isolated if isolate else run_check)(one, plan, lambda case: record.keep([*done, case]))
        except UsageError as error:  # of one subject; the others go on
            record.fail(f"{one.name}: {error}")
            continue
        done.append(case)
        record.keep(done)
    progress("done", len(chosen), len(chosen))


def _windows(text: str) -> tuple[float, ...]:
    if text == "all":
        return ALL_DELAYS_US
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--delays {text!r}: expected microseconds separated by commas, or 'all'.") from error


def _plantable(chains: list[Chain], planted: str, *, all_of_them: bool) -> list[Chain]:
    """The chains that can take the fault. Says what is wrong, before anything runs, if a chain that the user named
    cannot, or if none can."""
    found, errors = [], []
    for chain in chains:
        try:
            plant(chain, planted)
            found.append(chain)
        except UsageError as error:
            errors.append(error)
    if errors and (all_of_them or not found):
        raise errors[0]
    for chain in chains:
        if chain not in found:
            console.print(f"not planted in {chain.name}: it does not apply there", markup=False)
    return found


def _show(result: RunResult, details: bool, to: Console = console) -> None:
    if result.cases:
        print_cases(result.cases, to, everything=details)
    for error in result.errors:
        _complain(error)
    to.print(f"\nverdict: {coloured(result.verdict)}   ({result.seconds:.1f} s)")
    for line in caveats(result.cases):
        to.print(line)


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal; elsewhere a line now and then."""
    if console.is_terminal:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Bar(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=None)
            yield lambda text, done, total: bar.update(task, description=escape(text), completed=done, total=total)
        return
    last = 0.0

    def line(text: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > 5 or done == total:
            last = time.monotonic()
            console.print(f"[{done}/{total}] {text}", markup=False)

    yield line


@app.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="RESULTS.json", help="A file that `pdl-stress run` wrote.")],
    details: Annotated[bool, typer.Option("--details", help="Print every arm, edge and control.")] = False,
    f00: Annotated[
        bool, typer.Option("--f00", help="Print the founding control: trigger place x window x waits or not.")
    ] = False,
    svg: Annotated[Path | None, typer.Option(help="Write what is shown to this SVG file as well.")] = None,
) -> None:
    """Show a stored result again, with the exit code that it had."""
    result = load_json(path)
    if svg and svg.suffix != ".svg":
        raise UsageError(f"--svg {str(svg)!r}: expected a name that ends in .svg.")
    to = Console(highlight=False, record=True, width=92 if f00 else 118) if svg else console
    if f00:
        tables = [founding_table(case, e.writer, e.reader) for case in result.cases for e in case.data_edges]
        for table in tables:
            if table is not None:
                to.print(table)
        if not any(tables):
            raise UsageError(f"{str(path)!r} holds no F00 control; make one with `pdl-stress run --controls F00`.")
    else:
        _show(result, details, to)
    if svg:
        try:
            svg.write_text(to.export_svg(title="pdl-stress"), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--svg {str(svg)!r} cannot be written: {error.strerror}.") from error
    raise typer.Exit(result.verdict.exit_code)


@app.command()
def audit(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[PATH]...", help="Cubins, libraries, PTX, or folders of them.")
    ] = None,
    package: Annotated[list[str] | None, typer.Option(help="An installed Python package, by import name.")] = None,
    native: Annotated[bool, typer.Option("--native", help="The native kernels, against their contracts.")] = False,
    arch: Annotated[str | None, typer.Option(help="Only this architecture, such as sm_90a; default: all.")] = None,
    contracts: Annotated[Path | None, typer.Option(help="Declared contracts; --derive prints a file of them.")] = None,
    launches: Annotated[
        Path | None, typer.Option(help='JSON: {"kernel": true} where it is launched with the PDL attribute.')
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Every kernel is launched with the attribute, every operand dependent.")
    ] = False,
    format_: Annotated[str, typer.Option("--format", help="table, json or sarif.")] = "table",
    out: Annotated[Path | None, typer.Option(help="Write there instead of to standard output.")] = None,
    baseline: Annotated[Path | None, typer.Option(help="Leave out what this earlier JSON report has.")] = None,
    explain: Annotated[str, typer.Option(metavar="KERNEL", help="Show the paths that break a rule.")] = "",
    derive: Annotated[bool, typer.Option("--derive", help="Print the contracts of the machine code.")] = False,
    notes: Annotated[bool, typer.Option("--notes", help="Show notes too.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes; each holds one cubin.")] = 1,
) -> None:
    """Check machine code (SASS) against the rules of PDL, on a CPU."""
    from .audit.command import Options, run

    known, named = None, list(paths or [])
    with tempfile.TemporaryDirectory() as folder:
        if native:
            from .catalog import audited

            known = audited.CONTRACTS
            named += audited.write_cubins(Path(folder), arch)
        options = Options(
            named,
            package or [],
            arch,
            contracts,
            launches,
            strict,
            format_,
            out,
            baseline,
            explain,
            derive,
            notes,
            jobs,
        )
        code = run(options, console, known)
    raise typer.Exit(code)


@app.command("list")
def list_() -> None:
    """Show the chains, faults, ops and rule sets that ship or are installed."""
    table = Table(title="chains", title_justify="left")
    for name in ("chain", "what it is", "steps"):
        table.add_column(name)
    for name in catalog.names():
        try:
            chain = catalog.load(name)
        except UsageError as error:
            table.add_row(escape(name), f"[red]cannot be loaded[/]: {escape(str(error))}", "")
            continue
        table.add_row(name, escape(chain.title), " -> ".join(step.name for step in chain.steps))
    console.print(table)
    table = Table(title="faults (--controls, --plant)", title_justify="left")
    for name in ("id", "what is broken"):
        table.add_column(name)
    for fault in FAULTS.values():
        table.add_row(escape(fault.id), escape(fault.title))
    console.print(table)
    if found := offered():
        console.print(f"subjects of installed packages (pdl-stress check): {', '.join(sorted(found))}", markup=False)
    console.print(f"ops: {', '.join(OP_SETS)}, or a mix by op\nrule sets: {', '.join(model.RULE_SETS)}")


@app.command()
def doctor() -> None:
    """Say what this machine can run, and what would spoil a verdict."""
    from .cuda.device import inspect
    from .cuda.findings import Status

    findings = inspect()
    table = Table(title="doctor", title_justify="left")
    for name in ("subject", "status", "found", "advice"):
        table.add_column(name)
    colours = {Status.OK: "green", Status.NOTE: "cyan", Status.ABSENT: "dim", Status.BLOCKS_VERDICT: "yellow"}
    for finding in findings:
        colour = colours.get(finding.status, "bold red")
        table.add_row(
            finding.name, f"[{colour}]{finding.status.value}[/]", escape(finding.value), escape(finding.advice)
        )
    console.print(table)
    statuses = {finding.status for finding in findings}
    if Status.UNUSABLE in statuses:
        raise typer.Exit(Outcome.ERROR.exit_code)
    if Status.BLOCKS_VERDICT in statuses:
        raise typer.Exit(Outcome.INCONCLUSIVE.exit_code)
