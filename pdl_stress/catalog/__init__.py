"""The chains that ship, by name. Third parties add theirs through the entry point group ``pdl_stress.chains``."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import entry_points

from ..chain import Chain
from ..errors import UsageError
from . import csa2, deepseek_v32
from .ops import NATIVE, op_set

ENTRY_POINTS = "pdl_stress.chains"

SHIPPED: dict[str, Callable[..., Chain]] = {
    "csa2-fused-m1": partial(csa2.fused, 1),
    "csa2-separate-m1": partial(csa2.separate, 1),
    "csa2-separate-m4": partial(csa2.separate, 4),
    "csa2-separate-m8": partial(csa2.separate, 8),
    "indexer-tf32": partial(deepseek_v32.indexer, 4),
    "qkv-a-m1": partial(deepseek_v32.qkv_a, 1),
    "qkv-a-m8": partial(deepseek_v32.qkv_a, 8),
}
"""Chains of this package, in the order in which they run. Each is built from an op set, ``ops``; default: native."""


CSA2 = tuple(name for name in SHIPPED if name.startswith("csa2-"))
"""Those whose every step is launched with the PDL attribute, and can be had from every op set."""


@cache
def names() -> tuple[str, ...]:
    """Names of all chains, shipped first, then those of installed entry points."""
    return (*SHIPPED, *(e.name for e in entry_points(group=ENTRY_POINTS) if e.name not in SHIPPED))


def load(name: str, ops: str = "native") -> Chain:
    """Builds the chain called ``name``, a shipped one from the kernels that ``ops`` names (:func:`.ops.op_set`).

    Raises:
        UsageError: no such chain, or no such ops; an entry point that does not give a chain; or ops that are not native
            for a chain of an entry point, which brings its own.
    """
    chosen = op_set(ops)
    if name in SHIPPED:
        chain = SHIPPED[name](ops=chosen)
    else:
        found = [entry for entry in entry_points(group=ENTRY_POINTS) if entry.name == name]
        if not found:
            close = difflib.get_close_matches(name, names(), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"unknown chain {name!r}; `pdl-stress list` shows {', '.join(names())}.{hint}")
        if chosen != NATIVE:
            raise UsageError(
                f"chain {name!r} brings its own ops, so ops {ops!r} cannot be chosen for it; leave --ops out, or name "
                f"shipped chains: {', '.join(SHIPPED)}."
            )
        try:
            chain = found[0].load()()
        except Exception as error:
            raise UsageError(f"chain {name!r} of entry point {found[0].value!r} failed to load: {error!r}") from error
        if not isinstance(chain, Chain):
            raise UsageError(f"entry point {found[0].value!r} gave {type(chain).__name__}, not a pdl_stress.Chain.")
    if chain.name != name:
        raise UsageError(f"chain {name!r} calls itself {chain.name!r}; the two names must be the same.")
    chain.check()
    return chain


@dataclass(frozen=True)
class Loader:
    """:func:`load` with its ops, as an object that can be sent to a child process."""

    ops: str = "native"

    def __call__(self, name: str) -> Chain:
        return load(name, self.ops)
