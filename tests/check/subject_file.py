"""A file with subjects, as a user would write one. Loaded by path in tests."""

from __future__ import annotations

from typing import Any

from pdl_stress import subject


def make_inputs() -> Any:
    import torch

    return torch.zeros(4)


@subject(make_inputs)
def first(x: Any) -> Any:
    return x


@subject(make_inputs, name="the second", independent=("w",), code=lambda: ["a.cubin"])
def second(x: Any, w: Any) -> Any:
    return x


@subject(make_inputs)
def _hidden(x: Any) -> Any:
    return x


class Holder:
    @staticmethod
    def inner(x: Any) -> Any:
        return x
