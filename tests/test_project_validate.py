"""The validation: it says what the model says, no point brings a constant of its own, the fit is what `refit` finds."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from draftkit.project import calibration as c
from draftkit.project import report, validate


@pytest.fixture(scope="module")
def points() -> list[validate.Point]:
    return validate.validate()


def test_every_printed_error_is_that_of_what_was_said(points):
    for point, row in zip(points, validate.rows(points), strict=True):
        assert row[3:6] == [
            f"{point.known:.2f}", f"{point.predicted:.2f}", f"{100 * (point.predicted / point.known - 1):+.0f} %",
        ]  # fmt: skip
        assert point.source.startswith(("[2nd]", "[own]", "[public]"))


def test_the_calibrated_points_are_recomputed_here(points):
    """By hand from plain parts: no path around the model leads to a prediction."""
    for point, observed in zip(points, c.FITTED, strict=False):
        mean = c.mean_length(c.VLLM, c.SETUP, c.PLAIN_S[observed.workload])
        batch = c.SETUP.rollouts(c.VLLM, mean)
        survival = c.even_survival(observed.tau, observed.k)
        assert point.predicted == pytest.approx(batch.seconds() / batch.seconds(observed.k, survival))


def test_no_point_has_a_constant_of_its_own():
    """What is known of a point moves no prediction, its own or another's; its inputs do."""
    assert [field.name for field in fields(c.Observed)] == ["workload", "k", "tau", "speedup"]
    moved = [replace(point, speedup=9.9) for point in c.FITTED]
    assert c.predict(c.VLLM, c.SETUP, moved) == c.predict(c.VLLM, c.SETUP, c.FITTED)
    less = [replace(point, tau=point.tau - 0.3) for point in c.FITTED]
    assert all(
        a < b for a, b in zip(c.predict(c.VLLM, c.SETUP, less), c.predict(c.VLLM, c.SETUP, c.FITTED), strict=True)
    )


def test_every_constant_of_the_engine_moves_the_calibrated_points():
    said = c.predict(c.VLLM, c.SETUP, c.FITTED)
    for name in c.CALIBRATED:
        other = c.predict(replace(c.VLLM, **{name: 2 * getattr(c.VLLM, name)}), c.SETUP, c.FITTED)
        assert max(abs(a / b - 1) for a, b in zip(other, said, strict=True)) > 0.03, name


def test_the_fit_stays_at_the_shipped_host_times_and_finds_what_they_predict_from_afar():
    """The valley is long and flat: other times predict the same, so it is predictions that two fits agree on."""
    stayed = c.refit(rounds=8)
    for name in c.CALIBRATED:
        assert getattr(stayed, name) == pytest.approx(getattr(c.VLLM, name), rel=0.05), name
    afar = c.refit(start=replace(c.VLLM, step_s=5e-3, draft_s=2e-3, eager_s=0.5e-3), rounds=8)
    shipped = c.predict(c.VLLM, c.SETUP, c.FITTED)
    assert c.predict(afar, c.SETUP, c.FITTED) == pytest.approx(shipped, rel=0.06)


def test_a_left_out_point_is_unknown_to_its_fit():
    spoiled = replace(c.FITTED[2], speedup=0.1)
    others = [p for p in c.FITTED if p is not c.FITTED[2]]
    assert c.refit(others, rounds=1) == c.refit([p for p in [*others, spoiled] if p is not spoiled], rounds=1)
    assert c.refit([*others, spoiled], rounds=1) != c.refit(others, rounds=1)


def test_means_of_the_workloads_reproduce_their_plain_times():
    for workload, seconds in c.PLAIN_S.items():
        mean = c.mean_length(c.VLLM, c.SETUP, seconds)
        assert c.SETUP.rollouts(c.VLLM, mean).seconds() == pytest.approx(seconds, rel=0.01), workload


def test_an_own_machine_reproduces_the_plain_steps_that_it_was_fitted_on():
    plain = {1: 0.03, 8: 0.044, 32: 0.092}  # a line
    server = validate.fitted_server(plain)
    for n, seconds in plain.items():
        assert server.round(n, 0.0, 0) == pytest.approx(seconds, rel=0.01)


def test_the_score_counts_what_was_met(points):
    text = report._score(points)
    aimed = [p for p in points if p.group in ("fitted", "held out") and p.target is not None]
    assert f"8B {sum(abs(p.error) <= 0.15 for p in aimed)} of {len(aimed)} (15 %)" in text
