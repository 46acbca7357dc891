"""The commands that run experiments: one, or several side by side."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcontext.callbacks import follow
from fedcontext.cli.options import (
    K2,
    AsJson,
    Averaging,
    Batch,
    Clip,
    DataSeed,
    Dataset,
    Deadline,
    Decay,
    Device,
    Devices,
    EngineName,
    Epochs,
    Every,
    File,
    FleetName,
    Jobs,
    Model,
    Momentum,
    Mu,
    Out,
    Over,
    Pool,
    Probing,
    Quiet,
    Rate,
    ReportPage,
    Rounds,
    Smoothness,
    Track,
    interruptible,
    listed,
    settings_of,
    whole,
)
from fedcontext.cli.tables import Summaries, comparison, lost_rounds
from fedcontext.console import out
from fedcontext.errors import FedcontextError
from fedcontext.experiment import Experiment
from fedcontext.results.summary import Summary, summarise
from fedcontext.runner import run as run_one
from fedcontext.runner import run_all

PAPERS = "fedavg,fedprox,folb,fedavg-contextual,fedprox-contextual"


def run(
    file: File = None,
    dataset: Dataset = None,
    algorithm: Annotated[
        str | None, typer.Option(help="See `fedcontext algorithms`. [default: fedavg-contextual]")
    ] = None,
    rounds: Rounds = None,
    devices_per_round: Devices = None,
    k2: K2 = None,
    pool: Pool = None,
    epochs: Epochs = None,
    batch_size: Batch = None,
    learning_rate: Rate = None,
    mu: Mu = None,
    smoothness: Smoothness = None,
    averaging: Averaging = None,
    probe_averaging: Probing = None,
    fleet: FleetName = None,
    deadline: Deadline = None,
    over_select: Over = None,
    seed: Annotated[int | None, typer.Option(help="Decides devices, epochs, batches and fleet. [default: 0]")] = None,
    data_seed: DataSeed = None,
    eval_every: Every = None,
    engine: EngineName = None,
    model: Model = None,
    momentum: Momentum = None,
    weight_decay: Decay = None,
    clip: Clip = None,
    device: Device = None,
    out_dir: Out = Path("runs"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Checkpoint every round, and go on from the last checkpoint in --out.")
    ] = False,
    report: ReportPage = None,
    track: Track = "",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run one algorithm and write a record of every round."""
    settings = settings_of(locals())
    for several in ("algorithms", "seeds"):
        if several in settings:
            raise FedcontextError(f"{file}: {several} is for `fedcontext compare`; here it is {several[:-1]}")
    experiment = Experiment(**settings)
    with interruptible(out_dir), follow([experiment], out_dir, quiet=quiet, report=report, track=track) as on_round:
        records = run_one(experiment, out_dir, on_round, resume=resume)
    summary = summarise(records)
    if as_json:
        typer.echo(json.dumps(_plain(experiment, summary, out_dir)))
    else:
        _show(experiment.dataset, {experiment.algorithm: [summary]}, f"records: {_records(experiment, out_dir)}")


def compare(
    file: File = None,
    dataset: Dataset = None,
    algorithms: Annotated[str | None, typer.Option(help=f"Names with commas between. [default: {PAPERS}]")] = None,
    rounds: Rounds = None,
    devices_per_round: Devices = None,
    k2: K2 = None,
    pool: Pool = None,
    epochs: Epochs = None,
    batch_size: Batch = None,
    learning_rate: Rate = None,
    mu: Mu = None,
    smoothness: Smoothness = None,
    averaging: Averaging = None,
    probe_averaging: Probing = None,
    fleet: FleetName = None,
    deadline: Deadline = None,
    over_select: Over = None,
    seeds: Annotated[str | None, typer.Option(help="Numbers with commas between. [default: 0,1,2]")] = None,
    data_seed: DataSeed = None,
    eval_every: Every = None,
    engine: EngineName = None,
    model: Model = None,
    momentum: Momentum = None,
    weight_decay: Decay = None,
    clip: Clip = None,
    device: Device = None,
    out_dir: Out = Path("runs"),
    figure: Annotated[
        Path | None, typer.Option(help="Draw loss and accuracy into this file (.png, .pdf, .svg).")
    ] = None,
    jobs: Jobs = None,
    report: ReportPage = None,
    track: Track = "",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run several algorithms on the same devices, epochs and batches, and print them side by side."""
    settings = settings_of(locals())
    # the file of a single run names one algorithm and one seed
    names = listed("algorithms", settings.pop("algorithms", settings.pop("algorithm", PAPERS)))
    seeds_given = [
        whole("seeds", text) for text in listed("seeds", settings.pop("seeds", str(settings.pop("seed", "0,1,2"))))
    ]
    chosen = [Experiment(**{**settings, "algorithm": name, "seed": seed}) for name in names for seed in seeds_given]
    if figure is not None:
        from fedcontext.paper import figures

        figures.check_path(figure)
    with interruptible(out_dir), follow(chosen, out_dir, quiet=quiet, report=report, track=track) as on_round:
        results = run_all(chosen, out_dir, jobs or os.cpu_count() or 1, on_round)
    by_name: dict[str, list[Summary]] = defaultdict(list)
    plain: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for experiment, records in zip(chosen, results, strict=True):
        by_name[experiment.algorithm].append(summarise(records))
        plain[experiment.algorithm].append(_plain(experiment, by_name[experiment.algorithm][-1], out_dir))
    if figure is not None:
        figures.draw_curves(
            figure,
            chosen[0].dataset,
            {name: [r for e, r in zip(chosen, results, strict=True) if e.algorithm == name] for name in names},
        )
    if as_json:
        typer.echo(json.dumps(plain))
    else:
        _show(chosen[0].dataset, by_name, f"records: {out_dir}" + (f", picture: {figure}" if figure else ""))


def _show(dataset: str, summaries: Summaries, where: str) -> None:
    out.print(comparison(dataset, summaries))
    for line in filter(None, (lost_rounds(summaries), where)):
        out.print(line, soft_wrap=True, highlight=False)


def _records(experiment: Experiment, out_dir: Path) -> str:
    return str(out_dir / f"{experiment.name}.jsonl")


def _plain(experiment: Experiment, summary: Summary, out_dir: Path) -> dict[str, Any]:
    """Return a run for other programs: its seed, where its records are, and its summary with NaN as null."""
    values = {key: None if value != value else value for key, value in dataclasses.asdict(summary).items()}
    return {"seed": experiment.seed, "records": _records(experiment, out_dir), **values}
