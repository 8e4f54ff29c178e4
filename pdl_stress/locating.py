"""Where a callable is defined, so that another process can load it: by file and name, never by value."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import UsageError


@dataclass(frozen=True)
class Location:
    """A name in a module. ``module`` is importable; else it is empty, and the file is loaded by its path."""

    module: str
    file: str
    name: str

    def load(self) -> Any:
        """Raises UsageError where it is no longer there."""
        found: Any = importlib.import_module(self.module) if self.module else load_file(Path(self.file))
        for part in self.name.split("."):
            try:
                found = getattr(found, part)
            except AttributeError:
                raise UsageError(f"{self.file or self.module} has no {self.name!r}.") from None
        return found


def locate(obj: Any) -> Location:
    """Raises UsageError for what no other process can find: a lambda, a function inside a function, a bound object."""
    name, module = getattr(obj, "__qualname__", None), getattr(obj, "__module__", None)
    if not name or "<" in name or not module:
        raise UsageError(
            f"{name or obj!r} cannot be sent to a child process; define it at the top of a module, or check it in this "
            "process (isolate=False), where a crash or a hang of a kernel takes everything with it."
        )
    try:
        file = inspect.getsourcefile(obj) or ""
    except TypeError:
        file = ""
    if module != "__main__" and _is_importable(module, file):
        return Location(module, file, name)
    if not file:
        raise UsageError(f"{name} of {module} cannot be sent to a child process: its file is not known.")
    return Location("", str(Path(file).resolve()), name)


_PREFIX = "_pdl_stress_file_"


def _is_importable(module: str, file: str) -> bool:
    if module.startswith(_PREFIX):  # loaded by path, in this process only
        return False
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return False
    return found is not None and (not file or found.origin is None or Path(found.origin) == Path(file))


def load_file(path: Path) -> ModuleType:
    """Runs a Python file as a module of its own, once per process; its folder is on ``sys.path``, as for a script.

    Raises:
        UsageError: no such file, or it raises.
    """
    path = path.resolve()
    name = f"{_PREFIX}{path.stem}_{sha256(str(path).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise UsageError(f"{str(path)!r} is no file.")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path.name!r} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UsageError(f"{path.name} cannot be loaded: {type(error).__name__}: {error}") from error
    return module
