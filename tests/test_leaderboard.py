"""The leaderboard: how candidates are chosen and compared, what its page says, and what it recommends."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.main import get_command

from commands import call
from fedcontext.cli.app import app
from fedcontext.cli.options import parse_grid
from fedcontext.errors import FedcontextError
from fedcontext.experiment import experiment_from
from fedcontext.leaderboard import board, entries, results
from fedcontext.leaderboard.document import document
from fedcontext.leaderboard.entries import (
    ENTRANTS,
    TASKS,
    TEST_SEEDS,
    TUNING_SEEDS,
    Entrant,
    Task,
    select_entrants,
    select_tasks,
)
from fedcontext.leaderboard.recommendation import Constraints, command_for, recommend
from fedcontext.leaderboard.results import (
    PUBLISHED,
    TaskResult,
    commands_of,
    merge,
    ratios,
    read_results,
    write_results,
)
from fedcontext.leaderboard.rows import Row, make_row
from fedcontext.leaderboard.tuning import records_of, score, tune
from fedcontext.measurement.defences import Defences
from fedcontext.records import RoundRecord, read_run
from fedcontext.runner import missing_experiments

TINY = {"dataset": "synthetic-iid", "rounds": 3, "epochs": (1, 1), "learning_rate": 0.01, "engine": "reference"}
TASK = Task("tiny", "convex", TINY, (0.1, 0.2, 0.99))
FEDAVG = Entrant("fedavg", {"algorithm": "fedavg"}, {"server_learning_rate": ("default", 2.0)})
MEMORY = Entrant("memory", {"algorithm": "fedavg-memory", "probes": 20}, kind="ours")


def run_of(*accuracies, loss=1.0, bytes_up=10**6):
    return [
        RoundRecord(number, loss=loss, accuracy=accuracy, seconds=2.0, bytes_up=bytes_up)
        for number, accuracy in enumerate(accuracies, 1)
    ]


def row(entrant, rounds, megabytes=1.0, kind="baseline", settings=None, a_round=1.0):
    known = {each.name: each for each in ENTRANTS}
    return Row(
        entrant=entrant,
        kind=known[entrant].kind if entrant in known else kind,
        settings=settings or known[entrant].candidates()[0],
        tuned=[],
        rounds=[[rounds] * 3] * 3,
        mean_rounds=rounds,
        seconds=[1.0] * 3,
        megabytes=[1.0] * 3,
        mean_megabytes=megabytes,
        megabytes_round=a_round,
        losses=[0.5, 0.7],
        accuracy=[0.9, 0.8, 1.0],
        swing=0.01,
        rises=0.0,
        largest_rise=0.0,
        diverged=0,
        made="yesterday",
    )


def result(task, *rows, group="convex"):
    by_name = {each.entrant: each for each in rows}
    return TaskResult(task, group, 40, [0.7, 0.8, 0.85], [0, 1], [100], by_name)


# Choosing candidates


def test_a_candidate_scores_its_mean_round_over_levels_and_seeds_with_a_penalty_for_levels_not_reached():
    runs = [run_of(0.5, 0.7, 0.7, 0.7, loss=2.0), run_of(0.7, 0.7, 0.9, 0.9, loss=4.0)]
    assert score(runs, (0.5, 0.7, 0.9), rounds=4) == ((1 + 2 + 6 + 1 + 1 + 3) / 6, 3.0)


def test_a_run_that_diverged_scores_an_infinite_loss():
    assert score([run_of(0.5)], (0.5,), rounds=4) == (1.0, math.inf)


def test_tuning_chooses_the_lowest_score_and_breaks_ties_by_loss(tmp_path):
    unreachable = Task("tie", "convex", TINY, (1.1,))
    for task in (TASK, unreachable):
        losses = {}
        chosen = tune(task, FEDAVG, (100,), tmp_path)
        for candidate in FEDAVG.candidates():
            records = records_of(task.experiment(candidate, 100), tmp_path)
            losses[score([records], task.levels, 3)] = candidate
        assert chosen == losses[min(losses)]


def test_tuning_reuses_finished_records_and_never_runs_a_test_seed(tmp_path):
    tune(TASK, FEDAVG, TUNING_SEEDS, tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.jsonl")}
    assert {read_run(path)[0]["settings"]["seed"] for path in files} == set(TUNING_SEEDS)
    tune(TASK, FEDAVG, TUNING_SEEDS, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.jsonl")} == files


def test_the_choice_does_not_depend_on_the_test_seeds(tmp_path):
    chosen = {}
    for seeds in ((0,), (1, 2)):
        (made,) = board.compete([TASK], [FEDAVG], tmp_path / str(seeds), tuning=(100,), seeds=seeds)
        chosen[seeds] = made.rows["fedavg"].settings
        assert made.seeds == list(seeds)
    assert chosen[0,] == chosen[1, 2]


def test_tuning_and_test_seeds_are_apart(tmp_path):
    assert not set(TUNING_SEEDS) & set(TEST_SEEDS)
    with pytest.raises(FedcontextError, match=r"must differ, both contain \[1\]"):
        board.compete([TASK], [FEDAVG], tmp_path, tuning=(1,), seeds=(0, 1))
    assert not list(tmp_path.iterdir())


def test_relative_levels_are_shares_of_fedavgs_accuracy_on_the_same_seeds(tmp_path):
    task = Task("relative", "nonconvex", TINY, (0.5, 1.0), relative=True)
    (made,) = board.compete([task], [MEMORY], tmp_path, tuning=(100,), seeds=(0, 1))
    final = [records_of(task.experiment(entries.FEDAVG, seed), tmp_path)[-1].accuracy for seed in (0, 1)]
    assert made.levels == pytest.approx([sum(final) / 4, sum(final) / 2], abs=1e-4)


def test_rows_of_another_machine_are_kept_beside_new_ones_at_the_same_levels(tmp_path):
    task = Task("relative", "nonconvex", TINY, (0.5, 1.0), relative=True)
    (before,) = board.compete([task], [FEDAVG], tmp_path, tuning=(100,), seeds=(0, 1))
    before = replace(before, levels=[level - 0.01 for level in before.levels])  # as if FedAvg had done worse there
    (made,) = board.compete([task], [MEMORY], tmp_path / "new", tuning=(100,), seeds=(0, 1), earlier=[before])
    assert made.levels == before.levels
    assert {path.stem for path in (tmp_path / "new").glob("*.jsonl")} == {
        task.experiment(MEMORY.settings, seed).name for seed in (0, 1)
    }  # FedAvg did not run again
    assert set(merge([before], [made])[0].rows) == {"fedavg", MEMORY.name}


def test_a_candidate_that_diverges_is_not_chosen_and_does_not_stop_the_others(tmp_path):
    wild = Entrant("wild", {"algorithm": "fedavg"}, {"server_learning_rate": (1e300, "default")})
    (made,) = board.compete([TASK], [wild], tmp_path, tuning=(100,), seeds=(0,))
    assert made.rows["wild"].settings["server_learning_rate"] == "default"
    assert len(list(tmp_path.glob("*.error"))) == 1
    again = [TASK.experiment(settings, 100) for settings in wild.candidates()]
    assert missing_experiments(again, tmp_path) == []
    only = Entrant("wild", {"algorithm": "fedavg", "server_learning_rate": 1e300})
    (made,) = board.compete([TASK], [only], tmp_path, tuning=(100,), seeds=(0,))
    assert (made.rows["wild"].diverged, made.rows["wild"].losses) == (1, [math.inf])
    assert "(1 diverged)" in document([made], "command")


def test_the_entrants_have_equal_budgets_and_ours_one_configuration():
    for entrant in ENTRANTS:
        candidates = entrant.candidates()
        assert len(candidates) == 1 if entrant.kind in ("ours", "oracle") else 1 <= len(candidates) <= 4
        for task in TASKS:
            for settings in candidates:
                assert task.experiment(settings, 0).rounds == task.rounds
    assert len({task.name for task in TASKS}) == len([t for t in TASKS if t.group == "convex"]) + 6 == 14


# Rows and ratios


def test_a_row_has_medians_and_spread_over_seeds():
    runs = [run_of(0.6, 0.8, 0.8, bytes_up=bytes_up) for bytes_up in (10**6, 2 * 10**6, 6 * 10**6)]
    runs[0] = run_of(0.8, 0.8, 0.8)
    made = make_row(MEMORY, {}, runs, (0.6, 0.8, 0.9), rounds=3, made="now")
    assert made.rounds == [[1, 1, 1], [2, 1, 2], [math.inf] * 3]
    assert made.seconds == [2.0, 4.0, math.inf]
    assert made.megabytes == [2.0, 4.0, math.inf]
    assert made.mean_megabytes == pytest.approx(1.5 * 3 * 3)
    assert made.mean_rounds == pytest.approx((1 + 1 + 4.5 + 2 * (1 + 2 + 4.5)) / 9)


def test_rises_count_rounds_whose_loss_is_more_than_two_percent_up():
    losses = (1.0, 1.01, 2.02, 1.0)
    records = [RoundRecord(number, loss=loss, accuracy=0.5) for number, loss in enumerate(losses, 1)]
    made = make_row(MEMORY, {}, [records], (0.9,), rounds=4, made="now")
    assert (made.rises, made.largest_rise) == (pytest.approx(1 / 3), pytest.approx(1.0))


def test_ratios_are_to_the_best_tuned_baseline_of_each_task():
    made = [
        result("a", row("fedavg", 10, 5), row("fedadam", 4, 8), row("memory", 2, 10), row("oracle-span", 1, 1)),
        result("b", row("fedavg", 6, 2), row("fedadam", 12, 4), row("memory", 12, 1), row("fedavg-30", 1, 1)),
    ]
    by_name = {ratio.entrant: ratio for ratio in ratios(made)}
    assert by_name["memory"].by_task == {"a": 0.5, "b": 2.0}
    assert (by_name["memory"].mean, by_name["memory"].worst) == (pytest.approx(1.0), 2.0)
    assert (by_name["memory"].uplink, by_name["memory"].worst_uplink) == (pytest.approx(1.0), 2.0)
    assert by_name["fedadam"].by_task == {"a": 1.0, "b": 2.0}
    assert by_name["fedavg-30"].by_task == {"b": pytest.approx(1 / 6)}


def test_results_survive_a_file_and_merge_by_task_and_entrant(tmp_path):
    made = [result("a", row("fedavg", math.inf), row("memory", 2.0)), result("b", row("fedavg", 6.0))]
    write_results(made, tmp_path / "results.json")
    again = read_results(tmp_path / "results.json")
    assert again[0].rows["fedavg"].mean_rounds == math.inf
    assert again == [TaskResult(**{**vars(each), "rows": dict(each.rows)}) for each in again]
    merged = merge(again, [result("a", row("memory", 3.0))])
    assert [each.task for each in merged] == ["a", "b"]
    assert {name: each.mean_rounds for name, each in merged[0].rows.items()} == {"fedavg": math.inf, "memory": 3.0}


def test_merged_results_keep_the_commands_whose_rows_are_left():
    first = replace(result("a", row("fedavg", 1.0), row("memory", 2.0)), commands=["first"])
    part, whole = (
        replace(result("a", *rows), commands=["second"]) for rows in ([row("memory", 3.0)], first.rows.values())
    )
    assert commands_of(merge([first], [part])) == "first` and `second"
    assert commands_of(merge([first], [whole])) == "second"
    assert commands_of(merge([first], [replace(part, task="b")])) == "first` and `second"


# The page


def test_the_page_says_when_each_row_was_made():
    before = result("a", row("fedavg", 10), row("fedadam", 9), row("memory", 5))
    (after,) = merge([before], [result("a", replace(row("memory", 4), made="today"))])
    assert "levels 70/80/85 %. yesterday; memory: today.\n" in document([after], "")


def test_the_published_page_is_that_of_the_published_results():
    page, results = Path(__file__).parents[1] / "docs" / "leaderboard.md", read_results(PUBLISHED)
    assert page.read_text("utf-8") == document(results, commands_of(results))


def test_the_page_names_the_tasks_in_which_we_lose():
    won = result("easy", row("fedavg", 10), row("memory", 5))
    lost = result("hard", row("fedavg", 10), row("fedadam", 4), row("memory", 5))
    page = document([won, lost], "fedcontext leaderboard")
    assert "**memory loses in 1 of 2 tasks**: hard (5.0 rounds, fedadam 4.0)." in page
    assert "`fedcontext leaderboard`" in page
    assert "| **memory** |" in page
    assert "**memory loses in 0 of 1 tasks**." in document([won], "")


def test_the_page_speaks_of_larger_cohorts_and_oracles_where_there_are_some():
    small = document([result("a", row("fedavg", 10), row("memory", 5))], "")
    assert "30 devices" not in small
    assert "Oracles" not in small
    assert "Rows with 30 devices" in document(RESULTS, "")
    assert "Oracles look at all devices' data" in document(RESULTS, "")


# Recommendations


RESULTS = [
    result(
        "a",
        row("fedavg", 10),
        row("fedadam", 8),
        row("feddyn", 5),
        row("folb", 4, a_round=2.0),
        row("contextual", 3, a_round=10.0),
        row("memory", 1, a_round=1.2),
        row("memory-cohort", 2, a_round=1.1),
        row("oracle-span", 0.5),
        row("fedavg-30", 0.5, a_round=3.0),
    )
]


@pytest.mark.parametrize(
    ("constraints", "best"),
    [
        ({}, "memory"),
        ({"probes": False}, "memory-cohort"),
        ({"uplink": 1.15}, "memory-cohort"),
        ({"uplink": 1.0}, "feddyn"),
        ({"uplink": 1.0, "device_state": False}, "fedadam"),
    ],
)
def test_the_recommendation_obeys_the_constraints(constraints, best):
    assert recommend(RESULTS, Constraints(**constraints))[0][0].name == best


def test_secure_aggregation_rules_out_what_needs_single_updates():
    names = {entrant.name for entrant, _ in recommend(RESULTS, Constraints(secure_aggregation=True))}
    assert names == {"fedavg", "fedadam", "feddyn", "memory", "memory-cohort"}


def test_an_impossible_recommendation_says_why():
    with pytest.raises(FedcontextError, match="no algorithm of the leaderboard"):
        recommend(RESULTS, Constraints(uplink=0.5))
    with pytest.raises(FedcontextError, match="no nonconvex results; run `fedcontext leaderboard --group nonconvex"):
        recommend(RESULTS, Constraints(nonconvex=True))


def test_the_command_of_a_tuned_entrant_tunes_it():
    assert command_for(MEMORY) == "fedcontext run --algorithm fedavg-memory --probes 20"
    assert command_for(FEDAVG) == "fedcontext tune --algorithm fedavg --grid server_learning_rate=default,2.0"


def test_recommend_prints_a_command_that_works_for_every_entrant():
    done = call("recommend")
    assert done.returncode == 0, done.stderr
    commands = [part.split() for part in re.findall(r"(?:^|: )fedcontext (.*)", done.stdout, re.MULTILINE)]
    allowed = recommend(read_results(PUBLISHED), Constraints())
    assert len(commands) == len(allowed) > 5
    for (name, *arguments), (entrant, _) in zip(commands, allowed, strict=True):
        get_command(app).commands[name].make_context(name, arguments)
        options = list(zip(arguments[::2], arguments[1::2], strict=True))
        settings = {option[2:].replace("-", "_"): value for option, value in options if option != "--grid"}
        grid = parse_grid([value for option, value in options if option == "--grid"])
        printed = [experiment_from(each) for each in Entrant(entrant.name, settings, grid).candidates()]
        limits_on = {limit: default for limit, default in vars(Defences()).items() if limit in entrant.settings}
        assert printed == [experiment_from({**each, **limits_on}) for each in entrant.candidates()]
    assert "memory-cohort: fedcontext run --algorithm fedavg-memory --probes cohort\n" in done.stdout


# Commands


@pytest.fixture
def tiny_entries(monkeypatch, tmp_path):
    """A leaderboard of seconds; the published numbers go to a folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedcontext.leaderboard.entries.TASKS", (TASK,))
    monkeypatch.setattr("fedcontext.leaderboard.entries.QUICK_TASKS", (TASK.name,))
    monkeypatch.setattr("fedcontext.leaderboard.entries.ENTRANTS", (FEDAVG, MEMORY))
    monkeypatch.setattr(results, "PUBLISHED", tmp_path / "published.json")


@pytest.mark.usefixtures("tiny_entries")
def test_the_leaderboard_writes_docs_and_the_numbers_of_recommend(tmp_path):
    done = call("leaderboard", "--jobs", 1, "--docs", "docs")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "docs" / "leaderboard.md").read_text("utf-8")
    assert "### tiny" in page
    assert "Generated by `fedcontext leaderboard --group convex --docs docs`." in page
    assert read_results(tmp_path / "published.json") == read_results(tmp_path / "runs/leaderboard/results.json")
    done = call("recommend", "--no-probes")
    assert (done.returncode, done.stdout.splitlines()[0].split(":")[0]) == (0, "fedavg")


@pytest.mark.usefixtures("tiny_entries")
def test_docs_keep_the_published_rows_that_earlier_local_results_lack(tmp_path):
    assert call("leaderboard", "--jobs", 1, "--entrants", "fedavg").returncode == 0
    local = tmp_path / "runs/leaderboard/results.json"
    published = [{**each, "task": name} for each in json.loads(local.read_text()) for name in ("other", each["task"])]
    (tmp_path / "published.json").write_text(json.dumps(published))
    done = call("leaderboard", "--jobs", 1, "--entrants", "memory", "--docs", "docs")
    assert done.returncode == 0, done.stderr
    rows = {each.task: set(each.rows) for each in read_results(tmp_path / "published.json")}
    assert rows == {"other": {"fedavg"}, "tiny": {"fedavg", "memory"}}
    assert "### other" in (tmp_path / "docs" / "leaderboard.md").read_text("utf-8")


@pytest.mark.usefixtures("tiny_entries")
def test_quick_touches_neither_docs_nor_published_numbers(tmp_path):
    done = call("leaderboard", "--jobs", 1, "--quick", "--entrants", "fedavg,memory")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    page = (tmp_path / "runs/leaderboard/quick/leaderboard.md").read_text("utf-8")
    assert "Generated by `fedcontext leaderboard --quick --group convex --entrants fedavg,memory`." in page
    done = call("leaderboard", "--quick", "--docs", "docs")
    assert (done.returncode, "--quick does not write docs" in done.stderr) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.usefixtures("tiny_entries")
def test_recommend_without_numbers_says_how_to_make_them():
    done = call("recommend")
    assert (done.returncode, "run `fedcontext leaderboard" in done.stderr) == (2, True)


def test_tune_prints_a_table_and_the_best_settings_as_toml(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    settings = ("--dataset", "synthetic-iid", "--rounds", 2, "--epochs", 1, "--engine", "reference")
    grid = ("--algorithm", "fedprox", "--grid", "mu=0,1000", "--seeds", "5,6", "--jobs", 1)
    done = call("tune", *settings, *grid)
    assert done.returncode == 0, done.stderr
    assert 'algorithm = "fedprox"' in done.stdout
    assert "mu = 0.0" in done.stdout
    (tmp_path / "best.toml").write_text(done.stdout[done.stdout.index("dataset =") :], "utf-8")
    assert call("run", "best.toml", "--quiet").returncode == 0


def test_unknown_names_are_refused():
    with pytest.raises(FedcontextError, match=r"task must be one of mnist-0\.03"):
        select_tasks(names=["cifar"])
    with pytest.raises(FedcontextError, match="entrant must be one of fedavg"):
        select_entrants(["sgd"])
    done = call("tune", "--grid", "speed=1,2")
    assert (done.returncode, "--grid: unknown setting 'speed'" in done.stderr) == (2, True)
