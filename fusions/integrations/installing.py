"""The steps that all installations share: once per instance, undone if anything fails, checked if forced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch

from fusions.capturing import refuse_capture
from fusions.integrations import equality
from fusions.integrations.equality import Different
from fusions.integrations.instance import RECORD, Installation, installed

Example = Callable[[Any, torch.Tensor], Any]
"""``example(module, hidden)`` calls the changed method of the module, with whatever else it needs, and returns tensors
that show what it did. It must leave no state behind: a second call gives the same."""

ATTRIBUTE = f"self.{RECORD}"
"""How changed methods reach the installation."""


class Patched(Installation):
    """An installation with one changed method and a child that makes the projections."""

    child: str = ""
    exact = False
    """Whether results are the same bit by bit while nothing is fused."""

    def __init__(self, module: Any, options: Mapping[str, Any]) -> None:
        super().__init__(module, options)
        self.projections: Any = None
        self._made_from: tuple[Any, ...] = ()

    def prepare(self) -> None:
        """Before anything is put on the module, and before results are taken to compare with."""

    def patch(self, name: str, function: Callable[..., Any]) -> None:
        """Puts the changed method, and the hooks, on the instance."""
        self.put(name, MethodType(function, self.module))
        self.put_hook("post_load_weights")

    def parts(self) -> tuple[Any, ...]:
        """What the projections are made from, as it is now; compared by identity."""
        raise NotImplementedError

    def make(self, *parts: Any) -> Any:
        """New projections from :meth:`parts`."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Makes the projections, anew if the module has other parts now."""
        parts = self.parts()
        if self.projections is not None and self.holds(*parts):
            return
        if self.projections is not None:
            self.projections.release()
        self.projections, self._made_from = self.make(*parts), parts
        # Registered, so that a walk over modules() fuses once more behind the children's own hooks. Not on a module
        # that was made without nn.Module.__init__, which can hold no children.
        children = vars(self.module).get("_modules")
        if children is not None:
            children[self.child] = self.projections

    def holds(self, *parts: Any) -> bool:
        """Whether the projections were made from these very parts."""
        return len(parts) == len(self._made_from) and all(map(_same, parts, self._made_from))

    def release(self) -> None:
        if self.projections is not None:
            self.projections.release()
        (vars(self.module).get("_modules") or {}).pop(self.child, None)

    def loaded(self, hook: str) -> bool:
        self.refresh()
        if hook == "cache_derived_state":
            return bool(self.projections.cache_derived_state())
        return bool(self.projections.post_load_weights())

    def inputs(self) -> Sequence[torch.Tensor]:
        """Random hidden states to compare results for; none if the weights are not there."""
        raise NotImplementedError

    def beyond(self, hidden: torch.Tensor) -> str:
        """What the projections of these hidden states get wrong by the numerical contract; empty if nothing."""
        raise NotImplementedError


_P = TypeVar("_P", bound=Patched)


def begin(cls: type[_P], module: Any, options: Mapping[str, Any]) -> tuple[_P, bool]:
    """An installation for this module, and whether it is a new one that :func:`finish` has to be called for.

    Raises:
        ValueError: another one is installed.
        RuntimeError: a CUDA graph is being captured.
    """
    refuse_capture(f"install_{cls.kind}()")
    found = installed(module)
    if found is None:
        return cls(module, options), True
    if isinstance(found, cls) and found.options == dict(options):
        return found, False
    raise ValueError(
        f"install_{cls.kind}: {type(module).__name__} has {found.kind} installed with options {found.options}; "
        "call uninstall(module) first"
    )


def finish(record: Patched, name: str, function: Callable[..., Any], force: bool, example: Example | None) -> None:
    """Puts everything in place, and fuses what is loaded.

    Raises:
        Different: forced, and results differ.
        ValueError: forced, and the method cannot be tried.
    """
    try:
        record.put(RECORD, record)
        record.prepare()
        before, inputs = [], []
        if force:
            inputs = list(record.inputs())
            if not inputs:
                raise ValueError("force=True compares results, and the weights are not there yet; load them first")
            before = _results(record, inputs, example)
            unstable = equality.difference(before, _results(record, inputs, example), exact=True)
            if unstable:
                raise ValueError(f"force=True compares results, but two calls in a row differ: {unstable}; {_ADVICE}")
        record.patch(name, function)
        record.refresh()
        if force and record.exact:
            _demand(record, equality.difference(before, _results(record, inputs, example), exact=True))
        record.loaded("post_load_weights")
        if force:
            for hidden in inputs:
                _demand(record, record.beyond(hidden))
            if not record.exact:
                _demand(record, equality.difference(before, _results(record, inputs, example), exact=False))
    except BaseException:
        record.undo()
        raise


_ADVICE = (
    "pass example=, a function (module, hidden) that calls the method with all it needs and leaves no state behind"
)


def _results(record: Patched, inputs: Sequence[torch.Tensor], example: Example | None) -> list[list[torch.Tensor]]:
    module = record.module
    if example is not None:
        return equality.results(lambda hidden: example(module, hidden), inputs)
    try:
        return equality.results(lambda hidden: module(hidden), inputs)
    except TypeError as error:
        raise ValueError(f"force=True calls the module with hidden states alone, and: {error}; {_ADVICE}") from error


def _demand(record: Patched, difference: str) -> None:
    if difference:
        raise Different(
            f"install_{record.kind}(force=True): {type(record.module).__name__} does not give what it gave before: "
            f"{difference}. All was undone; use the patch that force=False prints"
        )


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, str) and a == b)
