"""Kernels from source and from files, as far as no GPU is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdl_stress import UsageError, cubin_kernel, cuda_kernel
from pdl_stress.cuda import launching, toolchain


def test_arguments_become_what_a_kernel_takes() -> None:
    tensor = torch.zeros(3)
    found = [launching._argument(value) for value in (tensor, True, 3, 0.5, np.uint64(7))]
    assert found[0] == tensor.data_ptr()
    assert [type(value) for value in found[1:]] == [np.bool_, np.int32, np.float32, np.uint64]
    with pytest.raises(UsageError, match="'text' cannot be an argument"):
        launching._argument("text")


def test_a_kernel_that_is_not_there_is_said_before_anything_is_launched(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the source has no 'scale'"):
        cuda_kernel('extern "C" __global__ void other() {}', "scale")
    with pytest.raises(UsageError, match="is no file"):
        cubin_kernel(tmp_path / "none.cubin", "k")
    assert cuda_kernel('extern "C" __global__ void k() {}', "k").name == "k"


@pytest.mark.parametrize(
    ("version", "folder", "wanted"),
    [
        ("13.3", "/toolkit/include", {"use_bundled_headers": True}),
        ("14.0", None, {"use_bundled_headers": True}),
        ("13.0", "/toolkit/include", {"include_path": ["/toolkit/include"]}),
        ("12.9", None, {}),
        (None, None, {}),
    ],
)
def test_headers_come_from_nvrtc_or_from_a_toolkit(
    version: str | None, folder: str | None, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda import pathfinder

    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: version)
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: folder)
    assert launching._headers() == wanted
