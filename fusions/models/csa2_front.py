"""The front of CSA2, the attention of DeepSeek-V4.1: two projections of the hidden states and their norms.

It is there to see :class:`fusions.csa2.HiddenStateProjections` at work, or plain Linears in its place. What follows in
the model (the query's up-projection, RoPE, the cache) does not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fusions.csa2 import HiddenStateProjections
from fusions.models.layers import BF16, RMSNorm, linear, run_hooks
from fusions.ops import TinyGemmOp


@dataclass(frozen=True)
class Csa2Config:
    """Sizes, in elements; DeepSeek-V4.1's are the default, and so is its ``eps``."""

    hidden_size: int = 5120
    q_lora_rank: int = 1280
    head_dim: int = 512
    eps: float = 1e-20

    @staticmethod
    def small() -> Csa2Config:
        """Sizes for tests on a CPU, such as tinygemm2 would take too."""
        return Csa2Config(hidden_size=256, q_lora_rank=64, head_dim=32)


class Csa2Inputs(NamedTuple):
    """What CSA2 takes on: the latent query ``[M, q_lora_rank]`` and the key-value ``[M, head_dim]``, both normed; BF16,
    dense."""

    q: torch.Tensor
    kv: torch.Tensor


class Csa2Front(torch.nn.Module):
    """``q_norm(hidden Wq^T), kv_norm(hidden Wkv^T)``.

    Its ``state_dict`` has ``wq_a``, ``wkv``, ``q_norm`` and ``kv_norm``, with fusion on and off. Load the weights, then
    call :meth:`post_load_weights`; move it with ``.to(device)``, which undoes the fusion until the next hook.

    Args:
        fusion: use tinygemm2 where it can be; False: two Linears.
        op, policy: as of :class:`fusions.csa2.HiddenStateProjections`.
    """

    def __init__(
        self,
        config: Csa2Config | None = None,
        fusion: bool = True,
        *,
        op: TinyGemmOp | None = None,
        policy: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config or Csa2Config()
        self.wq_a = linear(c.hidden_size, c.q_lora_rank, BF16, device)
        self.wkv = linear(c.hidden_size, c.head_dim, BF16, device)
        self.q_norm = RMSNorm(c.q_lora_rank, c.eps, device=device)
        self.kv_norm = RMSNorm(c.head_dim, c.eps, device=device)
        self.fused = HiddenStateProjections(self.wq_a, self.wkv, op=op, policy=policy) if fusion else None

    def post_load_weights(self) -> bool:
        """Runs the hooks of the modules below, once the weights are loaded; again and again does no harm.

        Returns:
            Whether the weights are fused now; never with ``fusion=False``.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        return run_hooks(self)

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both projections of BF16 ``hidden[M, K]``."""
        if self.fused is not None:
            return self.fused.project(hidden)
        return self.wq_a(hidden), self.wkv(hidden)

    def forward(self, hidden: torch.Tensor) -> Csa2Inputs:
        """See :class:`Csa2Inputs`. Never waits for the GPU; can be captured."""
        q, kv = self.project(hidden)
        return Csa2Inputs(self.q_norm(q), self.kv_norm(kv))

    def explain(self, hidden: torch.Tensor) -> str:
        """The path of the projections for ``hidden[M, K]``, and why."""
        if self.fused is None:
            return "plain Linears"
        path, why = self.fused.explain(hidden)
        return f"{path}: {why}"


@dataclass(frozen=True)
class Csa2DecodeStep:
    """One decode step whose input stays where it is: call it to run it, write into ``hidden`` for another one. Can be
    captured, after one call outside of a capture."""

    front: Csa2Front
    hidden: torch.Tensor

    def __call__(self) -> Csa2Inputs:
        with torch.no_grad():
            found: Csa2Inputs = self.front(self.hidden)
        return found


def decode_step_csa2(front: Csa2Front, batch: int, seed: int = 0) -> Csa2DecodeStep:
    """A decode step of ``batch`` tokens with random hidden states, on the device of the weights."""
    weight = front.wq_a.weight
    generator = torch.Generator(weight.device).manual_seed(seed)
    hidden = torch.randn((batch, front.config.hidden_size), generator=generator, device=weight.device)
    return Csa2DecodeStep(front, hidden.to(BF16))
