"""Several Linears, and a second, joined copy of their weights: what to use where the Parameters must stay as they are.

The copy costs its memory, and is old as soon as a Parameter is written. That is looked for at every use, by what torch
counts. It cannot see everything: see :class:`RowCopy`. :class:`fusions.rows.RowViews` has neither fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusions.capturing import refuse_capture
from fusions.rows import Limits, RowViews


@dataclass(frozen=True)
class _Seen:
    """A weight when it was copied.

    Args:
        parameter: the object that was there.
        memory: a tensor over its memory: while that is held, no other weight can have the same address.
        version: how often torch had seen it written in place.
    """

    parameter: torch.Tensor
    memory: torch.Tensor
    version: int

    @staticmethod
    def of(weight: torch.Tensor) -> _Seen:
        return _Seen(weight, weight.detach(), weight._version)

    def changed(self, weight: Any) -> bool:
        return (
            weight is not self.parameter
            or weight._version != self.version
            or weight.data_ptr() != self.memory.data_ptr()
            or weight.shape != self.memory.shape
            or weight.dtype is not self.memory.dtype
            or weight.stride() != self.memory.stride()
        )


class RowCopy:
    """A copy ``[sum of rows, K]`` of the parts' weights, first part first.

    Has the methods of :class:`fusions.rows.RowViews` that a fused projection calls, and is used in its place.

    What torch does not count is a write through ``weight.data`` or a raw pointer, and loaders do write so: after one,
    :meth:`fuse` has to be called, which always copies anew. It copies into the same memory if that fits, so graphs that
    captured it read the new values from then on.

    Args:
        parts: (name, LinearLike) pairs. The modules are not registered anywhere: their owner has them.
        limits: which weights may be copied.
    """

    def __init__(self, parts: Sequence[tuple[str, Any]], limits: Limits | None = None) -> None:
        self._views = RowViews(parts, replace(limits or Limits(), allow_foreign_views=True))  # never fused: for checks
        self.names, self.linears = self._views.names, self._views.linears
        self.weight: torch.Tensor | None = None
        self._seen: tuple[_Seen, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Without the copy: torch counts a loaded weight's writes from anew, so that an old copy could pass for new."""
        return {**self.__dict__, "weight": None, "_seen": ()}

    def refusal(self) -> str:
        """Why the parts cannot share a copy as they are now; empty if they can."""
        why = self._views.refusal()
        if why:
            return why
        for name, linear in zip(self.names, self.linears, strict=True):
            if linear.weight.is_inference():
                return f"{name} is an inference tensor, of which torch counts no writes"
        return ""

    def broken(self) -> str:
        """Why the copy is not what the parts hold now; empty if it is. On the host alone."""
        if self.weight is None:
            return "not fused"
        for name, linear, seen in zip(self.names, self.linears, self._seen, strict=True):
            if seen.changed(getattr(linear, "weight", None)):
                return f"{name} has changed since the fused weight was copied"
        return ""

    def fuse(self) -> str:
        """Copies all parts, whether or not a change was seen.

        Returns:
            Empty on success. Otherwise why not, as :meth:`refusal`; then no copy is held.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        refuse_capture("copying weights")
        why = self.refusal()
        if why:
            self.forget()
            return why
        weights = [linear.weight for linear in self.linears]
        counts, first = [weight.shape[0] for weight in weights], weights[0]
        with torch.inference_mode(False), torch.no_grad():
            fused, shape = self.weight, (sum(counts), first.shape[1])
            if fused is None or (fused.shape, fused.dtype, fused.device) != (shape, first.dtype, first.device):
                fused = torch.empty(shape, dtype=first.dtype, device=first.device)
            for rows, weight in zip(fused.split(counts), weights, strict=True):
                rows.copy_(weight)
            self.weight, self._seen = fused, tuple(_Seen.of(weight) for weight in weights)
        return ""

    def detect(self) -> bool:
        """The copy is nobody's but ours, so it is made here too.

        Returns:
            Whether it is there.
        """
        return not self.fuse()

    def release(self) -> None:
        """Lets the copy go.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        refuse_capture("releasing a fused weight")
        self.forget()

    def forget(self) -> None:
        """Lets the copy go; the parts were never touched."""
        self.weight, self._seen = None, ()
