"""The results of a run on disk, from its first second on: after a crash they say ERROR, never an older run's PASS."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from .errors import UsageError
from .outcome import Outcome, worst
from .report import write_json
from .results import CaseResult, RunResult

UNFINISHED = "the run has not finished"
FILE = "results.json"


def result_folder(out: Path | None, force: bool) -> Path:
    """Makes the output folder, before anything runs, so that a long run cannot end with nowhere to write.

    Args:
        out: as asked for; ``None``: a new folder ``pdl-stress-results/<time>``.
        force: whether it may hold something.

    Raises:
        UsageError: a file, not empty, or not writable.
    """
    if out is None:
        return _new_folder(Path("pdl-stress-results"))
    try:
        if out.exists() and not out.is_dir():
            raise UsageError(f"--out {str(out)!r} is a file; expected a folder.")
        if out.is_dir() and any(out.iterdir()) and not force:
            raise UsageError(f"--out {str(out)!r} is not empty; choose another folder, or add --force.")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {str(out)!r} cannot be written: {error.strerror or error}.") from error
    return out


def _new_folder(parent: Path) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    number = 0
    while True:
        folder = parent / (f"{stamp}-{number}" if number else stamp)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1  # another run of this second
        except OSError as error:
            raise UsageError(f"{str(folder)!r} cannot be made: {error.strerror or error}. Use --out.") from error


class Record:
    """A run's results, written whenever something has finished.

    Raises:
        UsageError: at the start, if the file cannot be written.
    """

    def __init__(self, folder: Path, command: str) -> None:
        self.path = folder / FILE
        self._started = time.monotonic()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.result = RunResult(Outcome.ERROR, command, now, 0.0, {}, [], [UNFINISHED])
        try:
            self._write()
        except OSError as error:
            raise UsageError(f"{str(self.path)!r} cannot be written: {error.strerror or error}.") from error

    def keep(self, cases: list[CaseResult]) -> None:
        """Enters the cases as they stand. A disk that is full now is no reason to stop: :meth:`finish` tries again."""
        self.result.cases = cases
        with suppress(OSError):
            self._write()

    def fail(self, text: str) -> None:
        """Enters what kept the run from going on."""
        self.result.errors.append(text)

    def finish(self) -> None:
        """Gives the final verdict. A file that cannot be written any more is an error of the run, not the end of it."""
        self.result.errors.remove(UNFINISHED)
        try:
            self._write()
        except OSError as error:
            self.fail(f"{str(self.path)!r} cannot be written: {error.strerror or error}")
            self._judge()

    def _judge(self) -> None:
        self.result.seconds = time.monotonic() - self._started
        errors = [Outcome.ERROR] * bool(self.result.errors)
        self.result.verdict = worst([*errors, *[case.verdict for case in self.result.cases]])

    def _write(self) -> None:
        self._judge()
        write_json(self.result, self.path)
