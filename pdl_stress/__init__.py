"""Is a chain of CUDA kernels ordered under Programmatic Dependent Launch, and could the test have told?

::

    from pdl_stress import Chain, op, stress

Start with :class:`Chain`, :func:`op` (the contract of a kernel) and :func:`stress`; the command line is ``pdl-stress``.
"""

from ._version import __version__
from .api import Verdict, stress
from .buffers import Buffer
from .chain import Chain, DataEdge, Patch, Step
from .checking import check
from .contract import KernelContract, Trigger, Wait
from .cuda.launching import CudaKernel, cubin_kernel, cuda_kernel
from .errors import DeviceError, PdlStressError, UnsupportedVariant, UsageError
from .op import Op, op
from .outcome import Outcome
from .schema import op_from_schema
from .subjects import Subject, subject

__all__ = [
    "Buffer",
    "Chain",
    "CudaKernel",
    "DataEdge",
    "DeviceError",
    "KernelContract",
    "Op",
    "Outcome",
    "Patch",
    "PdlStressError",
    "Step",
    "Subject",
    "Trigger",
    "UnsupportedVariant",
    "UsageError",
    "Verdict",
    "Wait",
    "__version__",
    "check",
    "cubin_kernel",
    "cuda_kernel",
    "op",
    "op_from_schema",
    "stress",
    "subject",
]
