"""Speed model against the reference numbers, the schedule against vLLM's own reader, and what a report contains."""

import json

import pytest

from draftkit.evals import report, speed_model


def cell(k: int, concurrency: int, speedup: float, verdict: str, temperature: float = 1.0, **fields) -> dict:
    half = 0.05
    base = {
        "k": k, "concurrency": concurrency, "temperature": temperature, "repeats": 3, "tokens_per_s": 30 * speedup,
        "acceptance_length": 1 + 0.5 * k, "acceptance_length_ci": [1 + 0.4 * k, 1 + 0.6 * k],
        "survival": [0.5] * k, "round_cost": (1 + 0.5 * k) / speedup, "break_even": (1 + 0.5 * k) / speedup,
        "draft_cost": 0.11 * k, "verify_cost": 1.27, "speedup": speedup, "speedup_ci": [speedup - half, speedup + half],
        "verdict": verdict,
    }  # fmt: skip
    return base | fields


@pytest.fixture
def results() -> dict:
    cells = []
    for temperature in (1.0, 0.0):
        for concurrency, gains in ((1, (1.3, 1.6)), (4, (1.2, 1.1)), (16, (0.97, 0.6))):
            cells.append(cell(0, concurrency, 1.0, "undecided", temperature))
            for k, gain in zip((1, 3), gains, strict=True):
                verdict = "faster" if gain > 1.05 else "undecided" if gain > 0.95 else "slower"
                cells.append(cell(k, concurrency, gain, verdict, temperature))
    ranges = speed_model.schedule([c for c in cells if c["temperature"] == 1.0], 64)
    return {"schema": "draftkit.eval-acceptance/1", "verifier": "demo", "drafter": "runs/d", "method": "eagle3",
            "draft_sample_method": "probabilistic",
            "temperature": 1.0, "cells": cells, "schedule": ranges}  # fmt: skip


# --- speed model ------------------------------------------------------------------------------------------------


def test_acceptance_length_fixture():
    assert speed_model.acceptance_length([0.886, 0.770, 0.663]) == pytest.approx(3.319)
    assert speed_model.acceptance_length([]) == 1.0


def test_iid_acceptance_length_is_the_sum_of_the_powers():
    assert speed_model.iid_acceptance_length(0.6, 3) == pytest.approx(speed_model.acceptance_length([0.6, 0.36, 0.216]))
    assert speed_model.iid_acceptance_length(1.0, 3) == 4


@pytest.mark.parametrize(("tau", "speedup", "cost"), [(3.32, 1.77, 1.88), (5.06, 1.21, 4.18), (2.47, 0.7, 3.53)])
def test_round_cost_fixtures(tau, speedup, cost):
    assert speed_model.round_cost(tau, speedup) == pytest.approx(cost, abs=0.005)


def test_leviathan_form_is_the_memory_bound_case():
    """Verification as dear as a plain step: c = k * draft / plain + 1."""
    cost = speed_model.modelled_round_cost(3, plain_s=0.03, verify_s=0.03, draft_s=0.003)
    assert cost == pytest.approx(3 * 0.1 + 1)


@pytest.mark.parametrize(
    ("share", "speedup", "step"), [(0.67, 1.767, 1.410), (0.72, 1.536, 1.335), (310.1 / 400.7, 2.03, 1.65)]
)
def test_amdahl_fixtures(share, speedup, step):
    assert speed_model.amdahl(share, speedup) == pytest.approx(step, abs=0.006)
    assert speed_model.implied_generation_share(speed_model.amdahl(share, speedup), speedup) == pytest.approx(share)


@pytest.mark.parametrize(("step", "generation", "share"), [(1.70, 2.72, 0.65), (2.5, 3.5, 0.84)])
def test_implied_share_fixtures(step, generation, share):
    assert speed_model.implied_generation_share(step, generation) == pytest.approx(share, abs=0.005)


def test_draining_batch_weighs_by_time():
    """Fast where few run, even where many do: equal plain time at both gives the harmonic mean."""
    steps, plain_s = {1: 100, 16: 50}, {1: 0.03, 16: 0.06}
    assert speed_model.draining_speedup(steps, plain_s, {1: 2.0, 16: 1.0}) == pytest.approx(4 / 3)


def test_marginal_rule_stops_where_the_next_token_costs_more_than_it_brings():
    """Rounds of 1.88 steps at k = 3 and 4.18 at k = 7, evenly in between; tau 3.32 and 5.06: k = 3 stays."""
    survival = [0.9, 0.78, 0.64, 0.435, 0.435, 0.435, 0.435]
    cost = [1.0, 1.29, 1.59, 1.88, 2.455, 3.03, 3.605, 4.18]
    assert speed_model.marginal_k(survival, cost) == speed_model.best_k(survival, cost) == 3
    assert speed_model.marginal_k([0.2], [1.0, 1.5]) == speed_model.best_k([0.2], [1.0, 1.5]) == 0


def test_marginal_rule_agrees_with_the_best_k_when_costs_rise_evenly():
    for alpha in (0.3, 0.6, 0.9):
        for slope in (0.05, 0.2, 0.5):
            survival = [alpha ** (i + 1) for i in range(8)]
            cost = [1 + slope * k for k in range(9)]
            assert speed_model.marginal_k(survival, cost) == speed_model.best_k(survival, cost), (alpha, slope)


# --- schedule ---------------------------------------------------------------------------------------------------


def test_schedule_meets_at_geometric_means_and_covers_every_batch_size(results):
    assert results["schedule"] == [[1, 2, 3], [3, 8, 1], [9, 64, 0]]


def test_equal_neighbours_become_one_range_and_nothing_that_pays_is_zero():
    cells = [cell(k, c, 1.5 if k else 1.0, "faster" if k else "undecided") for c in (1, 2, 8) for k in (0, 2)]
    assert speed_model.schedule(cells, 8) == [[1, 8, 2]]
    assert speed_model.schedule([c | {"verdict": "undecided"} for c in cells], 8) == [[1, 8, 0]]


def test_adjacent_concurrencies_leave_no_gap():
    cells = [cell(c, c, 1.5, "faster") for c in (1, 2, 3, 4)]
    assert speed_model.schedule(cells, 4) == [[1, 1, 1], [2, 2, 2], [3, 3, 3], [4, 4, 4]]


def test_vllm_reads_the_schedule(results):
    dynamic = pytest.importorskip("vllm.v1.spec_decode.dynamic.utils")
    lookup = dynamic.build_dynamic_sd_schedule_lookup([tuple(row) for row in results["schedule"]], 64, 3)
    assert lookup[1:] == [3] * 2 + [1] * 6 + [0] * 56


# --- report -----------------------------------------------------------------------------------------------------


def test_markdown_holds_every_cell_slower_ones_too(results):
    text = report.markdown(results)
    rows = [line for line in text.splitlines() if line.startswith("| 1") or line.startswith("| 4")]
    assert len(rows) == len(results["cells"])
    assert sum("| slower |" in line for line in rows) == 2
    assert all(line.count("|") == len(report.COLUMNS) + 1 for line in rows)


def test_schedule_text_is_ready_for_vllm(results):
    text = report.schedule_text(results)
    config = json.JSONDecoder().raw_decode(text.split("speculative_config=")[1])[0]
    assert config == {"method": "eagle3", "model": "runs/d", "num_speculative_tokens": 3,
                      "draft_sample_method": "probabilistic",
                      "num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 8, 1], [9, 64, 0]]}  # fmt: skip
    assert "above 16 were not measured" in text
    assert "without speculation" in report.schedule_text(results | {"schedule": [[1, 64, 0]]})


def test_headline_names_the_fastest_cell_at_the_rollout_temperature(results):
    assert report.headline(results).startswith("speedup 1.60x (95 % 1.55-1.65)")
    assert "concurrency 1, T = 1, faster" in report.headline(results)


@pytest.mark.parametrize(("width", "full"), [(80, False), (160, True)])
def test_the_shown_table_fits_the_terminal(results, monkeypatch, capsys, width, full):
    monkeypatch.setattr(report.console.out, "_width", width)
    report.show(results)
    printed = capsys.readouterr().out
    table = [line for line in printed.splitlines() if line.startswith(("│", "┃"))]
    assert len(table) == len(results["cells"]) + 2  # a line a cell, a header a temperature: nothing wrapped
    assert max(map(len, table)) <= width and "…" not in printed
    assert all(("survival" in line) == full for line in table if "speedup" in line)
    assert "[[1, 2, 3], [3, 8, 1], [9, 64, 0]]" in printed


def test_write_leaves_a_plot_and_a_readme(results, tmp_path):
    results["cells"][1] |= {"speedup_ci": None, "acceptance_length_ci": None}  # a single prompt has no interval
    report.write(results, tmp_path)
    assert (tmp_path / report.PLOT).read_bytes().startswith(b"\x89PNG")
    assert "| slower |" in (tmp_path / "README.md").read_text()


# --- what holds a cell back -------------------------------------------------------------------------------------


def test_a_weak_drafter_and_a_k_that_nothing_could_pay_are_told_apart():
    assert speed_model.limit(3, cost=3.5, speedup=0.6) == "drafter"  # 4 tokens a round would be 1.14x
    assert speed_model.limit(3, cost=4.0, speedup=0.6) == "k"
    assert speed_model.limit(3, cost=1.5, speedup=1.2) is None


def test_slower_cells_are_explained(results):
    assert report.limits_text(results) == ""  # a results.json from before has no limits
    cells = [c | {"perfect_speedup": (c["k"] + 1) / c["round_cost"], "limit": None} for c in results["cells"]]
    [slow] = [c for c in cells if c["verdict"] == "slower" and c["temperature"] == 1.0]
    slow |= {"limit": "drafter", "perfect_speedup": 1.7}
    text = report.limits_text(results | {"cells": cells})
    assert text == "Drafter too weak: k = 3 at 16; always accepted, it would reach 1.70x (k = 3 at 16)."
    slow |= {"limit": "k"}
    text = report.limits_text(results | {"cells": cells})
    assert text == "k too large, even for a drafter that is always accepted: k = 3 at 16."


# --- fitted costs -----------------------------------------------------------------------------------------------


def test_fitted_costs_are_a_table_that_marks_what_was_not_measured(results):
    assert report.costs_markdown(results) == ""
    costs = [
        {"k": k, "running": n, "cost": 1 + k * n / 8, "cost_ci": [1.0, 2.0 + k], "measured": n == 1}
        for k in (1, 3) for n in (1, 2)
    ]  # fmt: skip
    loo = [{"k": 1, "concurrency": 1, "predicted_s": 1.0, "measured_s": 1.1, "error": e} for e in (-0.09, 0.02, 0.05)]
    text = report.costs_markdown(results | {"costs": [{"temperature": 1.0, "round_cost": costs, "leave_one_out": loo}]})
    assert "| 3 | 1.38 (1.00-5.00) | 1.75 (1.00-5.00) * |" in text
    assert "3 times: median error 5.0 %, largest 9.0 %" in text
