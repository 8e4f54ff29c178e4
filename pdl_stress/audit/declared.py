"""Declared contracts of kernels, for the audit to compare with: who reads and writes what, and what may come early.

A contract file is JSON::

    {"kernels": {"rmsnorm": {"parameters": {"0": "input", "2": "out"}, "reads": ["input"], "writes": ["out"],
                             "independent": [], "wait": "all", "trigger": "after_stores", "fence": false}}}

The key is the kernel's mangled name; `parameters` gives parameters their names by number, others are called `p3`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdl_stress.contract import KernelContract
from pdl_stress.errors import UsageError

_FIELDS = ("reads", "writes", "independent", "wait", "trigger", "fence")


@dataclass(frozen=True)
class Declared:
    """A kernel's contract. names: its parameters' operand names by number. ignored: operands that no other kernel of a
    chain touches, such as time stamps."""

    contract: KernelContract
    names: dict[int, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    def operand(self, ordinal: int) -> str:
        return self.names.get(ordinal, f"p{ordinal}")


def load(path: Path) -> dict[str, Declared]:
    """The contracts of a file, by mangled name. Raises UsageError."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"--contracts {path.name}: cannot be read: {reason}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"--contracts {path.name}: it is not JSON; `pdl-stress audit --derive` prints one") from None
    kernels = content.get("kernels") if isinstance(content, dict) else None
    if not isinstance(kernels, dict):
        raise UsageError(f'--contracts {path.name}: expected {{"kernels": {{name: contract}}}}')
    return {name: _declared(name, entry, path.name) for name, entry in kernels.items()}


def _declared(kernel: str, entry: Any, file: str) -> Declared:
    where = f"--contracts {file}: {kernel}"
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: expected an object with {', '.join(_FIELDS)}")
    unknown = entry.keys() - {*_FIELDS, "parameters", "ignored"}
    if unknown:
        raise UsageError(f"{where}: unknown {', '.join(sorted(unknown))}; known are {', '.join(_FIELDS)}")
    names = entry.get("parameters", {})
    if not isinstance(names, dict) or not all(str(k).isdecimal() and isinstance(v, str) for k, v in names.items()):
        raise UsageError(f'{where}: `parameters` is {names!r}; expected operand names by number, as {{"0": "input"}}')
    ignored = entry.get("ignored", [])
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        raise UsageError(f"{where}: `ignored` is {ignored!r}; expected a list of operand names")
    fields = {name: entry[name] for name in _FIELDS if name in entry}
    if not isinstance(fields.get("fence", False), bool):
        raise UsageError(f"{where}: `fence` is {fields['fence']!r}; expected true or false")
    try:
        contract = KernelContract(**fields)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    return Declared(contract, {int(number): name for number, name in names.items()}, frozenset(ignored))


def as_json(contracts: dict[str, Declared]) -> str:
    """A contract file."""
    kernels = {
        name: {
            "parameters": {str(number): operand for number, operand in sorted(declared.names.items())},
            "reads": list(declared.contract.reads),
            "writes": list(declared.contract.writes),
            "independent": list(declared.contract.independent),
            "wait": str(declared.contract.wait),
            "trigger": str(declared.contract.trigger),
            "fence": declared.contract.fence,
        }
        for name, declared in sorted(contracts.items())
    }
    return json.dumps({"kernels": kernels}, indent=2) + "\n"
