"""A tinygemm2 that runs on any device and remembers its calls, weights whose sums no order of addition changes, and
the bound that a projection has to keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Call:
    """What one call was given. Addresses, so that no tensor is kept alive."""

    x: int
    rows: int
    weight: int
    columns: int
    bias: bool = False


@dataclass
class Recording:
    """A :class:`fusions.ops.choice.TinyGemmOp`: accumulates in FP32, rounds once. ``why``: its refusal of anything."""

    name: str = "recording"
    why: str = ""
    calls: list[Call] = field(default_factory=list)
    prepared: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    known_bad: str | None = None

    def supports(self, device: torch.device) -> bool:
        return not self.why

    def refusal(self, device: torch.device, k: int) -> str:
        return self.why

    def prepare(self, device: torch.device, columns: Iterable[int]) -> None:
        self.prepared.append((device.type, tuple(columns)))

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert x.dtype is weight.dtype is BF16
        assert x.is_contiguous()
        assert weight.is_contiguous()
        assert x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
        assert x.shape[0] > 0
        assert x.shape[1] % 8 == weight.shape[0] % 16 == 0
        self.calls.append(Call(x.data_ptr(), x.shape[0], weight.data_ptr(), weight.shape[0], bias is not None))
        result = x.float() @ weight.float().t()
        return (result if bias is None else result + bias.float()).to(BF16)

    def taken(self) -> list[Call]:
        """The calls since the last look."""
        calls, self.calls = self.calls, []
        return calls


@dataclass
class Counting:
    """A real op, and how often it was called with how many rows of weight."""

    op: Any
    columns: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.op, name)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.columns.append(weight.shape[0])
        result: torch.Tensor = self.op(x, weight, bias)
        return result

    def taken(self) -> list[int]:
        columns, self.columns = self.columns, []
        return columns


def whole(*shape: int, seed: int = 0) -> torch.Tensor:
    """-1, 0 and 1 in BF16: sums of up to 256 products are exact, in any order and any format."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(BF16)


def normal(*shape: int, seed: int = 0, device: str = "cpu", scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return (torch.randn(*shape, device=device, generator=generator) * scale).to(BF16)


def linear(weight: torch.Tensor, trained: bool = False) -> torch.nn.Linear:
    """A Linear without a bias whose weight is this tensor."""
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = torch.nn.Parameter(weight, requires_grad=trained)
    return made


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def assert_close(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """One rounding to BF16 of an FP32 accumulation, element by element."""
    exact, magnitude = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    error = (out.double() - exact).abs()
    assert (error <= exact.abs() * 2.0**-8 + magnitude * 2.0**-18 + 2.0**-133).all(), float(error.max())
