"""The adaptive weight of the KL penalty against numbers worked out by hand."""

from __future__ import annotations

import pytest

from mrlhf.trainer.kl_control import AdaptiveKL


def test_the_coefficient_follows_the_error_within_its_limits() -> None:
    control = AdaptiveKL(0.2, target=6.0, horizon=1000)
    control.update(6.6, 100)  # 10% over the target: up by 10% of 100 / 1000
    assert control.kl_coef == pytest.approx(0.2 * 1.01, rel=1e-12)
    control.update(60.0, 100)  # far over: as if 20%
    assert control.kl_coef == pytest.approx(0.2 * 1.01 * 1.02, rel=1e-12)
    control.update(0.0, 50)  # far under
    assert control.kl_coef == pytest.approx(0.2 * 1.01 * 1.02 * 0.99, rel=1e-12)
    control.update(6.0, 10**6)
    assert control.kl_coef == pytest.approx(0.2 * 1.01 * 1.02 * 0.99, rel=1e-12)


def test_it_goes_on_from_its_state() -> None:
    first, second = AdaptiveKL(0.2, target=6.0, horizon=1000), AdaptiveKL(0.5, target=6.0, horizon=1000)
    first.update(9.0, 100)
    second.load_state_dict(first.state_dict())
    for control in (first, second):
        control.update(3.0, 100)
    assert first.kl_coef == second.kl_coef == pytest.approx(0.2 * 1.02 * 0.98, rel=1e-12)


def test_a_kl_that_is_not_finite_changes_nothing() -> None:
    control = AdaptiveKL(0.1, target=1.0, horizon=100)
    for kl in (float("nan"), float("inf")):
        control.update(kl, 50)
    assert control.kl_coef == 0.1
