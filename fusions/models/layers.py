"""What both fronts are made of: RMSNorm, RoPE, random weights, the walk of the hooks."""

from __future__ import annotations

import torch

from fusions.ops import OPS, native

BF16, FP32 = torch.bfloat16, torch.float32


class RMSNorm(torch.nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in FP32, rounded once to the type of ``x``.

    BF16 rows ``[M, width]`` on a GPU that has it go through :func:`fusions.ops.native.rmsnorm`, everything else through
    torch. Rows may be any distance apart.
    """

    def __init__(
        self, width: int, eps: float, *, dtype: torch.dtype = BF16, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps

    def is_native(self, x: torch.Tensor) -> bool:
        """Whether ``x`` goes through the native kernel."""
        return (
            not torch.compiler.is_compiling()
            and x.is_cuda
            and x.dim() == 2
            and x.dtype is self.weight.dtype is BF16
            and x.stride(1) == 1
            and not (torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad))
            and OPS["native"].supports(x.device)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_native(x):
            return native.rmsnorm(x, self.weight, eps=self.eps)
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.float()).to(x.dtype)


class Rope(torch.nn.Module):
    """Rotary position embedding: pair ``i`` of ``dim / 2`` turns by ``position * theta ** (-2 i / dim)``. No scaling of
    long contexts. The frequencies are FP32: move the module between devices, but do not cast it."""

    frequencies: torch.Tensor

    def __init__(self, dim: int, theta: float, *, device: torch.device | None = None) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"RoPE over {dim} elements: expected a positive even number")
        powers = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        # Not persistent: state_dict has weights only.
        self.register_buffer("frequencies", (theta**-powers).to(device=device, dtype=FP32), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines ``[M, dim / 2]`` in FP32, for :func:`rotate`. ``positions``: integers ``[M]``."""
        angles = positions.unsqueeze(-1).float() * self.frequencies
        return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], *, interleaved: bool) -> torch.Tensor:
    """``x[M, dim]`` or ``x[M, heads, dim]`` turned, in FP32, rounded once to its type; a new dense tensor.

    Args:
        turn: what :class:`Rope` gives for the ``M`` positions.
        interleaved: pairs are neighbours (2 i, 2 i + 1), as in MLA; otherwise they are (i, i + dim / 2), as in the
            indexer (the "neox" order).
    """
    cos, sin = (part.unsqueeze(1) if x.dim() == 3 else part for part in turn)
    wide = x.float()
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    turned = first * cos - second * sin, first * sin + second * cos
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return joined.to(x.dtype)


def linear(k: int, rows: int, dtype: torch.dtype, device: torch.device | None) -> torch.nn.Linear:
    """A Linear of inference: no bias, no gradient, which would keep its weight out of any fusion."""
    return torch.nn.Linear(k, rows, bias=False, dtype=dtype, device=device).requires_grad_(False)


@torch.no_grad()
def randomize(module: torch.nn.Module, seed: int = 0) -> None:
    """Random weights in place, the same for the same seed on the same kind of device: matrices of unit gain, gains near
    1, biases near 0. All are values that BF16 holds, as of a BF16 checkpoint. Waits for the GPU."""
    for place, (name, parameter) in enumerate(module.named_parameters()):
        generator = torch.Generator(parameter.device).manual_seed(seed * 1009 + place)
        values = torch.randn(parameter.shape, generator=generator, device=parameter.device)
        if parameter.dim() == 2:
            values *= parameter.shape[1] ** -0.5
        else:
            values = values * 0.1 + (0.0 if name.endswith("bias") else 1.0)
        parameter.copy_(values.to(BF16))
    for device in {parameter.device for parameter in module.parameters() if parameter.is_cuda}:
        torch.cuda.synchronize(device)  # kernels may read weights before their wait


def run_hooks(module: torch.nn.Module) -> bool:
    """Calls ``post_load_weights()`` of every module below this one, once. Whether there are any, and all fused."""
    hooks = [getattr(child, "post_load_weights", None) for child in module.modules() if child is not module]
    found = [bool(hook()) for hook in hooks if callable(hook)]
    return bool(found) and all(found)
