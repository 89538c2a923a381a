"""`draftkit report`: the page and its Markdown, from run directories in the real formats; damaged and odd ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import report_runs as made

from draftkit.errors import UserError
from draftkit.report.build import build
from draftkit.report.drafts import pieces
from draftkit.report.runs import read

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Balanced(HTMLParser):
    """Fails on a tag that is not closed in order; collects what the page names and its visible text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.named: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.named.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, data):
        if not {"style", "title"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


def parsed(html: str) -> Balanced:
    page = Balanced()
    page.feed(html)
    page.close()
    assert page.open == [], f"left open: {page.open}"
    assert len(set(page.ids)) == len(page.ids), "an id twice"
    for name in page.named:
        assert name.startswith(("#", "data:")), name
        assert not name.startswith("#") or name[1:] in page.ids, f"{name} leads nowhere"
    tags = "".join(re.findall(r"<[^>]*>", html)) + html[html.index("<style>") : html.index("</style>")]
    assert not re.search(r"(https?|ftp|wss?):?//|@import|<script|javascript:", tags.replace(made.EVIL, ""))
    return page


def report(*runs: Path, out: Path | None = None) -> tuple[Balanced, str, Path]:
    folder = out or runs[0].parent / "made"
    build(runs, folder, overwrite=True)
    page = parsed((folder / "index.html").read_text(encoding="utf-8"))
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    for name in re.findall(r"!\[.*?\]\((.*?)\)", markdown):
        assert (folder / name).read_bytes().startswith(b"\x89PNG"), name
    assert len(re.findall(r"!\[", markdown)) == len(list((folder / "figures").iterdir())) == page_charts(folder)
    return page, markdown, folder


def page_charts(folder: Path) -> int:
    return (folder / "index.html").read_text(encoding="utf-8").count('<svg class="chart"')


# ---- what is there is shown ----------------------------------------------------------------------------------------


def test_an_rl_run_shows_everything_that_was_asked_for(tmp_path: Path) -> None:
    page, markdown, _ = report(made.rl_run(tmp_path / "eagle3"))
    for text in (page.text, markdown):
        for title in (
            "Mean reward",
            "Where a step's time went",
            "Seconds of each step by part",
            "Acceptance length",
            "Survival of drafts",
            "Predicted against realised speedup",
            "Surprise of the sampled tokens",
            "Drafts, token by token",
            "What was run",
        ):
            assert title in text, title
        assert "1.30" in text and "1.10-1.60" in text  # realised, with its interval
        assert "0.31 → 0.90" in text  # held-out before and after
        assert "s a step over the forecast" in text and "ms a token" in text
        assert "no losslessness alarm" in text.lower()
    assert "rollouts 1.30x as fast as plain ones (95 % 1.10-1.60)" in page.text


def test_an_eval_run_shows_curves_costs_and_every_cell(tmp_path: Path) -> None:
    page, markdown, folder = report(made.eval_run(tmp_path / "ev"))
    for text in (page.text, markdown):
        for title in ("Speedup, T = 1", "Acceptance length, T = 0", "A round in plain steps", "Survival of drafts"):
            assert title in text, title
        assert "break-even" in text.lower() or "dashed" in text
    assert (folder / "index.html").read_text().count(">baseline<") == 4  # k = 0 of 2 temperatures x 2 concurrencies
    assert "speculative_config" in page.text or "no tested k was shown to pay" in page.text


def test_a_training_run_and_a_corpus(tmp_path: Path) -> None:
    page, _, _ = report(made.train_run(tmp_path / "train"), made.prepare_run(tmp_path / "corpus"))
    for words in ("Expected acceptance of sampled drafts", "99.0%", "2.120", "response tokens, train", "7.0 M"):
        assert words in page.text, words


def test_a_comparison_shows_its_table_and_its_parts(tmp_path: Path) -> None:
    page, _, _ = report(made.compare_run(tmp_path / "cmp"))
    assert "Drafters compared" in page.text and "Training the drafter" in page.text and "Every cell" in page.text
    assert "Speedup, T = 1, 4 at a time" in page.text  # of both drafters, so by concurrency
    assert "a headline" in page.text


def test_runs_stand_side_by_side_and_share_their_axes(tmp_path: Path) -> None:
    one, other = made.rl_run(tmp_path / "a" / "arm"), made.rl_run(tmp_path / "b" / "arm", method="none")
    page, markdown, folder = report(one, other, one)  # a run named twice is one run
    assert "a/arm" in page.text and "b/arm" in page.text
    assert "a/arm, s a step" in page.text and "Seconds a step" in page.text
    assert "b/arm: this run does not speculate" in page.text and "b/arm: this run does not speculate" in markdown
    svg = (folder / "index.html").read_text()
    reward = svg[svg.index("<h3>Mean reward</h3>") :]
    assert "a/arm" in reward[: reward.index("</svg>")] and "b/arm" in reward[: reward.index("</svg>")]


def test_drafts_are_marked_token_by_token(tmp_path: Path) -> None:
    _, markdown, folder = report(made.rl_run(tmp_path / "run"))
    html = (folder / "index.html").read_text()
    assert '<ins class="accepted" title="accepted draft"> is</ins>' in html
    assert '<del class="rejected" title="rejected draft"> three</del>' in html
    assert '<span class="own" title="verifier&#x27;s own"> two</span>' in html or "> two</span>" in html
    assert "unjudged" not in html and "&lt;b&gt;" in html  # cut off by the end of the answer; inert
    assert "step 4" in html and "step 8" in html
    assert "<ins> is</ins><del> three!</del> two<ins>." in markdown


def test_pieces_give_the_answer_back() -> None:
    kept = "".join(text for kind, text in pieces(made.sample_row()) if kind != "rejected")
    assert kept == "It is two.\n<|end|><b>"


# ---- what is not there is said -------------------------------------------------------------------------------------


def test_a_run_without_probes_has_no_realised_speedup(tmp_path: Path) -> None:
    page, markdown, _ = report(made.rl_run(tmp_path / "run", probe_every=0))
    assert "No plain probe ran, so there is no realised speedup." in page.text
    assert "no plain probe ran" in markdown.lower()


def test_a_run_without_speculation_says_so(tmp_path: Path) -> None:
    page, _, folder = report(made.rl_run(tmp_path / "run", method="none"))
    assert "This run does not speculate, so nothing was drafted." in page.text
    assert "This run does not speculate, so there is no speedup to measure." in page.text
    assert "<h3>Acceptance length</h3>" not in (folder / "index.html").read_text()


@pytest.mark.parametrize("steps", [0, 1])
def test_an_unfinished_run_is_reported_as_far_as_it_went(tmp_path: Path, steps: int) -> None:
    page, _, _ = report(made.rl_run(tmp_path / "run", steps, finished=False))
    assert "Not finished: " in page.text and "--resume" in page.text
    assert ("it goes to step 1" if steps else "nothing of it was logged yet") in page.text


def test_an_unfinished_evaluation_shows_the_cells_it_has(tmp_path: Path) -> None:
    some = made.eval_run(tmp_path / "some", finished=False, rows=made.eval_rows()[:8], samples=False)
    none = made.eval_run(tmp_path / "none", finished=False, rows=made.eval_rows()[:1], samples=False)
    page, _, _ = report(some, none)
    assert "7 measurements are in" in page.text and "Every cell" in page.text
    assert "none: no cell was measured yet, so there is no curve." in page.text
    assert "it recorded no samples of drafts" in page.text


def test_an_unfinished_training_without_a_parity_check(tmp_path: Path) -> None:
    page, _, _ = report(made.train_run(tmp_path / "t", finished=False), made.train_run(tmp_path / "u", parity=False))
    assert "t: training is not finished" in page.text and "No parity check with vLLM" in page.text


def test_alarms_and_faults_are_at_the_top(tmp_path: Path) -> None:
    row = made.rl_row(3)
    row["lossless"]["alarms"] = ["difference.surprise_z"]
    row["canary"] |= {"ok": False, "cause": "the prefix cache survived"}
    run = made.run_dir(tmp_path / "run", "rl", [made.rl_row(1), made.rl_row(2), row], None)
    page, _, _ = report(run)
    head = page.text[: page.text.index("At a glance", page.text.index("Contents") if "Contents" in page.text else 0)]
    assert "losslessness alarm: difference.surprise_z" in head.lower() and "the prefix cache survived" in head


# ---- odd and damaged files -----------------------------------------------------------------------------------------


def test_nothing_that_a_run_holds_is_live(tmp_path: Path) -> None:
    run = made.rl_run(tmp_path / "run").rename(tmp_path / "_<img src=x onerror=alert(1)>$x$ $\\frac{$")
    rows = [made.sample_row(1, made.EVIL), made.sample_row(2, made.EVIL * 500)]
    rows[0]["rounds"][0]["drafted"][0] = made.EVIL * 40
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "command.txt").write_text(made.EVIL.replace("\x00", ""))
    page, markdown, _ = report(run)
    assert "<script>alert(1)</script>" in page.text  # as text
    assert "\x00" not in page.text and "\u202e" not in page.text
    assert "<script" not in markdown.split("```")[0] and "\\[link\\](http" in markdown


def test_not_a_number_and_missing_fields_are_left_out(tmp_path: Path) -> None:
    odd = made.rl_row(3, entropy=None, reward_mean=None, survival=[0.5, None], predicted_speedup="fast", time_s=None)
    run = made.run_dir(tmp_path / "run", "rl", [made.rl_row(1), {"step": 2}, odd, made.rl_row(4, time_s={})], None)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward_mean": NaN, "k": 3, "acceptance_length": Infinity, "time_s": {"total": NaN}}\n')
        file.write("not json\n[1]\n")
        file.write('{"step": 6, "rew')
    page, markdown, _ = report(run)
    assert "2 lines of metrics.jsonl are damaged" in page.text and "The last line of metrics.jsonl is torn" in page.text
    assert "nan" not in page.text.lower().split() and "inf" not in markdown.split()


def test_of_a_step_that_was_logged_twice_the_later_line_counts(tmp_path: Path) -> None:
    rows = [made.rl_row(1), made.rl_row(2, reward_mean=0.9), made.rl_row(2, reward_mean=0.1)]
    run = read(made.run_dir(tmp_path / "run", "rl", rows, None))
    assert [(row["step"], row["reward_mean"]) for row in run.steps] == [(1, 0.31), (2, 0.1)]
    assert any("1 steps were logged more than once" in problem for problem in run.problems)


@pytest.mark.parametrize("file", ["results.json", "recipe.yaml", "env.json"])
def test_a_damaged_file_is_named_and_left_out(tmp_path: Path, file: str) -> None:
    run = made.rl_run(tmp_path / "run")
    (run / file).write_text('{"half')
    page, _, _ = report(run)
    assert f"{file} is damaged and was left out." in page.text


def test_results_of_another_shape_do_not_stop_the_report(tmp_path: Path) -> None:
    run = made.eval_run(tmp_path / "ev")
    cells = json.loads((run / "results.json").read_text())["cells"]
    cells[1] = {"k": 1, "concurrency": 1, "temperature": 1.0, "speedup": None}
    (run / "results.json").write_text(json.dumps({"temperature": 1.0, "cells": [*cells, None, {"k": 3}]}))
    page, _, _ = report(run)
    assert "Every cell" in page.text and "Its schedule is damaged" in page.text


def test_a_thousand_steps_stay_a_small_page(tmp_path: Path) -> None:
    _, _, folder = report(made.rl_run(tmp_path / "run", 1000))
    assert (folder / "index.html").stat().st_size < 1.5e6


def test_the_same_files_give_the_same_bytes_wherever_they_are(tmp_path: Path) -> None:
    first = made.rl_run(tmp_path / "x" / "run")
    shutil.copytree(first, tmp_path / "y" / "run")
    for place in ("x", "y"):
        build([tmp_path / place / "run"], tmp_path / f"out-{place}")
    one, other = ({p.relative_to(d): p.read_bytes() for p in d.rglob("*") if p.is_file()}
                  for d in (tmp_path / "out-x", tmp_path / "out-y"))  # fmt: skip
    assert one == other and len(one) > 10


# ---- the command ---------------------------------------------------------------------------------------------------


def test_what_is_no_run_is_refused_by_name(tmp_path: Path) -> None:
    run = made.rl_run(tmp_path / "runs" / "a")
    (tmp_path / "file").write_text("")
    broken = made.rl_run(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    foreign = made.rl_run(tmp_path / "foreign")
    (foreign / "config.json").write_text('{"schema": "draftkit.run/1", "verb": "export"}')
    for path, message, hint in (
        (tmp_path / "none", "There is no run at", "run:"),
        (tmp_path / "file", "is a file", "holds it"),
        (tmp_path / "runs", "no config.json", str(run)),
        (broken, "config.json is damaged", "another directory"),
        (foreign, "'export', which has no report", "eval-acceptance"),
    ):
        with pytest.raises(UserError) as refused:
            build([run, path], tmp_path / "out")
        assert message in refused.value.message and str(path) in refused.value.message
        assert hint in refused.value.hint
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_no_report_is_never_replaced(tmp_path: Path) -> None:
    run, other = made.rl_run(tmp_path / "run"), tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    for out in (other, run, tmp_path):
        with pytest.raises(UserError):
            build([run], out, overwrite=True)
    assert (other / "thesis.txt").exists() and (run / "metrics.jsonl").exists()


def test_the_command_writes_refuses_and_replaces(tmp_path: Path, draftkit) -> None:
    run = made.rl_run(tmp_path / "run")
    done = draftkit("report", "run", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["report"] == "run/report/index.html" and document["headline"].startswith("rollouts 1.30x")
    assert (run / "report" / "index.html").exists()
    again = draftkit("report", "run")
    assert again.returncode == 2 and "already exists" in again.stderr and "--overwrite" in again.stderr
    replaced = draftkit("report", "run", "--overwrite", "-q")
    assert replaced.returncode == 0 and "report: run/report/index.html" in replaced.stdout
    missing = draftkit("report", "elsewhere")
    assert missing.returncode == 2 and "elsewhere" in missing.stderr and "Traceback" not in missing.stderr
    nothing = draftkit("report")
    assert nothing.returncode == 2


def test_a_report_needs_no_torch_and_no_engine(tmp_path: Path) -> None:
    run = made.eval_run(tmp_path / "ev")
    code = (
        "import sys\nfrom pathlib import Path\nfrom draftkit.report.build import build\n"
        f"build([Path({str(run)!r})], Path({str(tmp_path / 'out')!r}))\n"
        "heavy = {'torch', 'vllm', 'transformers', 'deepspeed'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr


def test_rows_hold_what_an_account_writes() -> None:
    """The rows of these tests are not richer than those of a run."""
    from draftkit.recipe import Recipe
    from draftkit.rl.account import Account
    from draftkit.types import EngineStep, SpecCounters

    figures = {
        "rewards": [1.0], "lengths": [9], "truncated": 0, "entropy": 4.0, "turns": [SpecCounters(4, 12, 5, (3, 1, 1))],
        "generate_s": 1.0, "engine_steps": [EngineStep(1, 3, 2, 0.1, 0.01)], "prompts": [4],
    }  # fmt: skip
    seconds = made.rl_row(2)["time_s"]
    row = Account(Recipe()).step(2, [figures], seconds, [[1, 64, 3]])
    beside = {"step", "policy_version", "draft_version", "k", "dropped_groups", "policy", "drafter", "cotrain",
              "engine_trainer_logp_gap", "surprise_z", "lossless", "canary"}  # fmt: skip
    assert set(made.rl_row(2)) - beside <= set(row)
