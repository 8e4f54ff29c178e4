"""Everything that touches the CUDA driver.

Modules in here import torch, ``cuda.core`` and ``cuda.bindings`` inside functions only, so that importing them works
where there is no driver and no GPU; the rest of the package (model, audit, statistics, verdict, report) needs none.
"""
