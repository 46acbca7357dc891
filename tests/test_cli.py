"""The command line: its output, its files, its errors, and what an interrupt leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedcontext as fc
from commands import call
from fedcontext.algorithms import unused_settings
from fedcontext.cli import main
from fedcontext.cli.options import OPTIONS
from fedcontext.cli.tables import mean_and_deviation
from fedcontext.datasets import NAMES, load_dataset
from fedcontext.files.toml import to_toml
from fedcontext.measurement.defences import OFF
from fedcontext.results.summary import outcome, summarise

PROGRAM = [sys.executable, "-c", "from fedcontext.cli import main; main()"]
FEW = ("--rounds", "3", "--engine", "reference")


def program(*arguments, cwd, **environment):
    """Run a command in a process of its own."""
    outer = {**os.environ, "NO_COLOR": "1", **{name: str(value) for name, value in environment.items()}}
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)], cwd=cwd, env=outer, capture_output=True, text=True, timeout=300, check=False
    )


def test_version_is_the_packages(tmp_path):
    assert program("--version", cwd=tmp_path).stdout.strip() == f"fedcontext {fc.__version__}"
    module = subprocess.run(
        [sys.executable, "-m", "fedcontext", "--version"], capture_output=True, text=True, check=True
    )
    assert module.stdout == f"fedcontext {fc.__version__}\n"


def test_run_prints_a_table_and_writes_records_and_the_toml_that_repeats_it(tmp_path):
    first = program("run", *FEW, "--algorithm", "folb", "--epochs", "1..3", "--mu", "0.5", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "folb" in first.stdout
    path = Path(first.stdout.split("records: ")[1].strip())
    head, rounds = fc.read_run(tmp_path / path)
    assert head["settings"]["epochs"] == [1, 3]
    assert [record.number for record in rounds] == [1, 2, 3]
    again = program("run", path.with_suffix(".toml"), "--quiet", "--out", "again", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert fc.read_run(tmp_path / "again" / path.name)[1] == rounds
    assert json.loads(again.stdout)["loss"] == rounds[-1].loss


@pytest.mark.parametrize("command", [(), ("data",)])
def test_a_group_without_a_command_prints_its_whole_help(tmp_path, command):
    bare, asked = call(*command, cwd=tmp_path), call(*command, "--help", cwd=tmp_path)
    assert (bare.stdout + bare.stderr).strip() == asked.stdout.strip()


HELP = {"run": "[default: runs]", "compare": "[x>=1]", "reproduce": "[default: docs]", "report": "[required]"}
HELP |= {
    "export": "[required]",
    "algorithms": "",
    "data": "",
    "data list": "",
    "data fetch": "mnist or femnist [required]",
}
HELP |= {"data where": "", "leaderboard": "[default: runs/leaderboard]", "recommend": "", "tune": "[required]"}


@pytest.mark.parametrize("command", ["rnu", "data ftch", "run --ronds 3"])
def test_a_name_for_a_misspelt_one_is_suggested_once(command):
    printed = call(*command.split()).stderr
    assert printed.lower().count("did you mean") == 1, printed


@pytest.mark.parametrize(("command", "excerpt"), HELP.items())
def test_help_shows_defaults_without_escapes(command, excerpt, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fedcontext", *command.split(), "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    text = capsys.readouterr().out
    assert "Usage: " in text
    assert "--json is given" not in " ".join(text.split()) or "  --json " in text
    assert excerpt in " ".join(text.split())
    assert "\\" not in text


def test_options_win_over_the_file(tmp_path):
    (tmp_path / "mine.toml").write_text('rounds = 2\nalgorithm = "fedavg"\nseed = 4\n')
    done = call("run", "mine.toml", *FEW, "--json", cwd=tmp_path)
    head, rounds = fc.read_run(tmp_path / json.loads(done.stdout)["records"])
    assert len(rounds) == 3
    assert (head["settings"]["algorithm"], head["settings"]["seed"]) == ("fedavg", 4)


def settings_of(*arguments, cwd):
    """The settings in the records of `fedcontext run`."""
    done = call("run", *FEW, "--json", *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return fc.read_run(cwd / json.loads(done.stdout)["records"])[0]["settings"]


def test_where_there_are_fewer_devices_than_train_by_default_all_do_and_the_files_say_so(tmp_path):
    few = ("--dataset", "synthetic-1-1-8", "--algorithm", "fedavg", "--quiet", "--json", "--resume")
    done = json.loads(call("run", *FEW, *few, cwd=tmp_path).stdout)
    head, rounds = fc.read_run(tmp_path / done["records"])
    assert head["settings"]["devices_per_round"] == 8
    assert [sorted(each.devices) for each in rounds] == [list(range(8))] * 3
    toml = Path(done["records"]).with_suffix(".toml")
    assert json.loads(call("run", toml, "--quiet", "--json", cwd=tmp_path).stdout)["records"] == done["records"]
    longer = json.loads(call("run", *FEW, *few, "--rounds", "4", cwd=tmp_path).stdout)
    assert fc.read_run(tmp_path / longer["records"])[1][:3] == rounds
    refused = call("run", *FEW, *few, "--devices-per-round", "10", cwd=tmp_path)
    assert "devices_per_round must be between 1 and 8 (all devices), got 10" in refused.stderr


def test_each_data_set_of_a_comparison_has_its_own_cohort(tmp_path):
    options = ("--dataset", "synthetic-1-1-8,synthetic-1-1", "--algorithms", "fedavg", "--seeds", "0", "--jobs", "1")
    done = json.loads(call("compare", *FEW, *options, "--json", cwd=tmp_path).stdout)
    heads = [fc.read_run(tmp_path / each["fedavg"][0]["records"])[0] for each in done.values()]
    assert [head["settings"]["devices_per_round"] for head in heads] == [8, 10]


def test_tuned_settings_of_few_devices_can_be_run(tmp_path):
    command = ("tune", *FEW, "--dataset", "synthetic-1-1-8", "--grid", "epochs=1,2", "--seeds", "1", "--jobs", "1")
    (tmp_path / "best.toml").write_text(call(*command, "--quiet", cwd=tmp_path).stdout)
    assert settings_of("best.toml", cwd=tmp_path)["devices_per_round"] == 8


def test_every_setting_has_an_option_with_its_default_in_the_help(tmp_path):
    printed = " ".join(call("run", "--help", cwd=tmp_path, COLUMNS="500").stdout.split())
    for setting in fields(fc.Experiment):
        about = setting.metadata
        option = f"--{setting.name.replace('_', '-')} {about['check'].metavar}"
        assert f"{option} {about['help']}. [default: {about['default']}]" in printed


def test_the_text_of_every_default_is_a_value_with_the_same_effect():
    shown = {each.name: each.metadata["default"] for each in fields(fc.Experiment) if each.default is not None}
    assert fc.Experiment(**shown) == fc.Experiment()
    assert OPTIONS.keys() == asdict(fc.Experiment()).keys()


@pytest.mark.parametrize(
    ("options", "setting", "value"),
    [
        (["--lr", "0.2"], "learning_rate", 0.2),
        (["--lr=0.2"], "learning_rate", 0.2),
        (["--learning_rate", "0.2"], "learning_rate", 0.2),
        (["--num-rounds", "2"], "rounds", 2),
        (["--local_epochs", "1..2"], "epochs", [1, 2]),
        (["--clients-per-round", "4"], "devices_per_round", 4),
        (["--server-lr", "0.5", "--algorithm", "fedavg"], "server_learning_rate", 0.5),
    ],
)
def test_names_that_other_libraries_use_are_options_too(tmp_path, options, setting, value):
    assert settings_of(*options, cwd=tmp_path)[setting] == value


@pytest.mark.parametrize(("k2", "probes"), [("0", "cohort"), ("N", "all"), ("20", 20)])
def test_k2_is_the_papers_name_for_probes(tmp_path, k2, probes):
    assert settings_of("--k2", k2, cwd=tmp_path)["probes"] == probes


def test_one_option_turns_all_defences_off_also_those_of_a_file(tmp_path):
    (tmp_path / "all.toml").write_text(to_toml(asdict(fc.Experiment(max_update=2))))
    settings = settings_of("all.toml", "--defences", "none", "--outlier", "50", cwd=tmp_path)
    assert {name: settings[name] for name in asdict(OFF)} == {**asdict(OFF), "outlier": 50}
    (tmp_path / "none.toml").write_text('defences = "none"\n')
    settings = settings_of("none.toml", cwd=tmp_path)
    assert {name: settings[name] for name in asdict(OFF)} == asdict(OFF)


def test_a_file_overrides_a_preset_and_options_override_both(tmp_path):
    (tmp_path / "mine.toml").write_text('dataset = "synthetic-iid"\nprobes = 5\nsmoothness = 7\n')
    settings = settings_of("mine.toml", "--preset", "paper", "--smoothness", "9", cwd=tmp_path)
    assert (settings["dataset"], settings["probes"], settings["smoothness"]) == ("synthetic-iid", 5, 9)
    assert settings["probe_averaging"] == fc.presets.paper().probe_averaging != fc.Experiment().probe_averaging


@pytest.mark.filterwarnings("ignore:averaging has no effect")
@pytest.mark.parametrize("algorithm", fc.ALGORITHMS)
def test_a_setting_is_refused_exactly_where_it_has_no_effect(algorithm):
    usual = {"dataset": "synthetic-iid", "rounds": 2, "epochs": 2, "probes": 5, "pool": 3, "averaging": "samples"}
    others = {"mu": 2.0, "smoothness": 3.0, "server_momentum": 0.3, "byzantine": 0.1, "probes": 10, "pool": 5}
    others |= {"averaging": "mean", "probe_averaging": "mean", "gradient_averaging": "median", "gradient_bits": 1}
    others |= {"sketch": 5, "exchanges": 1, "max_gradient": 1, "max_samples": 1}
    rare = {
        "max_step": 1,
        "max_descent": 1,
        "max_concavity": 0.1,
        "max_uphill": 0.1,
    }  # may change nothing where they are used, too

    def results(**changed):
        records = fc.train(**{**usual, **changed}, algorithm=algorithm).records
        return [(each.loss, each.promised_change) for each in records]

    def changes(name, value):
        try:
            return results(**{name: value}) != as_usual
        except fc.FedcontextError:  # no sketches for this rule, in words of its own
            return True

    as_usual, unused = results(), unused_settings(algorithm)
    assert unused - set(rare) == {name for name, value in others.items() if not changes(name, value)}
    assert not any(changes(name, rare[name]) for name in unused & set(rare))


@pytest.mark.parametrize(
    "command",
    [
        ("compare", "--algorithms", "fedavg,fedavg-memory", "--exchanges", "1", "--averaging", "samples"),
        ("compare", "--max-concavity", "1", "--gradient-bits", "4"),
        ("run", "--algorithm", "fedavg", "--defences", "none"),
        ("tune", "--grid", "algorithm=fedavg,fednova", "--averaging", "samples", "--seeds", "1"),
    ],
)
def test_a_setting_that_one_algorithm_uses_is_accepted(tmp_path, command):
    done = call(*command, "--rounds", "1", "--epochs", "1", "--engine", "reference", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_warning_is_one_line_without_a_path_and_none_with_quiet(tmp_path, jobs):
    command = "compare", "--algorithms", "fedavg,fedavg-memory", "--seeds", "0", "--averaging", "samples"
    command += (*FEW, "--jobs", jobs)
    lines = program(*command, cwd=tmp_path).stderr.splitlines()
    about = {line for line in lines if "averaging" in line or ".py" in line or "Warning" in line}
    assert about == {"warning: averaging has no effect on rule 'contextual memory', which uses the plain mean"}
    assert program(*command, "--quiet", cwd=tmp_path).stderr == ""


def test_a_preset_leaves_the_algorithms_of_a_comparison(tmp_path):
    options = [
        "--preset",
        "paper",
        "--dataset",
        "synthetic-iid",
        "--algorithms",
        "fedavg,folb",
        "--seeds",
        "0",
        "--jobs",
        "1",
    ]
    assert list(json.loads(call("compare", *FEW, *options, "--json", cwd=tmp_path).stdout)) == ["fedavg", "folb"]


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_the_saved_model_is_that_of_the_last_round(tmp_path, suffix):
    path = tmp_path / "models" / f"model.{suffix}"
    assert call("run", *FEW, "--algorithm", "fedavg", "--save", path, cwd=tmp_path).returncode == 0
    load = np.load if suffix == "npz" else pytest.importorskip("safetensors.numpy").load_file
    *_, (state, _) = fc.prepare(fc.Experiment(rounds=3, engine="reference", algorithm="fedavg")).run()
    np.testing.assert_array_equal(load(path)["params"], state.params)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("jobs", [1, 2])
def test_compare_runs_all_algorithms_and_seeds(tmp_path, jobs):
    options = ("--algorithms", "fedavg,fedavg-contextual", "--seeds", "0,7", "--jobs", jobs, "--figure", "curves.png")
    done = call("compare", *FEW, *options, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result) == ["fedavg", "fedavg-contextual"]
    for name, runs in result.items():
        assert [run["seed"] for run in runs] == [0, 7]
        for run in runs:
            head, rounds = fc.read_run(tmp_path / run["records"])
            assert (head["settings"]["algorithm"], head["settings"]["seed"]) == (name, run["seed"])
            assert run["loss"] == rounds[-1].loss
    assert len(list((tmp_path / "runs").glob("*.jsonl"))) == 4
    assert (tmp_path / "curves.png").read_bytes()[1:4] == b"PNG"


def test_losses_of_a_run_that_diverges_are_written_in_short(tmp_path):
    options = ("--algorithms", "fedavg", "--seeds", "0,1", "--learning-rate", "1e8", "--jobs", "1")
    done = call("compare", *FEW, *options, cwd=tmp_path)
    row = next(line for line in done.stdout.splitlines() if line.startswith("fedavg"))
    assert re.fullmatch(r"\d\.\de\+\d\d±\d\.\de\+\d\d", row.split()[1]), done.stdout


@given(st.lists(st.floats(-999_999, 999_999), min_size=2, max_size=5))
def test_ordinary_figures_have_three_decimals_and_two_of_their_spread(values):
    assert mean_and_deviation(values) == f"{np.mean(values):z.3f}±{np.std(values):.2f}"
    assert mean_and_deviation(values[:1]) == f"{values[0]:z.3f}"


def reaching(*accuracies, loss=1.0):
    """Return the summaries of one run with these accuracies."""
    return [summarise([fc.RoundRecord(n, loss, accuracy) for n, accuracy in enumerate(accuracies, 1)])]


def test_a_tie_is_called_one():
    assert outcome({"a": reaching(0.9), "b": reaching(0.9, loss=0.5)}) == (
        "a and b reached 80 % accuracy after 1 round; the lowest final loss is 0.500, of b."
    )
    assert outcome({name: reaching(0.1, 0.6) for name in "abc"}) == (
        "All 3 reached 60 % accuracy after 2 rounds; the lowest final loss is 1.000, of a, b and c."
    )
    assert outcome({"a": reaching(0.1), "b": reaching(0.9), "c": reaching(0.9), "d": reaching(0.1, 0.9)}) == (
        "b and c reached 80 % accuracy after 1 round (d: 2, a: not reached); the lowest final loss is 1.000, "
        "of a, b, c and d."
    )
    assert outcome({"a": [summarise([])]}) == "No accuracy level was reached; no final loss is known."


def test_the_end_names_every_file_and_explains_the_table(tmp_path):
    pytest.importorskip("plotly")
    pytest.importorskip("tensorboard")
    options = (*FEW, "--algorithm", "fedavg", "--save", "m.npz", "--report", "r.html", "--track", "tensorboard")
    done = call("run", *options, cwd=tmp_path)
    legend, paths = done.stdout.splitlines()[-2:]
    assert re.fullmatch(r"records: runs/.*\.jsonl, model: m\.npz, report: r\.html, tracked: runs/tensorboard", paths)
    assert "swing: standard deviation of the accuracy over the last 20" in legend
    assert "loss rose: share of the evaluated rounds whose loss is above the one before" in legend
    options = (*FEW, "--algorithms", "fedavg", "--seeds", "0", "--jobs", 1, "--figure", "f.png", "--report", "r.html")
    assert call("compare", *options, cwd=tmp_path).stdout.endswith("records: runs, figure: f.png, report: r.html\n")


def test_what_rounds_to_zero_has_no_minus():
    assert [mean_and_deviation([value]) for value in (-0.0, -0.0004, -0.0006)] == ["0.000", "0.000", "-0.001"]


def test_a_run_with_faults_counts_the_replies_that_were_not_used(tmp_path):
    def counts(*options):
        done = json.loads(call("run", *FEW, "--json", *options, cwd=tmp_path).stdout)
        records = fc.read_run(tmp_path / done["records"])[1]
        assert done["excluded"] == sum(len(record.excluded) for record in records)
        assert done["clipped"] == sum(len(record.clipped) for record in records)
        return done["excluded"], done["clipped"]

    faults = ("--faults", "nan=0.3")
    excluded, clipped = counts(*faults)
    assert excluded
    line = f"replies: fedavg-memory {excluded} excluded, {clipped} clipped (the records have the reasons)\n"
    assert line in call("run", *FEW, *faults, cwd=tmp_path).stdout
    assert "excluded" not in call("run", *FEW, cwd=tmp_path).stdout


def test_lost_rounds_are_printed(tmp_path):
    few = (*FEW, "--algorithms", "fedavg,folb", "--seeds", "0,1", "--jobs", 2)
    for command, lost_by in (
        (("run", *FEW), "fedavg-memory 3 of 3"),
        (("compare", *few), "fedavg 6 of 6, folb 6 of 6"),
    ):
        lost = call(*command, "--deadline", "1e-6", cwd=tmp_path)
        assert f"rounds lost (too few usable replies, the model was kept): {lost_by}\n" in lost.stdout
        assert "lost" not in call(*command, cwd=tmp_path).stdout
    assert json.loads(call("run", *FEW, "--deadline", "1e-6", "--json", cwd=tmp_path).stdout)["lost"] == 3


def test_algorithms_and_data_are_listed(tmp_path):
    listed = json.loads(call("algorithms", "--json", cwd=tmp_path).stdout)
    by_name = {row["name"]: row for row in listed}
    assert by_name["folb"]["needs"] == "own gradients"
    assert by_name["fedadam"]["server"] == "fedadam"
    assert (by_name["scaffold"]["keeps"], by_name["fedavg"]["keeps"]) == ("one model", "nothing")
    assert by_name["oracle-span"]["oracle"] == "looks at all data"
    assert "fedprox-expected" in call("algorithms", cwd=tmp_path).stdout
    shown = call("data", "list", cwd=tmp_path).stdout
    assert all(name in shown for name in NAMES)
    printed = " ".join(call("run", "--help", cwd=tmp_path).stdout.split()).replace("- ", "-")  # names are hyphenated
    assert f"Data set: {', '.join(NAMES)}." in printed
    (tmp_path / "mnist.npz").touch()
    where = call("data", "where", "mnist", cwd=tmp_path, FEDCONTEXT_DATA=str(tmp_path))
    assert str(tmp_path / "mnist.npz") in where.stdout


BAD = {
    "unknown option": (["run", "--speed", "3"], "No such option"),
    "unknown algorithm": (["run", "--algorithm", "fedsgd"], "algorithm must be one of fedavg, fedprox"),
    "unknown data set": (
        ["run", "--dataset", "cifar"],
        f"dataset must be one of {', '.join(NAMES)}, got 'cifar'; your own data run from Python only, with data=...",
    ),
    "a range of seeds to tune on": (["tune", "--grid", "epochs=1..5,5", "--seeds", "0-2"], "not a range, got '0-2'"),
    "a range of seeds": (
        ["compare", "--seeds", "0..2"],
        "seeds must be comma-separated values such as 0,1,2 and not a range, got '0..2'",
    ),
    "misspelt data set": (
        ["run", "--dataset", "minst"],
        "dataset 'minst' is unknown, did you mean mnist? dataset must",
    ),
    "data set with underscores": (["run", "--dataset", "synthetic_1_1"], ", did you mean synthetic-1-1?"),
    "a LEAF folder": (["run", "--dataset", "leaf"], "'leaf' is unknown, did you mean leaf:leaf?"),
    "another folder": (["run", "--dataset", "leaf/train"], "got 'leaf/train'; your own data run from Python only"),
    "a LEAF folder without a name": (["run", "--dataset", "leaf:"], "dataset 'leaf:' has no path: write leaf:PATH"),
    "misspelt algorithm": (
        ["run", "--algorithm", "fedavg-contxtual"],
        "algorithm 'fedavg-contxtual' is unknown, did you mean fedavg-contextual? algorithm must be one of fedavg,",
    ),
    "memory": (["run", "--algorithm", "memory"], "'memory' is unknown, did you mean fedavg-memory? algorithm must"),
    "the rule's name": (["run", "--algorithm", "contextual-memory"], ", did you mean fedavg-memory? algorithm must"),
    "misspelt oracle": (["run", "--algorithm", "oracle-memry"], ", did you mean oracle-memory? algorithm must"),
    "misspelt attack": (
        ["run", "--attack", "sign-flop=0.3"],
        "attack: 'sign-flop' is unknown, did you mean sign-flip? attack must be shares from 0 to 1",
    ),
    "share of an attack": (
        ["run", "--attack", "sign-flip=3"],
        "attack: the share of sign-flip must be from 0 to 1, got '3'. attack must be",
    ),
    "attack without a share": (["run", "--attack", "sign-flip"], "attack: 'sign-flip' has no share."),
    "missing LEAF folder": (["run", "--dataset", "leaf:nowhere"], "no LEAF .json file found"),
    "negative rounds": (["run", "--rounds", "-1"], "rounds must be an integer of at least 1, got '-1'"),
    "word for a number": (["run", "--rounds", "many"], "rounds must be an integer of at least 1, got 'many'"),
    "too many devices": (["run", "--devices-per-round", "31"], "devices_per_round must be between 1 and 30"),
    "defences": (["run", "--defences", "some"], "defences must be none, or fc.Defences(...) in Python, got 'some'"),
    "k2 word": (
        ["run", "--k2", "some"],
        "k2 must be 0 (the cohort), N (all devices) or a number of devices, got 'some'",
    ),
    "k2 and probes": (["run", "--k2", "0", "--probes", "5"], "--probes and --k2 are the same setting"),
    "probes": (["run", "--probes", "some"], "probes must be an integer of at least 1, cohort or all, got 'some'"),
    "pool": (["run", "--pool", "N"], "pool must be an integer of at least 0 or all, got 'N'"),
    "preset": (["run", "--preset", "best"], "preset must be one of paper, got 'best'"),
    "model file": (["run", "--save", "model.pt"], "a model file must end in .npz or .safetensors, got model.pt"),
    "over-selection": (["run", "--over-select", "nan"], "over_select must be a number of at least 0"),
    "mu of a later algorithm": (["compare", "--mu", "-1"], "mu must be a number of at least 0"),
    "everyone on demand": (
        ["run", "--dataset", "synthetic-1-1-200", "--probes", "all"],
        "set probes to cohort or a number below 200, devices_per_round and pool to fewer together",
    ),
    "out is a file": (["run", "--out", "odd.toml", "--rounds", "1"], "odd.toml"),
    "grid of one": (["tune", "--algorithm", "fedprox", "--grid", "mu=5"], "grid must have at least two combinations"),
    "epochs": (
        ["run", "--epochs", "5..1"],
        "epochs must be an integer of at least 1 or an ascending range such as 1..20, got '5..1'",
    ),
    "epochs word": (["run", "--epochs", "1-20"], "epochs must be an integer"),
    "epochs beyond 64 bits": (
        ["run", "--epochs", "9223372036854775808"],
        "epochs must be at most 1000000, got '9223372036854775808'",
    ),
    "too many synthetic devices": (["run", "--dataset", "synthetic-1-1-3000000000"], "needs N from 1 to 10000000"),
    "five thousand digits": (["run", "--rounds", "9" * 5_000], "rounds must be an integer of at least 1, got '9999"),
    "a long word for a number": (["compare", "--jobs", "9" * 5_000], "Invalid value for '--jobs': '9999"),
    "a long option": (["run", "--" + "x" * 5_000], "No such option"),
    "a long command": (["x" * 5_000], "No such command"),
    "batch size": (["run", "--batch-size", "0"], "batch_size must be an integer"),
    "learning rate": (["run", "--learning-rate", "-1"], "learning_rate must be a positive number"),
    "mu": (["run", "--algorithm", "fedprox", "--mu", "-1"], "mu must be a number of at least 0"),
    "smoothness": (["run", "--smoothness", "0"], "smoothness must be a positive number, 1/lr or measured, got '0'"),
    "smoothness word": (
        ["run", "--smoothness", "steep"],
        "smoothness must be a positive number, 1/lr or measured, got 'steep'",
    ),
    "averaging": (["run", "--averaging", "median"], "averaging must be mean or samples"),
    "deadline": (["run", "--deadline", "-1"], "deadline must be"),
    "engine": (["run", "--engine", "warp"], "engine must be one of"),
    "fleet": (["run", "--fleet", "warp"], "fleet must be even or edge"),
    "no file": (["run", "nowhere.toml"], "nowhere.toml: cannot be read"),
    "broken file": (["run", "broken.toml"], "broken.toml: cannot be read"),
    "unknown setting": (
        ["run", "odd.toml"],
        "odd.toml: unknown setting 'speed', did you mean seed?",
    ),
    "setting without effect": (["run", "--mu", "5"], "mu has no effect on algorithm 'fedavg-memory' (got '5'): leave"),
    "setting without effect on any": (
        ["compare", "--algorithms", "fedavg,krum", "--smoothness", "5"],
        "smoothness has no effect on algorithm 'fedavg' and 'krum'",
    ),
    "averaging of the rule with memory": (
        ["run", "--averaging", "samples"],
        "averaging has no effect on algorithm 'fedavg-memory' (got 'samples'): leave",
    ),
    **{
        f"{option} of {algorithm}": (
            ["run", "--algorithm", algorithm, option, value],
            f"{option.removeprefix('--').replace('-', '_')} has no effect on algorithm '{algorithm}' (got '{value}')",
        )
        for algorithm, options in {
            "fedavg": ["--exchanges 1", "--gradient-bits 4", "--sketch 5", "--gradient-averaging median"],
            "fedprox": ["--max-descent 3", "--max-gradient 2", "--probe-averaging mean"],
            "fedavg-contextual": ["--exchanges 1", "--max-concavity 1", "--max-step 2"],
        }.items()
        for option, value in map(str.split, options)
    },
    "setting without effect on the default comparison": (
        ["compare", "--byzantine", "0.1"],
        "byzantine has no effect on",
    ),
    "grid without effect": (["tune", "--algorithm", "fedavg", "--grid", "mu=1,2"], "mu has no effect on algorithm"),
    "unknown setting of a grid": (["tune", "--grid", "server_lr=1"], "'server_lr', did you mean server_learning_rate?"),
    "setting that is like no other": (
        ["tune", "--grid", "xyz=1"],
        "unknown setting 'xyz'. `fedcontext run --help` lists all",
    ),
    "defences in a file": (
        ["run", "off.toml"],
        "off.toml: defences must be none, or fc.Defences(...) in Python, got 'off'",
    ),
    "seeds": (["compare", "--seeds", "0,,1"], "seeds must be distinct comma-separated values"),
    "same seed": (["compare", "--seeds", "1,1"], "seeds must be distinct comma-separated values"),
    "algorithms": (["compare", "--algorithms", "fedavg,fedsgd"], "algorithm must be one of"),
    "no jobs": (["compare", "--jobs", "0"], "Invalid value for '--jobs': 0 is not in the range x>=1"),
    "less than no jobs": (["reproduce", "weights", "--jobs", "-1"], "Invalid value for '--jobs': -1 is not in"),
    "picture": (["compare", "--figure", "curves.gif"], "figure must end in"),
    "picture in a file": (["compare", "--figure", "odd.toml/curves.png"], "figure cannot be written"),
    "experiment": (["reproduce", "everything"], "experiment must be one of"),
    "no data": (["run", "--dataset", "mnist"], "fedcontext data fetch mnist"),
    "unknown fetch": (["data", "fetch", "cifar"], "data set with a file must be one of mnist, femnist"),
    "entrant": (["leaderboard", "--entrants", "memry"], "entrant 'memry' is unknown, did you mean memory?"),
    "task": (
        ["stress", "--tasks", "mnst"],
        "task 'mnst' is unknown, did you mean mnist? task must be one of synthetic-1-1, mnist, cnn-mnist-30",
    ),
    "stress into a file": (["stress", "--quick", "--out", "odd.toml"], "odd.toml: must be a directory"),
    "leaderboard into a file": (["leaderboard", "--quick", "--out", "odd.toml"], "odd.toml: must be a directory"),
    "tune into a file": (["tune", "--grid", "mu=1", "--out", "odd.toml"], "odd.toml: must be a directory"),
    "below a file": (["run", "--out", "odd.toml/a/b"], "odd.toml: must be a directory for output files, and is not"),
    "uplink nan": (["recommend", "--uplink", "nan"], "uplink must be a positive multiple of FedAvg's bytes"),
    "uplink -1": (["recommend", "--uplink", "-1"], "uplink must be a positive multiple of FedAvg's bytes"),
    "report over notes": (["run", "--report", "odd.toml"], "odd.toml: exists and is not a report of fedcontext"),
    "leaderboard over notes": (["leaderboard", "--report", "odd.toml"], "odd.toml: exists and is not a report"),
    "claims without runs": (["reproduce", "claims"], "run `fedcontext reproduce all"),
}


@pytest.mark.parametrize("quiet", [False, True])
def test_progress_without_a_terminal_is_a_line_now_and_then(tmp_path, quiet, monkeypatch, capsys):
    monkeypatch.setattr("fedcontext.callbacks.progress.LOG_SECONDS", 0.0)
    command = ["compare", "--rounds", "1", "--seeds", "0,1", "--algorithms", "fedavg", "--jobs", "1"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedcontext", *command, *["--quiet"] * quiet])
    with pytest.raises(SystemExit, match="0"):
        main()
    lines = [line.partition(" loss")[0] for line in capsys.readouterr().err.splitlines()]
    expected = ["2 runs: 1 of 2 rounds; fedavg seed 0", "2 runs: 2 of 2 rounds; fedavg seed 1"]
    assert lines == ([] if quiet else expected)


@pytest.mark.parametrize("case", BAD)
def test_errors_are_one_or_two_lines_and_leave_no_file(tmp_path, case, monkeypatch, capsys):
    arguments, message = BAD[case]
    (tmp_path / "broken.toml").write_text("rounds = ")
    (tmp_path / "odd.toml").write_text("speed = 3")
    (tmp_path / "off.toml").write_text('defences = "off"')
    (tmp_path / "leaf" / "train").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDCONTEXT_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "argv", ["fedcontext", *arguments])
    load_dataset.cache_clear()
    with pytest.raises(SystemExit) as exit_:
        main()
    printed = capsys.readouterr()
    words = " ".join(printed.err.replace("│", " ").split())
    assert exit_.value.code == 2
    assert message in words
    assert len(words) < 500
    assert printed.out == ""
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("module", ["numpy", "typer", "fedcontext.cli.run", "fedcontext.engines.numba.engine"])
def test_an_interrupt_while_modules_load_ends_without_a_traceback(tmp_path, module):
    script = f"""
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.meta_path.insert(0, Interrupt())
from fedcontext.cli import main
main()
"""
    command = [sys.executable, "-c", script, "run", "--engine", "numba", "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


NO_CHECKPOINT = "there is no checkpoint to continue from: with --resume one is written after every round"


def interrupted(*arguments, cwd, runs, says):
    """Return the records of a command that is interrupted once so many runs have a few rounds, and says how to go on."""
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a background job ignores it
    command = [sys.executable, "-c", f"{program}; {PROGRAM[-1]}", *arguments]
    command += ["--rounds", "100000", "--engine", "reference", "--quiet"]
    with subprocess.Popen(command, cwd=cwd, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 90
            while sum(file.read_text().count("\n") > 3 for file in cwd.glob("runs/*.jsonl")) < runs:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert f"interrupted: completed rounds are in runs; {says}\n" in errors
    assert "Traceback" not in errors
    return sorted(cwd.glob("runs/*.jsonl"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], NO_CHECKPOINT),
        (["--resume"], "start the same command again to continue"),
    ],
)
def test_an_interrupt_leaves_complete_records_behind(tmp_path, options, says):
    (path,) = interrupted("run", *options, cwd=tmp_path, runs=1, says=says)
    assert path.read_text().endswith("}\n")
    assert len(fc.read_run(path)[1]) >= 3


def test_an_interrupt_ends_a_comparison_and_its_workers(tmp_path):
    paths = interrupted("compare", "--jobs", "2", cwd=tmp_path, runs=2, says=NO_CHECKPOINT)
    sizes = [path.stat().st_size for path in paths]
    time.sleep(0.5)
    assert sizes == [path.stat().st_size for path in sorted(tmp_path.glob("runs/*.jsonl"))]


@pytest.mark.parametrize(("every", "rose"), [(1, "0%"), (2, "-")])
def test_how_often_the_loss_rose_is_a_dash_where_one_round_was_evaluated(tmp_path, every, rose):
    done = call("run", "--rounds", 2, "--eval-every", every, "--out", tmp_path)
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("fedavg-memory  "))
    assert row.split()[-3] == rose


@pytest.mark.parametrize("options", [(), ("--levels", "0.9,0.4")], ids=["default", "chosen"])
def test_the_report_of_a_command_has_the_levels_of_its_table(tmp_path, options):
    algorithms = ("--algorithms", "fedavg,fedavg-memory", "--seeds", "0", "--jobs", 1)
    done = call("compare", "--rounds", 8, *algorithms, *options, "--report", "page.html", cwd=tmp_path)
    (outcome,) = (line for line in done.stdout.splitlines() if "% accuracy after" in line)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert outcome in page
    assert re.search(r'"levels":(\[.*?\])', page)[1] == ("[0.9,0.4]" if options else "[0.5,0.6,0.7,0.8]")


def test_the_levels_of_the_table_can_be_chosen(tmp_path):
    command = "run", "--rounds", 4, "--algorithm", "fedavg", "--out", "runs"
    done = call(*command, "--levels", "0.25,0.05", cwd=tmp_path)
    assert "25/5%" in done.stdout
    assert list(json.loads(call(*command, "--levels", "0.25", "--json", cwd=tmp_path).stdout)["rounds_to"]) == ["0.25"]
    for wrong in ("85", "0.5,x", "0.5,0.5", ""):
        refused = call(*command, "--levels", wrong, cwd=tmp_path)
        assert refused.returncode == 2
        assert "levels must be distinct comma-separated" in refused.stderr


def test_a_comparison_that_resumes_continues_each_run_and_equals_one_without_a_break(tmp_path):
    command = "compare", "--algorithms", "fedavg,fedavg-memory", "--seeds", "3", "--rounds"
    call(*command, 2, "--resume", "--jobs", 1, "--out", "resumed", cwd=tmp_path)
    done = program(*command, 4, "--resume", "--jobs", 2, "--out", "resumed", cwd=tmp_path)
    assert done.stderr.count("continuing after round 2 of resumed") == 2
    call(*command, 4, "--jobs", 1, "--out", "once", cwd=tmp_path)
    names = sorted(path.name for path in (tmp_path / "once").glob("*.jsonl"))
    assert len(names) == 2
    for name in names:
        resumed, once = (fc.read_run(tmp_path / folder / name)[1] for folder in ("resumed", "once"))
        assert [(each.number, each.loss) for each in resumed] == [(each.number, each.loss) for each in once]


def test_an_interrupt_while_workers_load_ends_without_a_traceback(tmp_path):
    """Ctrl-C reaches all processes of a terminal: here each worker that loads sends it, so it comes twice."""
    (tmp_path / "sitecustomize.py").write_text("""
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "fedcontext.runner" and "--multiprocessing-fork" in sys.orig_argv:
            os.killpg(0, signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.meta_path.insert(0, Interrupt())
""")
    command = [*PROGRAM, "compare", "--rounds", "100000", "--engine", "reference", "--quiet", "--jobs", "2"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},  # a thread of its own may take the signal
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors


def test_the_core_runs_without_any_extra(tmp_path):
    """Modules set to None stand in for an environment that has NumPy, Typer and Rich alone."""
    blocked = ("matplotlib", "torch", "jax", "numba", "h5py", "ray", "flwr", "plotly", "pandas", "safetensors")
    script = f"""
import sys
sys.modules.update(dict.fromkeys({blocked!r}))  # a module that is None cannot be imported, nor found
from fedcontext.cli import main
main()
"""
    few = ("--rounds", "3", "--quiet")
    command = [sys.executable, "-c", script, "run", *few]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for arguments, sentence in (
        (("compare", *few, "--figure", "a.png"), "matplotlib is not installed: pip install 'fedcontext[plot]'"),
        (("report", "runs"), "plotly is not installed: pip install 'fedcontext[report]'"),
    ):
        command = [sys.executable, "-c", script, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2
        assert sentence in " ".join(done.stderr.split())
