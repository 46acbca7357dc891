"""The commands that run experiments: one, or several side by side."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from fedcontext.callbacks import follow
from fedcontext.callbacks.trackers import tracked_to
from fedcontext.cli.options import (
    COMPARED,
    CORES,
    OPTIONS,
    AsJson,
    Jobs,
    Out,
    QuietOrJson,
    ReportPage,
    Track,
    distinct,
    interruptible,
    levels_from,
    seeds_from,
    takes_settings,
)
from fedcontext.cli.tables import LEGEND, comparison, excluded_replies, lost_rounds
from fedcontext.console import out, print_line
from fedcontext.experiment import Experiment, experiment_from
from fedcontext.records import RoundRecord
from fedcontext.results.diagnosis import diagnose, findings_over_seeds
from fedcontext.results.summary import LEVELS, outcome, summarise
from fedcontext.runner import run as run_one
from fedcontext.runner import run_all

SEEDS = "0,1,2"
DATASET = Experiment().dataset
DEFAULT_LEVELS = ",".join(map(str, LEVELS))
Runs: TypeAlias = dict[str, list[tuple[Experiment, list[RoundRecord]]]]  # by algorithm, one for each seed
LISTS = {
    "algorithms": Annotated[
        str | None, typer.Option(metavar="NAMES", help=f"Comma-separated algorithms. [default: {COMPARED}]")
    ],
    "seeds": Annotated[
        str | None, typer.Option(metavar="INTEGERS", help=f"Comma-separated seeds, one run each. [default: {SEEDS}]")
    ],
}
Resume: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--resume", help="Checkpoint every round, and continue from the checkpoints in --out, also with more rounds."
    ),
]
Levels: TypeAlias = Annotated[
    str,
    typer.Option(metavar="NUMBERS", help="Accuracies; the table and the report have the rounds to reach each of them."),
]
COMPARE = {**LISTS, **{name: option for name, option in OPTIONS.items() if f"{name}s" not in LISTS}}


@takes_settings(OPTIONS)
def run(
    settings: dict[str, Any],
    out_dir: Out = Path("runs"),
    save: Annotated[
        Path | None, typer.Option(help="Write the trained model to this file (.npz or .safetensors).")
    ] = None,
    resume: Resume = False,
    levels: Levels = DEFAULT_LEVELS,
    report: ReportPage = None,
    track: Track = "",
    quiet: QuietOrJson = False,
    as_json: AsJson = False,
) -> None:
    """Run one algorithm and write a record of every round."""
    experiment, chosen = experiment_from(settings), levels_from(levels)
    with (
        interruptible(out_dir, _how_to_continue(resume)),
        follow([experiment], out_dir, quiet=quiet, report=report, levels=chosen, track=track) as on_round,
    ):
        records = run_one(experiment, out_dir, on_round, resume=resume, save=save)
    if as_json:
        typer.echo(json.dumps(_as_json(experiment, records, out_dir, chosen)))
    elif not quiet:
        _print(experiment.dataset, {experiment.algorithm: [(experiment, records)]}, chosen)
        paths = {"records": _records_path(experiment, out_dir), "model": save, "report": report}
        _print_paths({**paths, "tracked": tracked_to(track, out_dir)})


@takes_settings(COMPARE)
def compare(
    settings: dict[str, Any],
    out_dir: Out = Path("runs"),
    figure: Annotated[
        Path | None, typer.Option(help="Draw loss and accuracy into this file (.png, .pdf, .svg).")
    ] = None,
    jobs: Jobs = CORES,
    resume: Resume = False,
    levels: Levels = DEFAULT_LEVELS,
    report: ReportPage = None,
    track: Track = "",
    quiet: QuietOrJson = False,
    as_json: AsJson = False,
) -> None:
    """Run several algorithms on the same devices, epochs and batches, and compare them.

    --dataset takes several names too, separated by commas: one table for each, and one figure.
    """
    experiments, chosen = _experiments(settings), levels_from(levels)
    if figure is not None:
        from fedcontext.paper import figures

        figures.check_path(figure)
    with (
        interruptible(out_dir, _how_to_continue(resume)),
        follow(experiments, out_dir, quiet=quiet, report=report, levels=chosen, track=track) as on_round,
    ):
        run_each = partial(run_one, resume=resume)
        results = run_all(experiments, out_dir, jobs, on_round, run=run_each)
    runs: dict[str, Runs] = defaultdict(lambda: defaultdict(list))
    for experiment, records in zip(experiments, results, strict=True):
        runs[experiment.dataset][experiment.algorithm].append((experiment, records))
    if figure is not None:
        curves = {
            dataset: {name: [records for _, records in pairs] for name, pairs in by_name.items()}
            for dataset, by_name in runs.items()
        }
        figures.draw_curves(figure, curves)
    if as_json:
        values = {dataset: _all_as_json(by_name, out_dir, chosen) for dataset, by_name in runs.items()}
        typer.echo(json.dumps(values if len(values) > 1 else next(iter(values.values()))))
    elif not quiet:
        for dataset, by_name in runs.items():
            _print(dataset, by_name, chosen)
        _print_paths(
            {"records": out_dir, "figure": figure, "report": report, "tracked": tracked_to(track, out_dir)},
        )


def _how_to_continue(resume: bool) -> str:
    if resume:
        return "start the same command again to continue"
    return "there is no checkpoint to continue from: with --resume one is written after every round"


def _experiments(settings: dict[str, Any]) -> list[Experiment]:
    """Return one experiment for each data set, algorithm and seed; the TOML file of a single run has one of each."""
    names = distinct("algorithms", settings.pop("algorithms", settings.pop("algorithm", COMPARED)))
    seeds = seeds_from(settings.pop("seeds", str(settings.pop("seed", SEEDS))))
    datasets = distinct("dataset", settings.pop("dataset")) if "dataset" in settings else [DATASET]
    return [
        experiment_from({**settings, "dataset": dataset, "algorithm": name, "seed": seed})
        for dataset in datasets
        for name in names
        for seed in seeds
    ]


def _print(dataset: str, by_name: Runs, levels: Sequence[float]) -> None:
    summaries = {name: [summarise(records, levels) for _, records in pairs] for name, pairs in by_name.items()}
    out.print(comparison(dataset, summaries))
    experiments = [each for pairs in by_name.values() for each, _ in pairs]
    faulty = any(each.faults != "none" or each.attack != "none" for each in experiments)
    lines = lost_rounds(summaries), excluded_replies(summaries, with_clipped=faulty), outcome(summaries)
    for line in filter(None, lines):
        print_line(line)
    for name, pairs in by_name.items():
        for line in findings_over_seeds({str(each.seed): diagnose(records, vars(each)) for each, records in pairs}):
            print_line(f"{name}: {line}", style="yellow")


def _print_paths(paths: Mapping[str, object]) -> None:
    """Print what the columns of the tables mean, and where everything was written."""
    print_line(LEGEND, style="dim")
    print_line(", ".join(f"{name}: {path}" for name, path in paths.items() if path))


def _all_as_json(by_name: Runs, out_dir: Path, levels: Sequence[float]) -> dict[str, Any]:
    return {name: [_as_json(*pair, out_dir, levels) for pair in pairs] for name, pairs in by_name.items()}


def _records_path(experiment: Experiment, out_dir: Path) -> str:
    return str(out_dir / f"{experiment.name}.jsonl")


def _as_json(
    experiment: Experiment, records: list[RoundRecord], out_dir: Path, levels: Sequence[float]
) -> dict[str, Any]:
    """Return a run's seed, the path of its records, its summary with NaN as null, and the findings about it."""
    values = dataclasses.asdict(summarise(records, levels))
    values = {key: None if value != value else value for key, value in values.items()}
    findings = [str(finding) for finding in diagnose(records, vars(experiment))]
    return {"seed": experiment.seed, "records": _records_path(experiment, out_dir), **values, "findings": findings}
