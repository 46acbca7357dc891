"""The stress test: every cell is measured, on the same devices, and the page and the numbers say the same."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from commands import call
from fedcontext.errors import FedcontextError
from fedcontext.experiment import SETTINGS
from fedcontext.faults.attacks import ATTACKS
from fedcontext.faults.faults import FAULTS
from fedcontext.leaderboard.board import no_progress
from fedcontext.stress.cases import BARE, CONDITIONS, HONEST, METHODS, SHARES, TASKS, experiment, last_disturbed, select
from fedcontext.stress.cells import merge, read_results, stress, write_results
from fedcontext.stress.document import document, publish, summary_rows

WITHOUT_GRADIENTS = ("mean", "by samples", "FedAdam", "Krum", "median", "FLTrust")


pytestmark = pytest.mark.xdist_group("stress")  # `results` are made once, in one process


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    tasks, _, conditions = select(quick=True)
    folder = tmp_path_factory.mktemp("stress")
    return stress(folder, tasks=tasks, conditions=conditions, seeds=[0]), folder


def test_every_fault_and_attack_is_measured_at_every_share():
    shares = {name: {each.share for each in CONDITIONS if each.name == name} for name in (*FAULTS, *ATTACKS)}
    assert all(found == set(SHARES) for found in shares.values())
    assert CONDITIONS[0] == HONEST
    assert len(CONDITIONS) == 2 + 3 * (len(FAULTS) + len(ATTACKS))


def test_every_method_has_a_cell_for_every_condition(results):
    made, _ = results
    cells = {(cell.method, cell.condition) for cell in made.cells}
    assert cells == {(method, each.name) for method in METHODS for each in select(quick=True)[2]}
    assert all(len(cell.accuracy) == 1 and 0 <= cell.accuracy[0] <= 1 for cell in made.cells)


def test_all_settings_are_the_same_but_those_of_method_and_condition():
    for task in TASKS:
        runs = [experiment(task, method, each, 0) for method in METHODS for each in CONDITIONS]
        assert len(set(runs)) == len(runs)
        fixed = set(SETTINGS) - {"algorithm", "averaging", "gradient_averaging", "faults", "attack", *BARE}
        assert all(len({getattr(run, name) for run in runs}) == 1 for name in fixed)
        assert 0 < last_disturbed(task) < task.rounds


def test_lies_about_gradients_do_nothing_to_methods_that_ask_for_none(results):
    made, _ = results
    by_name = {(cell.method, cell.condition): cell.accuracy for cell in made.cells}
    assert all(by_name[method, "gradient-flip"] == by_name[method, "none"] for method in WITHOUT_GRADIENTS)
    assert any(by_name[method, "gradient-flip"] != by_name[method, "none"] for method in METHODS)


def test_the_page_has_every_number_of_the_file(results, tmp_path):
    made, _ = results
    numbers, page = publish(made, tmp_path)
    assert read_results(numbers) == made
    json.loads(numbers.read_text("utf-8"))
    text = page.read_text("utf-8")
    table = text.split("### Accuracy")[1].split("###")[0]
    rows = {line.split(" | ")[0].strip("| "): line for line in table.splitlines() if line.startswith("| ")}
    for condition in select(quick=True)[2]:
        (row,) = [line for label, line in rows.items() if label.split()[:1] == [condition.name]]
        assert len(re.findall(r"\.\d\d", row)) == len(METHODS)


def test_the_summary_has_the_tasks_in_the_order_of_the_page(results):
    made, _ = results
    (rounds,) = made.rounds.values()
    later = [replace(cell, task="later", accuracy=[0.0]) for cell in made.cells]
    both = replace(made, cells=[*later, *made.cells], rounds={**made.rounds, "later": rounds})
    for row, alone in zip(summary_rows(both), summary_rows(made), strict=True):
        assert row["accuracy"] == f"{alone['accuracy']}/0.000"


def test_the_page_says_which_faults_attacks_and_shares_were_run(results, tmp_path):
    text = publish(results[0], tmp_path)[1].read_text("utf-8")
    introduction, table = text.split("## In short")
    assert "under some faults and attacks (dropout, nan, sign-flip, gradient-flip, backdoor) of [Faults" in introduction
    assert "at 20 %, on synthetic-1-1, with seeds 0." in introduction
    assert "| attacks 20 % | worst |" in table


def test_finished_runs_are_reused_and_tasks_are_merged(results, tmp_path):
    made, folder = results
    tasks, _, conditions = select(quick=True)
    rounds = []

    def progress(title, total):
        rounds.append(total)
        return no_progress(title, total)

    assert stress(folder, tasks=tasks, conditions=conditions, seeds=[0], progress=progress).cells == made.cells
    assert rounds == [0]
    other = dataclasses.replace(
        made, cells=[dataclasses.replace(cell, task="mnist") for cell in made.cells], rounds={"mnist": [30, 20]}
    )
    both = merge(made, other)
    assert len(both.cells) == 2 * len(made.cells)
    assert merge(both, made).cells == both.cells


def test_the_page_states_every_command_that_ran_a_task(results, tmp_path):
    made = dataclasses.replace(results[0], commands={"synthetic-1-1": ["fedcontext stress --quick"]})
    cells = [dataclasses.replace(cell, task="mnist") for cell in made.cells]
    other = dataclasses.replace(
        made,
        cells=cells,
        rounds={"mnist": [30, 20]},
        settings={"mnist": {}},
        commands={"mnist": ["fedcontext stress --tasks mnist"]},
    )
    for each in (made, other):
        _, page = publish(each, tmp_path)
    assert "by `fedcontext stress --quick` and `fedcontext stress --tasks mnist`." in page.read_text("utf-8")


def test_methods_that_are_run_again_replace_their_own_cells_alone(results, tmp_path):
    made, folder = results
    tasks, methods, conditions = select((), ["mean"], ["nan", "sign-flip"], quick=True)
    assert [each.name for each in conditions] == ["none", "nan", "sign-flip"]
    again = stress(
        folder, tasks=tasks, methods=methods, conditions=conditions, seeds=[0], command="fedcontext stress 2"
    )
    assert {(cell.method, cell.condition) for cell in again.cells} == {("mean", each.name) for each in conditions}
    later = replace(again, cells=[replace(cell, accuracy=[0.123], made="tomorrow") for cell in again.cells])
    both = merge(read_results(publish(made, tmp_path)[0]), later)
    assert len(both.cells) == len(made.cells)
    changed = {(cell.method, cell.condition) for cell in both.cells if cell.accuracy == [0.123]}
    assert changed == {("mean", each.name) for each in conditions}
    assert both.commands == {"synthetic-1-1": ["fedcontext stress", "fedcontext stress 2"]}
    page = publish(both, tmp_path)[1].read_text("utf-8")
    today = made.cells[0].made
    assert f" {today}; mean: tomorrow and {today}.\n" in page
    other = replace(later, settings={"synthetic-1-1": {"rounds": 8}})
    assert merge(made, other).cells == other.cells
    unknown = replace(made, cells=[*made.cells, replace(made.cells[0], method="gone")])
    assert merge(unknown, later).cells == both.cells


def test_settings_of_every_task_survive_the_file(tmp_path):
    for task in TASKS:
        made = stress(tmp_path, tasks=[task], methods=[], conditions=[], seeds=[0])
        write_results(made, tmp_path / "results.json")
        assert read_results(tmp_path / "results.json") == made
        assert "device" not in made.settings[task.name]


def test_cells_of_other_seeds_and_of_tasks_that_are_gone_do_not_stay(results, tmp_path):
    made, _ = results
    (rounds,), (settings,) = made.rounds.values(), made.settings.values()
    gone = replace(
        made,
        cells=[*made.cells, *(replace(cell, task="gone") for cell in made.cells)],
        rounds={"gone": rounds, **made.rounds},
        settings={"gone": settings, **made.settings},
        commands={"gone": ["fedcontext stress 0"], **made.commands},
    )
    assert merge(gone, made) == made
    assert merge(replace(gone, seeds=[0, 1]), made) == made


def test_methods_of_different_tasks_share_a_page(results, tmp_path):
    made, _ = results
    mean, memory = ([cell for cell in made.cells if cell.method == name] for name in ("mean", "memory"))
    (rounds,), (settings,) = made.rounds.values(), made.settings.values()
    elsewhere = replace(
        made,
        cells=[replace(cell, task="mnist") for cell in memory],
        rounds={"mnist": rounds},
        settings={"mnist": settings},
    )
    publish(elsewhere, tmp_path)
    page = publish(replace(made, cells=mean), tmp_path)[1].read_text("utf-8")
    assert re.search(r"\| mean \| -/0\.\d{3} \|", page)
    assert re.search(r"\| \*\*memory\*\* \| 0\.\d{3}/- \|", page)


def test_the_published_page_is_that_of_the_published_numbers():
    docs = Path(__file__).parents[1] / "docs"
    assert document(read_results(docs / "reliability.json")) == (docs / "reliability.md").read_text("utf-8")


def test_results_without_commands_are_read(results, tmp_path):
    numbers, _ = publish(results[0], tmp_path)
    content = json.loads(numbers.read_text("utf-8"))
    del content["commands"]
    numbers.write_text(json.dumps(content))
    assert read_results(numbers) == dataclasses.replace(results[0], commands={})


def test_the_command_prints_a_row_for_every_method(results, tmp_path):
    _, folder = results
    shutil.copytree(folder, tmp_path / "quick")  # complete runs are reused
    done = call("stress", "--quick", "--jobs", 1, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [method for method in METHODS if f"\n {method} " not in done.stdout] == []
    assert "runs ended" not in done.stdout
    assert "**" not in done.stdout
    assert f"written: {tmp_path / 'quick' / 'reliability.md'}\n" in done.stdout


def test_unknown_tasks_and_broken_files_are_named(tmp_path):
    with pytest.raises(FedcontextError, match="task must be one of synthetic-1-1, mnist, cnn-mnist-30, got 'moon'"):
        select(["moon"])
    with pytest.raises(FedcontextError, match=r"method must be one of mean, .*, got 'bold'"):
        select(methods=["bold"])
    with pytest.raises(FedcontextError, match=r"condition must be one of none, .*, got 'rain'"):
        select(conditions=["rain"])
    with pytest.raises(
        FedcontextError, match=r"conditions must have a fault or an attack, got \['combined'\]; the quick"
    ):
        select(conditions=["combined"], quick=True)
    (tmp_path / "reliability.json").write_text("[1]")
    with pytest.raises(FedcontextError, match="no results of a stress test"):
        read_results(tmp_path / "reliability.json")
