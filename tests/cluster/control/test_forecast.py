"""Forecasts, by hand and on series whose future is known."""

import math

import pytest

from diptych.cluster.control.forecast import HOUR_S, Forecast, Holt, HoursOfDay


def test_two_looks_by_hand() -> None:
    holt = Holt()
    holt.see(10.0)
    assert holt.ahead(5) == 10.0
    holt.see(20.0)
    # level 0.2·20 + 0.8·10, trend 0.1·(12 - 10)
    assert (holt.level, holt.trend) == (pytest.approx(12.0), pytest.approx(0.2))
    assert holt.ahead(1) == pytest.approx(12 + 0.95 * 0.2)
    assert holt.ahead(2) == pytest.approx(12 + (0.95 + 0.95**2) * 0.2)


def test_a_steady_rate_is_expected_to_stay() -> None:
    holt = Holt()
    for _ in range(50):
        holt.see(7.0)
    assert holt.ahead(1000) == pytest.approx(7.0)


def test_a_rising_rate_is_expected_to_rise_but_not_for_ever() -> None:
    holt = Holt()
    for i in range(200):
        holt.see(float(i))
    assert 199 < holt.ahead(10) < holt.ahead(20) < holt.ahead(1e6) < 260


def test_a_falling_rate_ends_at_0() -> None:
    holt = Holt()
    for i in range(100):
        holt.see(max(50.0 - i, 0.0))
    assert holt.ahead(100) == pytest.approx(0.0, abs=0.1)


def test_hours_count_once_a_day_is_known() -> None:
    hours = HoursOfDay()
    for hour in range(24):
        assert hours.factor(0.0) == 1.0
        for _ in range(600):
            hours.see(hour * HOUR_S, 100.0 if hour == 9 else 50.0)
    mean = (100 + 23 * 50) / 24
    assert hours.factor(9.5 * HOUR_S) == pytest.approx(100 / mean)
    assert hours.factor(33.5 * HOUR_S) == hours.factor(9.5 * HOUR_S), "the next day"


def test_the_rush_hour_is_seen_before_it_comes() -> None:
    forecast = Forecast()
    for second in range(0, 2 * 24 * 3600, 5):
        hour = second // 3600 % 24
        forecast.see(second % 86400, 100.0 if hour in (9, 10) else 20.0)
    for second in range(0, 9 * 3600 - 10, 5):
        forecast.see(second, 20.0)
    assert forecast.ahead(1) == pytest.approx(20.0, rel=0.1)
    assert forecast.ahead(60) == pytest.approx(100.0, rel=0.1)
    assert math.isfinite(forecast.ahead(1e5))


def test_the_rush_hour_is_expected_to_last_when_it_has_come() -> None:
    """The level is that of all hours: it does not have to be learnt anew at each change."""
    forecast = Forecast()
    for second in range(0, 2 * 24 * 3600, 5):
        forecast.see(second % 86400, 100.0 if second // 3600 % 24 == 9 else 20.0)
    for second in range(0, 9 * 3600 + 10, 5):
        forecast.see(second, 100.0 if second >= 9 * 3600 else 20.0)
    assert forecast.ahead(60) == pytest.approx(100.0, rel=0.1)


def test_a_request_in_an_hour_that_is_usually_empty_does_not_promise_a_flood() -> None:
    forecast = Forecast()
    for second in range(0, 24 * 3600, 5):
        forecast.see(second, 0.0 if second < 3600 else 50.0)
    for second in range(3500, 3600):
        forecast.see(second, 1.0)
    assert forecast.ahead(60) <= 15.0
