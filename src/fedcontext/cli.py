"""The command line: parse, call, print; no logic."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcontext import algorithms as table_of
from fedcontext import cli_report
from fedcontext.datasets import NAMES, files
from fedcontext.errors import FedcontextError
from fedcontext.experiment import Experiment, settings_from_toml
from fedcontext.runner import run as run_one
from fedcontext.runner import run_all
from fedcontext.summary import Summary, summarise
from fedcontext.terminal import comparison, err, listing, out, progress
from fedcontext.version import __version__
from fedcontext.watching import watching

PAPERS = "fedavg,fedprox,folb,fedavg-contextual,fedprox-contextual"

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
data_app = typer.Typer(
    help="The data sets: list them, fetch their files, or see where those are.", no_args_is_help=True
)
app.add_typer(data_app, name="data")

File = Annotated[Path | None, typer.Argument(help="TOML file with settings; options on the command line win.")]
Dataset = Annotated[str | None, typer.Option(help=f"One of {', '.join(NAMES)}. [default: synthetic-1-1]")]
Rounds = Annotated[int | None, typer.Option(help="Rounds; as published for the data set if not given.")]
Devices = Annotated[int | None, typer.Option("--devices-per-round", help="K, the devices that train. [default: 10]")]
K2 = Annotated[
    str | None, typer.Option(help="Probes for the gradient: a number, N for all, 0 for the cohort. [default: N]")
]
Pool = Annotated[
    str | None, typer.Option(help="Devices beside the cohort for the expected rules, N for all. [default: N]")
]
Epochs = Annotated[str | None, typer.Option(help="Local epochs: a number, or a range to draw from. [default: 1..20]")]
Batch = Annotated[int | None, typer.Option("--batch-size", help="Mini-batch of local SGD. [default: 10]")]
Rate = Annotated[float | None, typer.Option("--learning-rate", help="As published for the data set if not given.")]
Mu = Annotated[float | None, typer.Option(help="Proximal constant of FedProx and FOLB. [default: 0.1]")]
Smoothness = Annotated[str | None, typer.Option(help="β: a number, 1/lr (the paper's), or measured. [default: 1/lr]")]
Averaging = Annotated[str | None, typer.Option(help="FedAvg's and FedProx's: mean or samples. [default: mean]")]
Probing = Annotated[
    str | None, typer.Option("--probe-averaging", help="Of gradients: samples or mean. [default: samples]")
]
FleetName = Annotated[str | None, typer.Option("--fleet", help="Speeds and links: edge or even. [default: edge]")]
Deadline = Annotated[
    float | None, typer.Option(help="Seconds after which a round closes; 0 waits for all. [default: 0]")
]
Over = Annotated[
    float | None, typer.Option("--over-select", help="Ask this share more devices, keep the first. [default: 0]")
]
Every = Annotated[
    int | None, typer.Option("--eval-every", help="Evaluate every n-th round, and the last. [default: 1]")
]
DataSeed = Annotated[
    int | None, typer.Option("--data-seed", help="For generating or partitioning the data. [default: 0]")
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine", help="Who does the local work: reference, fast, ray or module. [default: fast where installed]"
    ),
]
Model = Annotated[
    str | None, typer.Option(help="softmax, logistic, cnn or resnet18 (engine module). [default: softmax]")
]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda (engine module). [default: auto]")]
Momentum = Annotated[float | None, typer.Option(help="Of local SGD (engine module). [default: 0]")]
Decay = Annotated[float | None, typer.Option("--weight-decay", help="Of local SGD (engine module). [default: 0]")]
Clip = Annotated[float | None, typer.Option(help="Largest norm of a gradient (engine module); 0: any. [default: 0]")]
Out = Annotated[Path, typer.Option(help="Directory for records and the TOML that repeats the run.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on standard error.")]
AsJson = Annotated[bool, typer.Option("--json", help="The result as JSON on standard output.")]
ReportPage = Annotated[Path | None, typer.Option("--report", help="HTML page that follows the rounds as they finish.")]
Track = Annotated[str, typer.Option(help="Send the numbers to tensorboard, mlflow or wandb too.")]
Jobs = Annotated[int, typer.Option(help="Processes; 0 takes one for each core.")]


def main() -> None:
    """Run the program: 0 done, 2 a mistake in what was asked, 130 interrupted."""
    try:
        app()
    except FedcontextError as error:
        err.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Federated learning with contextual aggregation."""
    if version:
        typer.echo(f"fedcontext {__version__}")
        raise typer.Exit


@app.command()
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
    out_dir: Annotated[
        Path, typer.Option("--out", help="Directory for records and the TOML that repeats the run.")
    ] = Path("runs"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Checkpoint every round, and go on from the last checkpoint in --out.")
    ] = False,
    report: ReportPage = None,
    track: Track = "",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run one algorithm and write a record of every round."""
    settings = _settings(locals())
    for several in ("algorithms", "seeds"):
        if several in settings:
            raise FedcontextError(f"{file}: {several} is for `fedcontext compare`; here it is {several[:-1]}")
    experiment = Experiment(**settings)
    with _interruptible(out_dir), watching([experiment], out_dir, quiet=quiet, report=report, track=track) as on_round:
        records = run_one(experiment, out_dir, on_round, resume=resume)
    path = out_dir / f"{experiment.name}.jsonl"
    if as_json:
        typer.echo(json.dumps({"records": str(path), **_plain(summarise(records))}))
    else:
        out.print(comparison(experiment.dataset, {experiment.algorithm: [summarise(records)]}))
        out.print(f"records: {path}", soft_wrap=True, highlight=False)


@app.command()
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
    out_dir: Annotated[
        Path, typer.Option("--out", help="Directory for records and the TOML files that repeat the runs.")
    ] = Path("runs"),
    figure: Annotated[
        Path | None, typer.Option(help="Draw loss and accuracy into this file (.png, .pdf, .svg).")
    ] = None,
    jobs: Jobs = 0,
    report: ReportPage = None,
    track: Track = "",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run several algorithms on the same devices, epochs and batches, and print them side by side."""
    settings = _settings(locals())
    names = _listed("algorithms", settings.pop("algorithms", PAPERS))
    seeds_given = [_int("seeds", text) for text in _listed("seeds", settings.pop("seeds", "0,1,2"))]
    chosen = [Experiment(**{**settings, "algorithm": name, "seed": seed}) for name in names for seed in seeds_given]
    if figure is not None:
        from fedcontext.paper import figures

        figures.check(figure)
    with _interruptible(out_dir), watching(chosen, out_dir, quiet=quiet, report=report, track=track) as on_round:
        results = run_all(chosen, out_dir, jobs or os.cpu_count() or 1, on_round)
    by_name: dict[str, list[Summary]] = defaultdict(list)
    for experiment, records in zip(chosen, results, strict=True):
        by_name[experiment.algorithm].append(summarise(records))
    if figure is not None:
        figures.draw_curves(
            figure,
            chosen[0].dataset,
            {name: [r for e, r in zip(chosen, results, strict=True) if e.algorithm == name] for name in names},
        )
    if as_json:
        typer.echo(json.dumps({name: [_plain(run) for run in runs] for name, runs in by_name.items()}))
    else:
        out.print(comparison(chosen[0].dataset, by_name))
        out.print(f"records: {out_dir}" + (f", picture: {figure}" if figure else ""), soft_wrap=True, highlight=False)


@app.command()
def algorithms(as_json: AsJson = False) -> None:
    """List the algorithms, and what each needs from devices beyond their updates."""
    knobs = table_of.Knobs(learning_rate=1, smoothness=1)
    rows = []
    for name, make in table_of.ALGORITHMS.items():
        made = make(knobs)
        local = "proximal SGD" if made.local.mu else "SGD"
        rows.append((name, local, made.rule.name, ", ".join(sorted(made.rule.needs)) or "nothing"))
    if as_json:
        typer.echo(json.dumps([dict(zip(("name", "local", "rule", "needs"), row, strict=True)) for row in rows]))
    else:
        out.print(listing(("algorithm", "devices run", "rule", "needs beyond updates"), rows))


@app.command()
def reproduce(
    experiment: Annotated[
        str, typer.Argument(help="variants, weights, comparison, rounds, or all; claims judges them.")
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="A few rounds of the first picture: under a minute each.")
    ] = False,
    out_dir: Annotated[Path, typer.Option("--out", help="Directory for records and figures.")] = Path("runs/paper"),
    docs: Annotated[Path, typer.Option(help="Where claims writes reproduction.md and its figures.")] = Path("docs"),
    jobs: Jobs = 0,
    quiet: Quiet = False,
) -> None:
    """Repeat the paper's experiments: records, figures (PNG and PDF), and with `claims` what became of its claims."""
    from fedcontext.paper import document, figures
    from fedcontext.paper.experiments import STUDIES, study_named
    from fedcontext.paper.reproduce import carry_out, draw, missing_runs, open_book

    figures.check(Path("figure.png"))
    if experiment == "claims":
        out.print(f"written: {document.write(out_dir, docs, quick)}", soft_wrap=True, highlight=False)
        return
    studies = list(STUDIES.values()) if experiment == "all" else [study_named(experiment)]
    for study in studies:
        lines = study.quick_lines() if quick else study.lines
        todo = missing_runs(lines, out_dir, quick)
        total = sum(run.rounds for run in todo)
        with _interruptible(out_dir), progress(study.name, total, quiet) as on_round:
            carry_out(todo, out_dir, jobs or os.cpu_count() or 1, on_round)
        for path in draw(study, open_book(lines, out_dir, quick), out_dir / "figures"):
            out.print(f"{study.name}: {path}", soft_wrap=True, highlight=False)


app.command()(cli_report.report)
app.command()(cli_report.export)


@data_app.command("list")
def data_list() -> None:
    """List the data sets by the names that --dataset takes."""
    rows = [(name, about, _at_hand(name)) for name, about in NAMES.items()]
    out.print(listing(("data set", "what it is", "at hand"), rows))


@data_app.command("fetch")
def data_fetch(name: Annotated[str, typer.Argument(help="mnist or femnist")], quiet: Quiet = False) -> None:
    """Download a data set into the cache, checked against its SHA-256."""

    def tell(done: int, total: int) -> None:
        if not quiet:
            err.print(f"\r{done / 1e6:.0f} of {total / 1e6:.0f} MB", end="")

    out.print(str(files.fetch(name, tell)), soft_wrap=True, highlight=False)


@data_app.command("where")
def data_where(name: Annotated[str | None, typer.Argument(help="mnist or femnist; all if not given")] = None) -> None:
    """Print where data files are, or how to get them."""
    for each in [name] if name else list(files.SOURCES):
        found = files.find(each) if name else files.where(each)
        out.print(f"{each}: {found or 'not here'}", soft_wrap=True, highlight=False)


def _at_hand(name: str) -> str:
    if name not in files.SOURCES:
        return "always" if name.startswith("synthetic") else ""
    return "yes" if files.where(name) else f"fedcontext data fetch {name}"


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the TOML file and of the options, which win, ready for `Experiment`."""
    known = {field.name for field in dataclasses.fields(Experiment)} | {"algorithms", "seeds"}
    settings = settings_from_toml(given["file"]) if given["file"] else {}
    settings |= {name: value for name, value in given.items() if name in known and value is not None}
    for name in ("k2", "pool"):
        if isinstance(settings.get(name), str) and settings[name] != "N":
            settings[name] = _int(name, settings[name])
    if isinstance(settings.get("epochs"), str):
        low, _, high = settings["epochs"].partition("..")
        settings["epochs"] = (_int("epochs", low), _int("epochs", high or low))
    return settings


def _listed(name: str, given: str | list[object]) -> list[str]:
    texts = [str(text).strip() for text in (given.split(",") if isinstance(given, str) else given)]
    if not all(texts) or len(set(texts)) < len(texts) or not texts:
        raise FedcontextError(f"{name} must be different values with commas between, got {given!r}")
    return texts


def _int(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise FedcontextError(f"{name} must be a whole number, got {text!r}") from None


def _plain(summary: Summary) -> dict[str, Any]:
    return {key: None if value != value else value for key, value in dataclasses.asdict(summary).items()}


@contextmanager
def _interruptible(out_dir: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        err.print(f"interrupted: the rounds that were done are in {out_dir}", style="yellow", highlight=False)
        raise typer.Exit(130) from None
