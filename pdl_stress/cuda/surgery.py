"""Puts changed machine code into kernel nodes of a captured graph: controls made from a kernel's own binary.

The cubin is found, its waits are removed, the result is loaded as a module of its own and takes the kernel's place in
the node, with the same parameters, grid, shared memory and edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..chain import Patch
from ..errors import DeviceError, PdlStressError
from ..sass.finder import CodeFinder, CodeNotFound
from ..sass.mutate import Mutant, MutationError, remove_waits, wait_sites
from .calls import checked
from .census import architecture
from .nodes import Kernel, kernel_of

MUTANT = "patched by pdl-stress"
"""Name of the modules that are loaded here, so that nobody takes one for a kernel as it was."""


@dataclass(frozen=True)
class _Loaded:
    """A mutant on the device; ``module`` keeps it loaded."""

    mutant: Mutant
    origin: str
    module: Any
    kernel: Any


class Surgeon:
    """Swaps kernels for their patched twins. Twins are made once per kernel and patch."""

    def __init__(self, finder: CodeFinder) -> None:
        self._finder = finder
        self._loaded: dict[tuple[str, tuple[int, ...] | None], _Loaded] = {}
        self._counts: dict[str, int] = {}

    def operate(self, nodes: list[Any], patch: Patch) -> list[str]:
        """Patches the kernel nodes of one step. Wait sites are counted over its kernels, in order.

        Returns:
            One line of evidence for each kernel: what was removed, from where, and how that was checked.

        Raises:
            PdlStressError: no machine code, no wait in it, or no such site.
            DeviceError: the driver refuses the patched code.
        """
        kernels = [kernel for kernel in map(kernel_of, nodes) if kernel is not None]
        lines, missing, first, touched = [], list[str](), 0, False
        for kernel in kernels:
            try:
                count = self._count(kernel.symbol)
            except CodeNotFound as error:  # such as a kernel of torch's behind one that is patched: it has full edges
                missing.append(str(error))
                continue
            sites = patch.remove
            if sites is not None:
                sites = tuple(site - first for site in sites if first <= site < first + count)
            first += count
            if not count or (patch.remove and not sites):
                continue
            loaded = self._load(kernel, sites)
            _swap(kernel, loaded.kernel)
            touched = True
            removed = len(loaded.mutant.removed)
            lines.append(f"{removed} of {count} waits removed from {loaded.origin}; {loaded.mutant.checked}")
        if not touched:
            names = ", ".join(kernel.symbol for kernel in kernels) or "no kernel"
            why = "".join(f"; {text}" for text in missing)
            raise PdlStressError(f"nothing to patch ({patch}): {names}, {first} waits{why}.")
        return lines

    def _count(self, symbol: str) -> int:
        """Wait sites of a kernel. A graph holds it many times, so this is remembered."""
        if symbol not in self._counts:
            code = self._finder.find(symbol, architecture()).code
            self._counts[symbol] = len(wait_sites(code, symbol))
        return self._counts[symbol]

    def _load(self, kernel: Kernel, sites: tuple[int, ...] | None) -> _Loaded:
        key = (kernel.symbol, sites)
        if key not in self._loaded:
            from cuda.core import ObjectCode

            found = self._finder.find(kernel.symbol, architecture())
            try:
                mutant = _mutant(found.code, kernel.symbol, sites)
            except MutationError as error:
                raise PdlStressError(f"{kernel.symbol}: {error}") from error
            try:
                module = ObjectCode.from_cubin(mutant.code, name=MUTANT)
                handle = module.get_kernel(kernel.symbol).handle
            except Exception as error:
                raise DeviceError(f"the driver does not load the patched code of {kernel.symbol}: {error}") from error
            self._loaded[key] = _Loaded(mutant, found.origin, module, handle)
        return self._loaded[key]


@lru_cache(maxsize=64)
def _mutant(code: bytes, symbol: str, sites: tuple[int, ...] | None) -> Mutant:
    """:func:`remove_waits`, once per process: each disassembly takes a second, and chains share their kernels."""
    return remove_waits(code, symbol, sites)


def _swap(kernel: Kernel, replacement: Any) -> None:
    """Puts another kernel of the same parameters into the node, before the graph is instantiated."""
    from cuda.bindings import driver

    handle = driver.CUkernel(int(replacement))
    device = checked(driver.cuCtxGetDevice(), "cuCtxGetDevice")
    attributes = driver.CUfunction_attribute
    wanted = {attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: _attribute(kernel, device)}
    if kernel.shared_bytes:
        wanted[attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES] = kernel.shared_bytes
    for attribute, value in wanted.items():
        if value:
            checked(driver.cuKernelSetAttribute(attribute, value, handle, device), "cuKernelSetAttribute")
    params = kernel.params
    params.kern, params.func = handle, driver.CUfunction(0)
    (code,) = driver.cuGraphKernelNodeSetParams(kernel.node, params)
    if int(code) != 0:
        raise DeviceError(f"the driver refuses patched code in the graph node of {kernel.symbol}: {code.name}.")


def _attribute(kernel: Kernel, device: Any) -> int:
    """Whether the kernel may have clusters of a size that is not portable; the twin must be allowed the same."""
    from cuda.bindings import driver

    which = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    if int(kernel.params.func):
        return int(checked(driver.cuFuncGetAttribute(which, kernel.params.func), "cuFuncGetAttribute"))
    return int(checked(driver.cuKernelGetAttribute(which, kernel.params.kern, device), "cuKernelGetAttribute"))
