"""Exceptions of pdl_stress. Each says what was wrong, what was expected and what to do next."""

from __future__ import annotations


class PdlStressError(Exception):
    """Base of every error that this package raises on purpose."""


class UsageError(PdlStressError):
    """The request cannot be carried out as written: an unknown name, a bad number, a malformed chain.

    Nothing ran. Correct the request and repeat it (exit code 2).
    """


class DeviceError(PdlStressError):
    """The GPU, its driver or its toolchain failed or cannot be used.

    No verdict can be given: the outcome is ERROR, never a model run in its place (exit code 3).
    """


class UnsupportedVariant(PdlStressError):
    """An operation cannot be rebuilt to the contract that a control or an arm asks for.

    Such a control is not planned at all: it is never counted as clean or caught, and a data edge that no control
    covers makes the verdict INCONCLUSIVE.
    """
