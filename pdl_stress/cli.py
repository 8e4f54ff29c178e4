"""The command line: ``pdl-stress run``, ``list``, ``doctor``. Exit codes: PASS and ORDERED 0, FAIL 1, usage 2, ERROR 3,
INCONCLUSIVE 4."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import __version__, catalog, model
from .api import choose_machine
from .campaign import ALL_DELAYS_US, CONTROL_REPLAYS, DELAYS_US, Plan, run_on_gpu, run_on_model
from .chain import Chain
from .errors import DeviceError, PdlStressError, UsageError
from .faults import FAULTS, check_controls, plant
from .outcome import USAGE_EXIT_CODE, Outcome, worst
from .report import founding_table, load_json, print_cases, write_json
from .report.table import coloured
from .results import CaseResult, RunResult

OPS = ("auto", "native")

app = typer.Typer(
    name="pdl-stress",
    help="Is a chain of CUDA kernels ordered under Programmatic Dependent Launch, and could the test have told?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# Tables need room; where nobody looks at a terminal there is no width to respect.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 118)


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
    ops: Annotated[str, typer.Option(help=f"Kernels to run: {', '.join(OPS)}.")] = "auto",
    replays: Annotated[int, typer.Option(help="Graded replays of each clean arm.")] = 20_000,
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
    time_limit: Annotated[float, typer.Option(help="Seconds after which a run of one graph counts as hung.")] = 60.0,
    details: Annotated[bool, typer.Option("--details", help="Print every arm, edge and control.")] = False,
) -> None:
    """Check chains: on a GPU by stress with controls, elsewhere by the model from their contracts."""
    names = chains or list(catalog.names())
    plan = _plan(ops, replays, seed, rules, controls, delays, control_replays, planted, time_limit)
    built = [catalog.load(name) for name in dict.fromkeys(names)]
    check_controls(built, plan.faults)
    if planted:
        built = _plantable(built, planted, all_of_them=bool(chains))
    if machine not in ("auto", "cuda", "model"):
        raise UsageError(f"unknown machine {machine!r}; expected auto, cuda or model.")
    folder = _folder(out, force)

    from .cuda.device import environment

    result = RunResult(
        Outcome.ERROR,
        shlex.join(["pdl-stress", *sys.argv[1:]]),
        datetime.now(UTC).isoformat(timespec="seconds"),
        0.0,
        {},
        [],
    )
    started = time.monotonic()

    def keep(cases: list[CaseResult]) -> None:
        result.cases = cases
        result.seconds = time.monotonic() - started
        result.verdict = worst([Outcome.ERROR] * bool(result.errors) + [case.verdict for case in cases])
        write_json(result, folder / "results.json")

    try:
        chosen = choose_machine(machine)
        result.environment = environment(machine=chosen)
        with _interruptible(), _progress() as progress:
            if chosen == "model":
                keep(run_on_model(built, plan, progress))
            else:
                from .cuda.worker import Worker

                with Worker(catalog.load, seed=seed, time_limit=time_limit) as worker:
                    keep(run_on_gpu(built, plan, worker, progress, keep))
    except DeviceError as error:
        result.errors.append(str(error))
    except KeyboardInterrupt:
        result.errors.append("interrupted; what had finished is kept")
    except Exception as error:
        result.errors.append(f"{type(error).__name__}: {error} (a defect of pdl-stress: please report it)")
    result.environment = result.environment or environment(machine="cuda" if machine == "cuda" else None)
    keep(result.cases)
    _show(result, details)
    console.print(f"results: {escape(str(folder / 'results.json'))}", soft_wrap=True)
    raise typer.Exit(result.verdict.exit_code)


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
    return found


def _show(result: RunResult, details: bool, to: Console = console) -> None:
    if result.cases:
        print_cases(result.cases, to, everything=details)
    for error in result.errors:
        _complain(error)
    to.print(f"\nverdict: {coloured(result.verdict)}   ({result.seconds:.1f} s)")
    if any(case.machine == "model" for case in result.cases):
        to.print(
            "No kernel ran: the model judged the contracts. For evidence from hardware, run this on a GPU with PDL."
        )


def _plan(
    ops: str,
    replays: int,
    seed: int,
    rules: str,
    controls: str,
    delays: str,
    control_replays: int,
    planted: str,
    time_limit: float,
) -> Plan:
    if ops not in OPS:
        raise UsageError(f"unknown ops {ops!r}; expected one of {', '.join(OPS)}.")
    for name, number in (("--replays", replays), ("--control-replays", control_replays)):
        if number < 1:
            raise UsageError(f"{name} is {number}; expected at least 1.")
    if not 0 < time_limit <= 86_400:
        raise UsageError(f"--time-limit is {time_limit:g}; expected seconds above zero, at most a day.")
    if rules not in model.RULE_SETS:
        raise UsageError(f"unknown rule set {rules!r}; expected one of {', '.join(model.RULE_SETS)}.")
    faults = {"all": None, "none": ()}.get(controls, tuple(part.strip() for part in controls.split(",")))
    try:
        windows = ALL_DELAYS_US if delays == "all" else tuple(sorted({float(part) for part in delays.split(",")}))
    except ValueError as error:
        raise UsageError(f"--delays {delays!r}: expected microseconds separated by commas, or 'all'.") from error
    if not windows or not all(0 <= window <= 1000 for window in windows):
        raise UsageError(f"--delays {delays!r}: expected microseconds from 0 to 1000.")
    return Plan(replays, control_replays, model.RULE_SETS[rules], seed, faults, windows, planted, "native")


def _folder(out: Path | None, force: bool) -> Path:
    """Makes the output folder, before anything runs, so that a long run cannot end with nowhere to write."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder = out or Path("pdl-stress-results") / stamp
    try:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--out {str(folder)!r} is a file; expected a folder.")
        if folder.is_dir() and any(folder.iterdir()) and not force:
            raise UsageError(f"--out {str(folder)!r} is not empty; choose another folder, or add --force.")
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--out {str(folder)!r} cannot be written: {error.strerror or error}.") from error
    return folder


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal; elsewhere a line now and then."""
    if console.is_terminal:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console, transient=True) as bar:
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
    to = Console(highlight=False, record=True, width=118) if svg else console
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


@app.command("list")
def list_() -> None:
    """Show the chains, faults, ops and rule sets that ship or are installed."""
    table = Table(title="chains", title_justify="left")
    for name in ("chain", "what it is", "steps"):
        table.add_column(name)
    for name in catalog.names():
        chain = catalog.load(name)
        table.add_row(name, escape(chain.title), " -> ".join(step.name for step in chain.steps))
    console.print(table)
    table = Table(title="faults (--controls, --plant)", title_justify="left")
    for name in ("id", "what is broken"):
        table.add_column(name)
    for fault in FAULTS.values():
        table.add_row(escape(fault.id), escape(fault.title))
    console.print(table)
    console.print(f"ops: {', '.join(OPS)}\nrule sets: {', '.join(model.RULE_SETS)}")


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
