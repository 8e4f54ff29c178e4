"""CSA2 hidden-state projections: ``wq_a`` and ``wkv`` of DeepSeek-V4.1's attention through tinygemm2 at decode sizes.

One token: one GEMM over both weights, which are rows of one tensor. Two to eight: one GEMM for each. Anything else: the
two Linears. Which case holds is decided at every call, from what is there then.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from fusions.capturing import refuse_capture
from fusions.ops.choice import Policy, TinyGemmOp, choose
from fusions.rows import Limits, RowViews

MODES = ("bf16", "mxfp8")
"""Projection modes of CSA2's attention; only bf16 is ever fused."""

_ALIGNMENT = 16  # bytes: operands are read through tensor maps


class Path(StrEnum):
    """How a call was, or would be, carried out."""

    FUSED = "fused"
    SEPARATE = "separate"
    LINEAR = "linear"


@dataclass(frozen=True)
class Launch:
    """One call of the op. ``weight``: ``[N, K]``, the whole fused weight or one part's rows."""

    name: str
    weight: torch.Tensor


class HiddenStateProjections(torch.nn.Module):
    """``(hidden Wq^T, hidden Wkv^T)`` for ``hidden[M, K]``: K = 5120, 1280 and 512 columns in DeepSeek-V4.1.

    The two modules stay where they are: they are not registered here, and ``state_dict`` does not change. An owner that
    puts another module in one's place makes a new ``HiddenStateProjections``; a bias or hook on the one that is here is
    seen at once, LoRA and quantization by the next hook. Their owner
    loads the weights, then calls :meth:`post_load_weights` (a walk over ``modules()`` finds it).

    Args:
        wq_a, wkv: :class:`fusions.linear.LinearLike`.
        projection_mode: one of :data:`MODES`.
        max_tokens: the most tokens for which tinygemm2 is used.
        fuse_one_token: one launch for one token; False: one for each part, as for more tokens (to compare the two).
        op: the tinygemm2 to use, if not the one that ``FUSIONS_TINYGEMM`` chooses.
        policy: on which GPUs, if not as ``FUSIONS_TINYGEMM_SM`` says (``*``, or such as ``90,107``).
        allow_foreign_views: fuse weights that are views of a larger storage of somebody else's.

    Weights are read before the kernel's wait: whoever writes them (a reload) synchronizes the stream before the next
    :meth:`project`. Graphs captured before the weights moved into another buffer read the old one.

    Raises:
        ValueError: an unknown mode or policy, or no positive ``max_tokens``.
    """

    def __init__(
        self,
        wq_a: Any,
        wkv: Any,
        *,
        projection_mode: str = "bf16",
        max_tokens: int = 8,
        fuse_one_token: bool = True,
        op: TinyGemmOp | None = None,
        policy: str | None = None,
        allow_foreign_views: bool = False,
    ) -> None:
        super().__init__()
        if projection_mode not in MODES:
            raise ValueError(f"projection_mode={projection_mode!r}: expected one of {', '.join(MODES)}")
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens}: expected 1 or more; to turn tinygemm2 off set policy=''")
        self.projection_mode, self.max_tokens, self.fuse_one_token, self.op = (
            projection_mode,
            max_tokens,
            fuse_one_token,
            op,
        )
        self._policy = None if policy is None else Policy.parse(policy)
        limits = Limits((torch.bfloat16,), 8, 16, allow_foreign_views)
        self._parts = RowViews((("wq_a", wq_a), ("wkv", wkv)), limits)

    # -- weights -------------------------------------------------------------------------------------------------------

    def post_load_weights(self) -> bool:
        """Puts both weights into one tensor ``[Nq + Nkv, K]``, each Parameter a view of its rows; pointers of a layout
        that is in place stay. Waits for the stream.

        Returns:
            Whether the fused layout is in place. If not, :meth:`explain` says why, and nothing was touched.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        refuse_capture("post_load_weights()")
        why = self._refusal()
        if why:
            self._parts.forget()
            return False
        if self._parts.fuse():
            return False
        self._prepare()
        return True

    def transform_weights(self) -> bool:
        """The staged loading protocol's name for :meth:`post_load_weights`: it may move weights."""
        return self.post_load_weights()

    def cache_derived_state(self) -> bool:
        """The staged protocol's step for readers of weights that somebody else laid out: takes note of a fused layout
        that is there already, and writes nothing.

        Returns:
            Whether there is one.
        """
        if self._refusal() or not self._parts.detect():
            return False
        self._prepare()  # a reader of shared weights never runs post_load_weights()
        return True

    @property
    def is_fused(self) -> bool:
        """Whether both Parameters are views of the fused weight now. About two microseconds, on the host alone."""
        return not self._parts.broken()

    def release(self) -> None:
        """Gives both Parameters storage of their own again.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        self._parts.release()

    def _refusal(self) -> str:
        """Why the weights should not be fused here; empty if they should."""
        if self.projection_mode != "bf16":
            return f"projection mode {self.projection_mode}"
        why = self._parts.refusal()
        if why:
            return why
        weight = self._parts.linears[0].weight
        return self._no_op(weight.device, weight.shape[1])[1]

    def _prepare(self) -> None:
        fused = self._fused()
        op, _ = choose(fused.device, fused.shape[1], self.op)
        if op is not None:
            op.prepare(fused.device, (fused.shape[0], *(linear.weight.shape[0] for linear in self._parts.linears)))

    def _no_op(self, device: torch.device, k: int) -> tuple[TinyGemmOp | None, str]:
        policy = self._policy if self._policy is not None else Policy.current()
        why = policy.refusal(device)
        return (None, why) if why else choose(device, k, self.op)

    def _fused(self) -> torch.Tensor:
        fused = self._parts.weight
        assert fused is not None
        return fused

    # -- use -----------------------------------------------------------------------------------------------------------

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both projections of ``hidden[M, K]``, as ``([M, Nq], [M, Nkv])``.

        Both results are dense, for one token too (then they are disjoint parts of one allocation). BF16 on the device
        of ``hidden`` where tinygemm2 runs, else what the Linears give. Never waits, and allocates the results only.

        Raises:
            ValueError: ``hidden`` has another K than the fused weights. The Linears raise what they raise.
        """
        if torch.compiler.is_compiling():
            return self._traced(hidden)
        path, _, op = self._decide(hidden)
        q, kv = self._parts.linears
        if op is None or path is Path.LINEAR:
            return q(hidden), kv(hidden)
        if path is Path.FUSED:
            flat = op(hidden, self._fused()).view(-1)
            columns = q.weight.shape[0]
            return flat[:columns].view(1, columns), flat[columns:].view(1, -1)
        return op(hidden, q.weight), op(hidden, kv.weight)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`project`."""
        return self.project(hidden)

    def explain(self, hidden: torch.Tensor) -> tuple[Path, str]:
        """The path that :meth:`project` takes for ``hidden``, and why: the first condition that does not hold, or the
        op that runs."""
        path, why, op = self._decide(hidden)
        if op is not None:
            return path, f"{op.name} tinygemm2"
        return path, why + self._why_not_fused() if why == self._parts.broken() else why

    def launches(self, hidden: torch.Tensor) -> tuple[Launch, ...]:
        """What :meth:`project` would hand to the op, in order; nothing on the Linear path."""
        path, _, _ = self._decide(hidden)
        if path is Path.FUSED:
            return (Launch("wq_a and wkv", self._fused()),)
        if path is Path.SEPARATE:
            pairs = zip(self._parts.names, self._parts.linears, strict=True)
            return tuple(Launch(name, linear.weight) for name, linear in pairs)
        return ()

    def _decide(self, hidden: torch.Tensor) -> tuple[Path, str, TinyGemmOp | None]:
        """The first condition that fails decides. The op is there unless the path is LINEAR."""
        linear, parts = Path.LINEAR, self._parts
        if self.projection_mode != "bf16":
            return linear, f"projection mode {self.projection_mode}", None
        if type(hidden) is not torch.Tensor or hidden.is_meta:
            what = "a meta tensor" if type(hidden) is torch.Tensor else f"a {type(hidden).__name__}"
            return linear, f"hidden is {what}", None
        if torch.is_grad_enabled() and (hidden.requires_grad or any(_is_trained(part) for part in parts.linears)):
            return linear, "a gradient is needed", None
        if hidden.dim() != 2 or hidden.dtype is not torch.bfloat16:
            return linear, f"hidden is {hidden.dtype} {tuple(hidden.shape)}, not torch.bfloat16 [M, K]", None
        tokens, k = hidden.shape
        broken = parts.broken()
        if broken:  # K is the Linears' to check: a packed or quantized weight may have another second dimension
            return linear, broken, None
        fused = self._fused()
        if fused.get_device() != hidden.get_device():
            return linear, f"hidden is on {hidden.device}, the weights are on {fused.device}", None
        if fused.shape[1] != k:
            raise ValueError(f"hidden has K = {k}, the weights have K = {fused.shape[1]}; pass hidden[M, K] of that K")
        if not hidden.is_contiguous() or _misaligned(hidden):
            return linear, f"hidden is not dense, or not {_ALIGNMENT}-byte aligned", None
        if fused.data_ptr() % _ALIGNMENT:
            return linear, f"the weights are not {_ALIGNMENT}-byte aligned", None
        op, why = self._no_op(hidden.device, k)
        if op is None:
            return linear, why, None
        if tokens == 1 and self.fuse_one_token:
            return Path.FUSED, "", op
        if 1 <= tokens <= self.max_tokens:
            return Path.SEPARATE, "", op
        return linear, f"{tokens} tokens, not 1 to {self.max_tokens}", None

    def _why_not_fused(self) -> str:
        """For a report: what the next hook would say."""
        if self._parts.weight is not None:
            return "; post_load_weights() fuses again"
        why = self._refusal()
        return f": {why}" if why else ": post_load_weights() has not run since"

    # -- torch.compile -------------------------------------------------------------------------------------------------

    def _traced(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """While torch traces: addresses are unknown, so custom ops decide when they run. Only where a fused layout
        was in place at some time, and for few tokens; else the Linears, which the compiler knows."""
        q, kv = self._parts.linears
        few = hidden.dim() == 2 and 0 < hidden.shape[0] <= self.max_tokens
        grad = torch.is_grad_enabled() and (hidden.requires_grad or _is_trained(q) or _is_trained(kv))
        if self._parts.weight is None or self.op is not None or grad or not few or hidden.dtype is not torch.bfloat16:
            return q(hidden), kv(hidden)
        if hidden.shape[0] == 1 and self.fuse_one_token:
            flat = torch.ops.fusions.row_projection(hidden, q.weight, kv.weight)
            columns = q.weight.shape[0]
            return flat[:columns].view(1, columns), flat[columns:].view(1, -1)
        return torch.ops.fusions.projection(hidden, q.weight), torch.ops.fusions.projection(hidden, kv.weight)


def _misaligned(hidden: torch.Tensor) -> bool:
    try:
        return hidden.data_ptr() % _ALIGNMENT != 0
    except RuntimeError:  # no memory of its own, as under vmap
        return True


def _is_trained(linear: Any) -> bool:
    return bool(getattr(getattr(linear, "weight", None), "requires_grad", False))


@torch.library.custom_op("fusions::projection", mutates_args=())
def _projection(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden weight^T`` through tinygemm2 where it can be, else as a Linear gives it."""
    op = choose(hidden.device, hidden.shape[1])[0] if _fits(hidden, weight) else None
    return op(hidden, weight) if op is not None else torch.nn.functional.linear(hidden, weight)


@_projection.register_fake
def _(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden.new_empty((hidden.shape[0], weight.shape[0]))


@torch.library.custom_op("fusions::row_projection", mutates_args=())
def _row_projection(hidden: torch.Tensor, wq_a: torch.Tensor, wkv: torch.Tensor) -> torch.Tensor:
    """Both projections of ``hidden[1, K]`` as one ``[Nq + Nkv]``: a custom op may not return two tensors that share
    memory. One GEMM if the weights are rows of one tensor when it runs."""
    rows, k = wq_a.shape[0] + wkv.shape[0], hidden.shape[1]
    behind = wkv.data_ptr() - wq_a.data_ptr() == wq_a.numel() * wq_a.itemsize
    one = behind and wq_a.untyped_storage().data_ptr() == wkv.untyped_storage().data_ptr()
    if one and _fits(hidden, wq_a) and _fits(hidden, wkv):
        op, _ = choose(hidden.device, k)
        if op is not None:
            return op(hidden, wq_a.as_strided((rows, k), (k, 1))).view(-1)
    return torch.cat([torch.nn.functional.linear(hidden, weight).view(-1) for weight in (wq_a, wkv)])


@_row_projection.register_fake
def _(hidden: torch.Tensor, wq_a: torch.Tensor, wkv: torch.Tensor) -> torch.Tensor:
    return hidden.new_empty(wq_a.shape[0] + wkv.shape[0])


def _fits(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether an op takes these. The weight may have been replaced since the fusion by one that no op takes."""
    return (hidden.device, hidden.shape[1], weight.shape[0] % 16) == (weight.device, weight.shape[1], 0) and not any(
        tensor.dtype is not torch.bfloat16 or not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT
        for tensor in (hidden, weight)
    )
