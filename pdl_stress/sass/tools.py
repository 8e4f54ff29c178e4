"""NVIDIA's binary tools (nvdisasm, cuobjdump): where they are. They read files and need no driver."""

from __future__ import annotations

import shutil

WHEELS = {"nvdisasm": "nvidia-cuda-nvdisasm", "cuobjdump": "nvidia-cuda-cuobjdump"}


def find_tool(name: str) -> str | None:
    """Return the path of one of NVIDIA's binary tools: from its wheel, a CUDA toolkit, or the PATH; None if nowhere."""
    try:
        from cuda.pathfinder import find_nvidia_binary_utility

        found = find_nvidia_binary_utility(name)
    except (ImportError, AttributeError, RuntimeError):  # no or an old pathfinder, or a tool that it does not know
        found = None
    return found or shutil.which(name)
