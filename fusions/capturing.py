"""Whether a CUDA graph is being captured: weights must not be moved then."""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    """True if the current stream is capturing. Without CUDA nothing is."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def refuse_capture(what: str) -> None:
    """Raises RuntimeError if the current stream is capturing."""
    if is_capturing():
        raise RuntimeError(
            f"{what} while a CUDA graph is being captured: it moves weights, and the graph would record that; call it "
            "before the capture, once the weights are loaded"
        )
