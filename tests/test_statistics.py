"""The bounds are what verdicts quote, so they are checked against closed forms, laws, and their own definition."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import special, stats

from pdl_stress.statistics import MIN_KILLS, lower_bound, power, reproducibility, upper_bound

CONFIDENCES = st.floats(0.5, 0.9999)
RELATIVE = 1e-9


@st.composite
def counts(draw: st.DrawFn, largest: int = 10**9) -> tuple[int, int]:
    """``(k, n)`` with 0 <= k <= n, the ends and small k drawn often: that is where runs end up."""
    n = draw(st.one_of(st.integers(1, 50), st.integers(1, largest)))
    k = draw(st.one_of(st.just(0), st.just(n), st.integers(0, min(n, 50)), st.integers(0, n)))
    return k, n


# --- closed forms ---------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 10**12), confidence=CONFIDENCES)
def test_no_event_has_the_closed_form(n: int, confidence: float) -> None:
    assert upper_bound(n, 0, confidence) == pytest.approx(-math.expm1(math.log(1 - confidence) / n), rel=RELATIVE)
    assert lower_bound(0, n, confidence) == 0.0


@given(n=st.integers(1, 10**12), confidence=CONFIDENCES)
def test_all_events_mirror_none(n: int, confidence: float) -> None:
    assert upper_bound(n, n, confidence) == 1.0
    assert lower_bound(n, n, confidence) == pytest.approx((1 - confidence) ** (1 / n), rel=RELATIVE)


@pytest.mark.parametrize(
    ("n", "expected"),
    [(1, 0.95), (20_000, 1.4978e-4), (60_000, 4.9928e-5), (10**9, 2.9957e-9), (10**15, 2.9957e-15)],
)
def test_clean_run_figures(n: int, expected: float) -> None:
    assert upper_bound(n) == pytest.approx(expected, rel=1e-4)
    assert upper_bound(n) == upper_bound(n, k=0, confidence=0.95)


def test_tabled_clopper_pearson_figures() -> None:
    """A two-sided 95 % interval is two one-sided bounds at 97.5 %; 2 of 20 and 5 of 10 are tabled in textbooks."""
    assert lower_bound(2, 20, 0.975) == pytest.approx(0.0123485, abs=5e-7)
    assert upper_bound(20, 2, 0.975) == pytest.approx(0.3169827, abs=5e-7)
    assert lower_bound(5, 10, 0.975) == pytest.approx(0.1870860, abs=5e-7)
    assert upper_bound(10, 5, 0.975) == pytest.approx(0.8129140, abs=5e-7)


# --- laws -----------------------------------------------------------------------------------------------------------


@given(counts(), CONFIDENCES)
def test_bounds_bracket_the_rate_seen(kn: tuple[int, int], confidence: float) -> None:
    k, n = kn
    assert 0.0 <= lower_bound(k, n, confidence) <= k / n * (1 + RELATIVE)
    assert k / n * (1 - RELATIVE) <= upper_bound(n, k, confidence) <= 1.0


@given(counts(), CONFIDENCES)
def test_more_trials_without_more_events_lower_both(kn: tuple[int, int], confidence: float) -> None:
    k, n = kn
    assert upper_bound(n + 1, k, confidence) <= upper_bound(n, k, confidence) * (1 + RELATIVE)
    assert lower_bound(k, n + 1, confidence) <= lower_bound(k, n, confidence) * (1 + RELATIVE)


@given(counts(), CONFIDENCES)
def test_more_events_raise_both(kn: tuple[int, int], confidence: float) -> None:
    k, n = kn
    assume(k < n)
    assert upper_bound(n, k, confidence) <= upper_bound(n, k + 1, confidence) * (1 + RELATIVE)
    assert lower_bound(k, n, confidence) <= lower_bound(k + 1, n, confidence) * (1 + RELATIVE)


@given(counts(), CONFIDENCES, CONFIDENCES)
def test_more_confidence_widens(kn: tuple[int, int], one: float, other: float) -> None:
    k, n = kn
    less, more = sorted((one, other))
    assert upper_bound(n, k, less) <= upper_bound(n, k, more) * (1 + RELATIVE)
    assert lower_bound(k, n, more) <= lower_bound(k, n, less) * (1 + RELATIVE)


@given(counts(largest=10**6), CONFIDENCES)
def test_lower_and_upper_are_mirror_images(kn: tuple[int, int], confidence: float) -> None:
    """Counting the misses instead of the events turns one bound into the other."""
    k, n = kn
    assert lower_bound(k, n, confidence) == pytest.approx(1.0 - upper_bound(n, n - k, confidence), abs=1e-9)


@given(counts(), CONFIDENCES)
def test_bounds_solve_their_definition(kn: tuple[int, int], confidence: float) -> None:
    """At the upper bound, k or fewer events have probability 1 - confidence; at the lower bound, k or more have."""
    k, n = kn
    assume(0 < k < n)
    tail = pytest.approx(1 - confidence, rel=1e-5)
    assert stats.binom.cdf(k, n, upper_bound(n, k, confidence)) == tail
    assert stats.binom.sf(k - 1, n, lower_bound(k, n, confidence)) == tail


@given(st.integers(10**9, 10**12), st.one_of(st.integers(1, 60), st.integers(990, 1010), st.integers(1, 3000)))
def test_rare_events_follow_poisson(n: int, k: int) -> None:
    """Another road to the same number: with n far above k the count is Poisson, whose bounds are gamma quantiles."""
    assert upper_bound(n, k) * n == pytest.approx(special.gammaincinv(k + 1, 0.95), rel=1e-5)
    assert lower_bound(k, n) * n == pytest.approx(special.gammaincinv(k, 0.05), rel=1e-5)


@pytest.mark.parametrize("k", [999, 1000])
@pytest.mark.parametrize("n", [686_080_511, 30_053_545_819])
@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95])
def test_a_thousand_events_do_not_meet_the_fault_of_scipys_inverse(n: int, k: int, confidence: float) -> None:
    """scipy 1.17's betaincinv answers 2614 / n for either bound on 1000 events."""
    spread = 3 * math.sqrt(k)
    assert k - spread < lower_bound(k, n, confidence) * n < k
    assert k < upper_bound(n, k, confidence) * n < k + spread


# --- coverage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("n", [1, 2, 5, 20, 100])
def test_coverage_is_never_below_nominal(n: int, confidence: float) -> None:
    """Sum, without sampling, the probability of all outcomes whose bound covers the true rate."""
    uppers = [upper_bound(n, k, confidence) for k in range(n + 1)]
    lowers = [lower_bound(k, n, confidence) for k in range(n + 1)]
    grid = {i / 500 for i in range(501)}
    # Coverage is lowest just beyond a bound; beside it, by more than the bounds' own rounding.
    grid |= {min(1.0, bound * (1 + 1e-7)) for bound in uppers} | {bound * (1 - 1e-7) for bound in lowers}
    for rate in grid:
        weight = [math.comb(n, k) * rate**k * (1 - rate) ** (n - k) for k in range(n + 1)]
        covered_above = math.fsum(w for w, bound in zip(weight, uppers, strict=True) if rate <= bound)
        covered_below = math.fsum(w for w, bound in zip(weight, lowers, strict=True) if rate >= bound)
        assert covered_above >= confidence - 1e-6, rate
        assert covered_below >= confidence - 1e-6, rate


@pytest.mark.parametrize("n", [5, 20])
def test_coverage_is_not_idle(n: int) -> None:
    """A bound of 1 would cover always. Just beyond the bound for k = 0, the miss has its full probability of 5 %."""
    rate = upper_bound(n) * (1 + 1e-9)
    assert (1 - rate) ** n == pytest.approx(0.05, rel=1e-6)


# --- controls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "expected"), [(0, 0.0), (1, 0.05), (3, 0.5585504), (12, 0.99901632), (17, 0.99998025), (18, 0.99999114)]
)
def test_reproducibility_in_the_limit_of_large_n(k: int, expected: float) -> None:
    assert reproducibility(k, 10**12) == pytest.approx(expected, abs=1e-7)


def test_min_kills_is_the_smallest_count_that_supports_five_nines() -> None:
    assert reproducibility(MIN_KILLS, 10**12) >= 0.99999 > reproducibility(MIN_KILLS - 1, 10**12)
    assert reproducibility(MIN_KILLS, 20_000) >= 0.99999
    assert reproducibility(12, 20_000) == pytest.approx(0.9990, abs=5e-5)


@given(st.integers(1, 60), st.integers(1, 10**6))
def test_reproducibility_falls_with_n_so_the_limit_is_the_promise(k: int, more: int) -> None:
    assert reproducibility(k, k + more) <= reproducibility(k, k + more - 1) + 1e-12
    assert reproducibility(k, k + more) >= reproducibility(k, 10**12) - 1e-9


@given(st.floats(0, 1), st.integers(1, 10**9))
def test_power_is_a_probability_that_grows_with_rate_and_n(rate: float, n: int) -> None:
    assert 0.0 <= power(rate, n) <= 1.0
    assert power(rate, n) <= power(rate, n + 1)
    assert power(rate / 2, n) <= power(rate, n)


@given(st.integers(1, 10**12), CONFIDENCES)
def test_power_undoes_the_clean_bound(n: int, confidence: float) -> None:
    """An event as frequent as the bound of a clean run would have shown with the bound's confidence: its meaning."""
    assert power(upper_bound(n, 0, confidence), n) == pytest.approx(confidence, rel=1e-6)


def test_power_at_the_ends() -> None:
    assert power(0.0, 10**9) == 0.0
    assert power(1.0, 1) == 1.0
    assert power(0.25, 1) == pytest.approx(0.25)
    assert power(1e-12, 10) == pytest.approx(1e-11, rel=1e-9)  # not lost to rounding


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k", "confidence", "said"),
    [
        (0, 0, 0.95, r"n is 0: expected at least 1"),
        (-5, 0, 0.95, r"n is -5: expected at least 1"),
        (10, 11, 0.95, r"k is 11 of n = 10: expected k <= n; check"),
        (10, -1, 0.95, r"k is -1: expected a count"),
        (10, 1, 0.0, r"confidence is 0\.0: expected .* write 95 % as 0\.95"),
        (10, 1, 1.0, r"confidence is 1\.0"),
        (10, 1, 95, r"confidence is 95"),
        (10, 1, math.nan, r"confidence is nan"),
    ],
)
def test_bad_counts_are_refused_with_what_to_do(n: int, k: int, confidence: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        upper_bound(n, k, confidence)
    with pytest.raises(ValueError, match=said):
        lower_bound(k, n, confidence)
    with pytest.raises(ValueError, match=said):
        reproducibility(k, n, confidence)


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan, math.inf])
def test_bad_rate_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="expected a probability from 0 to 1"):
        power(rate, 10)


def test_power_needs_a_trial() -> None:
    with pytest.raises(ValueError, match="n is 0: expected at least 1 trial"):
        power(0.5, 0)
