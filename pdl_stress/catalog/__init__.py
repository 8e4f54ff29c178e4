"""The chains that ship, by name. Third parties add theirs through the entry point group ``pdl_stress.chains``."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import entry_points

from ..chain import Chain
from ..errors import UsageError
from . import csa2

ENTRY_POINTS = "pdl_stress.chains"

SHIPPED: dict[str, Callable[[], Chain]] = {
    "csa2-fused-m1": partial(csa2.fused, 1),
    "csa2-separate-m1": partial(csa2.separate, 1),
    "csa2-separate-m4": partial(csa2.separate, 4),
    "csa2-separate-m8": partial(csa2.separate, 8),
}
"""Chains of this package, in the order in which they run."""


@cache
def names() -> tuple[str, ...]:
    """Names of all chains, shipped first, then those of installed entry points."""
    return (*SHIPPED, *(e.name for e in entry_points(group=ENTRY_POINTS) if e.name not in SHIPPED))


def load(name: str) -> Chain:
    """Builds the chain called ``name``.

    Raises:
        UsageError: no such chain; or an entry point that does not give one.
    """
    if name in SHIPPED:
        chain = SHIPPED[name]()
    else:
        found = [entry for entry in entry_points(group=ENTRY_POINTS) if entry.name == name]
        if not found:
            close = difflib.get_close_matches(name, names(), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"unknown chain {name!r}; `pdl-stress list` shows {', '.join(names())}.{hint}")
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
