"""Dependencies run one way: what may import what (docs/extending.md, Layers)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(p for folder in ("pdl_stress", "fusions") for p in (ROOT / folder).rglob("*.py"))
CPU_ONLY = (
    *("model", "statistics", "verdict", "outcome", "results", "report", "buffers", "chain", "contract", "op", "faults"),
    *("errors", "jobs", "plan", "collect", "record", "sass", "audit"),
)


def imports(path: Path) -> set[str]:
    """Absolute names of everything that a module imports, anywhere in it."""
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            target = ".".join(filter(None, (base, node.module)))
            found |= {target} | {f"{target}.{alias.name}" for alias in node.names}
    return found


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_what_lies_below_it(path: Path) -> None:
    name, wanted = name_of(path), imports(path)
    if name.startswith("fusions"):
        assert not {w for w in wanted if w.startswith("pdl_stress")}
    elif not name.startswith("pdl_stress.catalog"):
        assert not {w for w in wanted if w == "fusions" or w.startswith("fusions.")}
    part = name.removeprefix("pdl_stress.").split(".")[0]
    if part in CPU_ONLY:
        wanted = {w for w in wanted if not w.startswith("cuda.pathfinder")}  # it finds files, and loads no driver
        assert not {w for w in wanted if w.split(".")[0] in ("torch", "cuda") or w.startswith("pdl_stress.cuda")}


def test_no_two_modules_import_each_other() -> None:
    graph = {name_of(p).removesuffix(".__init__"): imports(p) for p in MODULES}
    edges = {a: {w for w in wanted if w in graph and w != a} for a, wanted in graph.items()}
    circles = {tuple(sorted((a, b))) for a, targets in edges.items() for b in targets if a in edges[b]}
    # A package's own front page may name its modules; they never need it back at run time.
    assert not {c for c in circles if not (c[1].startswith(c[0] + "."))}


def test_the_command_line_and_the_model_load_neither_torch_nor_cuda() -> None:
    code = (
        "import sys, pdl_stress.cli, pdl_stress.model, pdl_stress.report; from pdl_stress import catalog;"
        "[catalog.load(n) for n in catalog.SHIPPED];"
        "bad = [m for m in ('torch', 'cuda.bindings', 'cuda.core') if m in sys.modules];"
        "print(bad); sys.exit(bool(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_touches_a_gpu_can_be_imported_without_a_driver_and_loads_torch_only_when_it_runs() -> None:
    """The parent of a worker, and every test of what these modules compute, runs where there may be no GPU."""
    code = (
        "import importlib, pkgutil, sys, pdl_stress.cuda as package;"
        "[importlib.import_module(f'pdl_stress.cuda.{m.name}') for m in pkgutil.iter_modules(package.__path__)];"
        "bad = [m for m in ('torch', 'cuda.bindings', 'cuda.core') if m in sys.modules];"
        "print(bad); sys.exit(bool(bad) or 'pdl_stress.cuda.profiler' not in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
