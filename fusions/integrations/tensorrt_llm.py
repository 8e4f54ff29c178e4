"""Installs the fused projections into TensorRT-LLM's modules, one instance at a time. Never imports it.

**This has not met a real TensorRT-LLM.** It was written from descriptions and tested on stand-ins; whether upstream's
methods have a known form is asked of a table (:data:`KNOWN_FORMS`) that holds only the stand-ins'. With a real install,
expect :class:`UnknownForm`, whose message is the patch to apply by hand, or pass ``force=True``.

How the projections get into upstream's method: the method's own source is taken, the calls in it are replaced by one to
our projection, and the result is bound to the instance in the class's place. Both results of a call are local variables
of the method. The other ways were ruled out:

- *A slot* that the first call fills and the second empties would have to tell that both see the same hidden states.
  Under ``inference_mode``, where upstream runs, tensors have no version to tell it by, and addresses are reused; an
  exception in between, a second thread or a re-entrant call would leave a slot filled. Local variables cannot go stale,
  and captured in a CUDA graph they are what a hand-written method is.
- *Proxies* for the two children would change the keys of ``state_dict`` or hide ``weight`` from whoever loads it; a
  ``forward`` bound on a child would be called by others too.

While nothing is fused (weights not loaded, quantized, split over ranks, removed, replaced, or children that are no
Linears) the same Linears are called as before. All hooks may run any number of times, in any order.
"""

from __future__ import annotations

from fusions.integrations.csa2 import install_csa2
from fusions.integrations.equality import Different
from fusions.integrations.forms import KNOWN_FORMS, UnknownForm
from fusions.integrations.indexer import install_indexer
from fusions.integrations.instance import uninstall
from fusions.integrations.qkv_a import install_qkv_a

__all__ = [
    "KNOWN_FORMS",
    "Different",
    "UnknownForm",
    "install_csa2",
    "install_indexer",
    "install_qkv_a",
    "uninstall",
]
