"""Coefficients of the uniform (Debye) expansion of the modified Bessel function for large order.

With ``p = 1 / sqrt(1 + z^2)`` (Olver; NIST DLMF 10.41(ii)),

    I_m(m z) ~ exp(m eta) / (sqrt(2 pi m) (1 + z^2)^(1/4)) * sum_k U_k(p) / m^k.

Two derived series are used: ``log sum_k U_k / m^k``, and ``G`` in ``I_(m+1)(m z) / I_m(m z) = z / (1 + w) - z p^2 G``
with ``w = 1 / p``. In ``G = (V - U) / U / (-z^2 p^2)`` (``V``: DLMF 10.41.9) the difference that would cancel for small
z is formed exactly: all polynomials have exact fractions as coefficients until the order m is inserted.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

__all__ = ["START_ORDER", "debye_polynomials"]

# Measured with mpmath: with 12 terms the truncation error of ratio and logarithm is below 3e-16 for every order >= 24.
START_ORDER = 24
_TERMS = 12

_Poly = list[Fraction]


def _add(*polys: _Poly) -> _Poly:
    length = max(len(p) for p in polys)
    return [sum((p[i] for p in polys if i < len(p)), Fraction(0)) for i in range(length)]


def _scale(poly: _Poly, factor: Fraction) -> _Poly:
    return [c * factor for c in poly]


def _mul(left: _Poly, right: _Poly) -> _Poly:
    out = [Fraction(0)] * (len(left) + len(right) - 1)
    for i, a in enumerate(left):
        if a:
            for j, b in enumerate(right):
                out[i + j] += a * b
    return out


def _derivative(poly: _Poly) -> _Poly:
    return [i * c for i, c in enumerate(poly)][1:] or [Fraction(0)]


def _integral(poly: _Poly) -> _Poly:
    return [Fraction(0), *(c / (i + 1) for i, c in enumerate(poly))]


def _fractions(*coefficients: int) -> _Poly:
    return [Fraction(c) for c in coefficients]


@lru_cache(maxsize=1)
def _series() -> tuple[list[_Poly], list[_Poly]]:
    """Return the coefficients of the powers 1 to ``_TERMS`` of 1/m in ``log sum_k U_k / m^k`` and in ``G``."""
    u = [_fractions(1)]
    for _ in range(_TERMS):  # DLMF 10.41.9
        step = _scale(_mul(_fractions(0, 0, 1, 0, -1), _derivative(u[-1])), Fraction(1, 2))
        u.append(_add(step, _scale(_integral(_mul(_fractions(1, 0, -5), u[-1])), Fraction(1, 8))))
    log: list[_Poly] = []
    ratio: list[_Poly] = []
    for k in range(1, _TERMS + 1):
        log.append(_add(u[k], *(_scale(_mul(log[j - 1], u[k - j]), Fraction(-j, k)) for j in range(1, k))))
        numerator = _add(_scale(u[k - 1], Fraction(1, 2)), [Fraction(0), *_derivative(u[k - 1])])  # V - U there
        ratio.append(_add(numerator, *(_scale(_mul(u[j], ratio[k - j - 1]), Fraction(-1)) for j in range(1, k))))
    return log, ratio


@lru_cache(maxsize=64)
def debye_polynomials(twice_order: int) -> tuple[tuple[float, ...], ...]:
    """Return polynomials in p at a fixed order m = ``twice_order / 2``.

    Args:
        twice_order: 2 m, at least ``2 * START_ORDER``.

    Returns:
        Ascending coefficients of four polynomials: ``log sum_k U_k(p)/m^k`` minus its value at p = 1; ``G``;
        ``H = d(z p^2 G)/dz``, which is a polynomial in p; and ``dH/dp``.
    """
    inverse = Fraction(2, twice_order)
    log_terms, ratio_terms = _series()
    log = _add(*(_scale(t, inverse ** (k + 1)) for k, t in enumerate(log_terms)))
    log[0] -= sum(log)
    g = _add(*(_scale(t, inverse ** (k + 1)) for k, t in enumerate(ratio_terms)))
    # dz p^2 G/dz with dp/dz = -z p^3 and z^2 p^2 = 1 - p^2
    h = _add(_mul(_fractions(0, 0, -1, 0, 2), g), _mul(_fractions(0, 0, 0, -1, 0, 1), _derivative(g)))
    return tuple(tuple(float(c) for c in poly) for poly in (log, g, h, _derivative(h)))
