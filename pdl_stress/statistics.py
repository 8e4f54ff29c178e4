"""Exact bounds on probabilities from counts of replays: what a clean run is worth, and what a caught control is worth.

Everything here is about *n* independent replays (or processes, or graph launches: the unit is the caller's choice and
must be independent enough) of which *k* showed the event. All bounds are one-sided and exact (Clopper and Pearson,
Biometrika 26, 1934): their coverage is never below the stated confidence, whatever the true rate, unlike the normal
or Wilson approximations, which fail at the very rates that matter here (k = 0, or n in the billions).

The incomplete beta function and the root search come from scipy, a kept and tested library. Its *inverse*
(``betaincinv``, also behind ``scipy.stats.beta.ppf``) is not used: in scipy 1.17 it is wrong by a factor of 2.6 for a
shape parameter of exactly 1000 and some n near 1e9, so that 1000 kills would put the *lower* bound above the rate seen;
elsewhere at such n it is good to 1e-8 only. The bounds here are solved from the forward function. No CUDA, no torch.
"""

from __future__ import annotations

import math

from scipy import optimize, special

MIN_KILLS = 18
"""Fewest kills for which a must-catch control counts as caught.

It is the smallest count that supports five nines: after 18 kills the next run of equal size shows at least one with
probability 0.99999114 (:func:`reproducibility`, 95 % lower bound on the rate, in the limit of large ``n``; larger for
every finite ``n``). 17 kills give 0.99998025, 12 (a usual gate) 0.99902, 3 give 0.559. So a control with 18 kills that
shows none in the next run is news about the machine, not bad luck.
"""


def upper_bound(n: int, k: int = 0, confidence: float = 0.95) -> float:
    """Return the one-sided upper bound on the probability of an event seen ``k`` times in ``n`` trials.

    For ``k = 0`` this is ``1 - (1 - confidence) ** (1 / n)``: the rate at which ``n`` clean trials would still happen
    with probability ``1 - confidence``. For ``k = n`` it is 1. Else it is the rate at which ``k`` or fewer events have
    probability ``1 - confidence``: the ``confidence`` quantile of Beta(k + 1, n - k). A probability, no unit.

    Raises:
        ValueError: ``n < 1``, ``k`` outside 0 to ``n``, or ``confidence`` outside (0, 1).
    """
    _check(n, k, confidence)
    if k == n:
        return 1.0
    if k == 0:
        # expm1: 1 - x**(1/n) loses every digit once 1/n nears the rounding unit.
        return -math.expm1(math.log1p(-confidence) / n)
    return _beta_quantile(confidence, k + 1, n - k, start=k / n)


def lower_bound(k: int, n: int, confidence: float = 0.95) -> float:
    """Return the one-sided lower bound on the probability of an event seen ``k`` times in ``n`` trials.

    For ``k = 0`` it is 0, for ``k = n`` it is ``(1 - confidence) ** (1 / n)``, else the ``1 - confidence`` quantile of
    Beta(k, n - k + 1). A probability, no unit.

    Raises:
        ValueError: as :func:`upper_bound`.
    """
    _check(n, k, confidence)
    if k == 0:
        return 0.0
    if k == n:
        return math.exp(math.log1p(-confidence) / n)
    return _beta_quantile(1.0 - confidence, k, n - k + 1, start=k / n)


def reproducibility(k: int, n: int, confidence: float = 0.95) -> float:
    """Return the chance of at least one kill in the next ``n`` replays, after ``k`` kills in ``n``.

    It takes the lower bound on the kill rate (at ``confidence``), not the rate seen, so a lucky run does not flatter:
    ``1 - (1 - lower_bound(k, n)) ** n``. Zero for ``k = 0``. For a given ``k`` it falls as ``n`` grows, towards
    0.05 for 1 kill, 0.559 for 3, 0.99902 for 12 and 0.99999114 for 18: see :data:`MIN_KILLS`.

    It assumes a fixed ``n`` (chosen before the run: stopping at the k-th kill biases it) and independent trials;
    replays of one process are not fully independent.

    Raises:
        ValueError: as :func:`upper_bound`.
    """
    return power(lower_bound(k, n, confidence), n)


def power(rate: float, n: int) -> float:
    """Return the chance that ``n`` replays show an event of probability ``rate`` at least once.

    That is ``1 - (1 - rate) ** n``, computed so that small rates lose no digits.

    Raises:
        ValueError: ``rate`` outside 0 to 1 or not a number, or ``n < 1``.
    """
    _check_trials(n)
    if not 0.0 <= rate <= 1.0:  # also catches NaN, which compares false
        raise ValueError(f"rate is {rate!r}: expected a probability from 0 to 1; give kills / replays, not percent")
    if rate == 1.0:
        return 1.0
    return -math.expm1(n * math.log1p(-rate))


def _beta_quantile(probability: float, a: int, b: int, start: float) -> float:
    """Solve I_x(a, b) = probability for x, which grows with x from 0 to 1. ``start``: near the answer, in (0, 1)."""

    def excess(x: float) -> float:
        return float(special.betainc(a, b, x)) - probability

    # A bracket grown from nearby: from [0, 1], an answer of 1e-9 would take the search dozens of halvings more.
    low = high = start
    while excess(high) < 0.0:
        high = 2.0 * high if high < 0.5 else (1.0 + high) / 2.0
    while excess(low) > 0.0:
        low /= 2.0
    if low == high:
        return low
    # The tolerance must be relative: the default, 2e-12 absolute, is larger than some answers.
    return float(optimize.brentq(excess, low, high, xtol=1e-300, rtol=1e-14, maxiter=500))


def _check(n: int, k: int, confidence: float) -> None:
    _check_trials(n)
    if k < 0:
        raise ValueError(f"k is {k}: expected a count of events from 0 to n = {n}; a counter must not be negative")
    if k > n:
        raise ValueError(f"k is {k} of n = {n}: expected k <= n; check that both counters cover the same replays")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence!r}: expected a number between 0 and 1; write 95 % as 0.95")


def _check_trials(n: int) -> None:
    if n < 1:
        raise ValueError(f"n is {n}: expected at least 1 trial; without a graded replay there is no bound to give")
