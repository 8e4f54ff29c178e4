"""Subjects by name: in a Python file, or offered by an installed package (entry point group ``pdl_stress.ops``)."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from .errors import UsageError
from .locating import load_file
from .subjects import Subject

ENTRY_POINTS = "pdl_stress.ops"


def offered() -> dict[str, EntryPoint]:
    """What installed packages offer, by name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def discover(target: str) -> list[Subject]:
    """The subjects of ``FILE.py``, of ``FILE.py::NAME``, or of the name of an entry point.

    Raises:
        UsageError: none of these, or no subject there.
    """
    path, _, name = target.partition("::")
    if not path.endswith(".py"):
        points = offered()
        if target not in points:
            known = (
                f"installed packages offer {', '.join(sorted(points))}" if points else "no installed package offers any"
            )
            raise UsageError(f"{target!r} is neither FILE.py[::NAME] nor the name of a subject; {known}.")
        return [_loaded(points[target])]
    found = {
        key: value for key, value in vars(load_file(Path(path))).items()
        if isinstance(value, Subject) and not key.startswith("_")
    }  # fmt: skip
    if not found:
        raise UsageError(
            f"{path} has no subject; decorate a function that launches kernels with @pdl_stress.subject(make_inputs)."
        )
    if not name:
        return list(found.values())
    for key, value in found.items():
        if name in (key, value.name):
            return [value]
    raise UsageError(f"{path} has no subject {name!r}; it has {', '.join(found)}.")


def _loaded(point: EntryPoint) -> Subject:
    try:
        found = point.load()
    except Exception as error:
        raise UsageError(f"{point.name} ({point.value}) cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(found, Subject):
        raise UsageError(f"{point.name} ({point.value}) is {found!r}; expected a subject (@pdl_stress.subject).")
    return found
