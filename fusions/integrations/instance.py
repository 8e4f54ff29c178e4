"""What was changed on one module, and how to undo it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from fusions.capturing import refuse_capture

RECORD = "_fusions"
"""The attribute of a module that holds its :class:`Installation`."""


class _Absent:
    """Stands for an attribute that the instance did not have itself. A class, so that copies stay the same object."""


class Installation:
    """The base of what can be installed on a module. Lives in the module's ``__dict__``, and so does all that it puts
    there; nothing is changed on a class. ``copy.deepcopy`` of the module copies it too. A pickled module comes back
    with its original methods, and can be uninstalled.

    Args:
        module: the instance.
        options: what the installing function was given, for telling two installations apart.
    """

    kind: ClassVar[str] = ""

    def __init__(self, module: Any, options: Mapping[str, Any]) -> None:
        self.module, self.options = module, dict(options)
        self._saved: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        """Sets an attribute of the instance, past ``nn.Module.__setattr__``."""
        own = vars(self.module)
        self._saved.setdefault(name, own.get(name, _Absent))
        own[name] = value

    def original(self, name: str) -> Callable[..., Any] | None:
        """The bound method that was there before; ``None`` if there was none."""
        saved = self._saved.get(name, _Absent)
        if saved is not _Absent:
            return saved if callable(saved) else None
        value = getattr(type(self.module), name, None)
        return functools.partial(value, self.module) if callable(value) else None

    def put_hook(self, name: str) -> None:
        """Makes ``module.name()`` call :meth:`run_hook`."""
        self.put(name, functools.partial(_run_hook, self.module, name))

    def run_hook(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The original hook, if there is one, and then our part. Returns what the original returns, or else whether
        the fused layout is in place."""
        original = self.original(name)
        result = None if original is None else original(*args, **kwargs)
        done = self.loaded(name)
        return done if original is None else result

    def loaded(self, hook: str) -> bool:
        """Weights were loaded, says this hook. Returns whether the fused layout is in place now."""
        raise NotImplementedError

    def release(self) -> None:
        """Gives weights storage of their own, in the shapes that they had."""
        raise NotImplementedError

    def undo(self) -> None:
        """Leaves the module as it was."""
        self.release()
        own = vars(self.module)
        for name, value in self._saved.items():
            if value is _Absent:
                own.pop(name, None)
            else:
                own[name] = value
        self._saved.clear()


def installed(module: Any) -> Installation | None:
    """What is installed on this very instance."""
    found = vars(module).get(RECORD)
    return found if isinstance(found, Installation) else None


def uninstall(module: Any) -> bool:
    """Takes back what an ``install_`` function did to this module: methods, attributes, and Parameters with storage of
    their own, the same objects as before. Captured graphs still read the fused weight: capture them anew.

    Returns:
        Whether anything was installed.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    refuse_capture("uninstall()")
    found = installed(module)
    if found is None:
        return False
    found.undo()
    return True


def _run_hook(module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    refuse_capture(f"{name}()")
    found = installed(module)
    assert found is not None
    return found.run_hook(name, *args, **kwargs)
