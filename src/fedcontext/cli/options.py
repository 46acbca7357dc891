"""The options that commands share, each said once, and what they become."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fedcontext.console import err
from fedcontext.datasets import NAMES
from fedcontext.errors import FedcontextError
from fedcontext.experiment import Experiment, settings_from_toml

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
    str | None,
    typer.Option(help="softmax, logistic, mlp, cnn-small, cnn or resnet18 (engine 'torch'). [default: softmax]"),
]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda (engine 'torch'). [default: auto]")]
Momentum = Annotated[float | None, typer.Option(help="Of local SGD (engine 'torch'). [default: 0]")]
Decay = Annotated[float | None, typer.Option("--weight-decay", help="Of local SGD (engine 'torch'). [default: 0]")]
Clip = Annotated[float | None, typer.Option(help="Largest norm of a gradient (engine 'torch'); 0: any. [default: 0]")]
Out = Annotated[Path, typer.Option("--out", help="Directory for records and the TOML files that repeat the runs.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on standard error.")]
AsJson = Annotated[bool, typer.Option("--json", help="The result as JSON on standard output.")]
ReportPage = Annotated[Path | None, typer.Option("--report", help="HTML page that follows the rounds as they finish.")]
Track = Annotated[str, typer.Option(help="Send the numbers to tensorboard, mlflow or wandb too.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes. [default: one for each core]")]


class Command(TyperCommand):
    """A command with plain help: Typer marks brackets for Rich even where Rich does not print them."""

    def get_help(self, ctx: Any) -> str:
        """Return the help without those marks."""
        return super().get_help(ctx).replace(r"\[", "[")


def settings_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the TOML file and of the options, which win, ready for `Experiment`."""
    known = {field.name for field in dataclasses.fields(Experiment)} | {"algorithms", "seeds"}
    settings = settings_from_toml(given["file"]) if given["file"] else {}
    settings |= {name: value for name, value in given.items() if name in known and value is not None}
    return settings


def listed(name: str, given: str | list[object]) -> list[str]:
    """Return the values of a list with commas.

    >>> listed("seeds", "0, 1,2")
    ['0', '1', '2']
    """
    texts = [str(text).strip() for text in (given.split(",") if isinstance(given, str) else given)]
    if not all(texts) or len(set(texts)) < len(texts) or not texts:
        raise FedcontextError(f"{name} must be different values with commas between, got {given!r}")
    return texts


def whole(name: str, text: str) -> int:
    """Return a whole number, or name the option that it is not one of.

    >>> whole("k2", "10")
    10
    """
    try:
        return int(text)
    except ValueError:
        raise FedcontextError(f"{name} must be a whole number, got {text!r}") from None


@contextmanager
def interruptible(out_dir: Path) -> Iterator[None]:
    """End the program with 130 on an interrupt, and say where the rounds that were done are."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(f"interrupted: the rounds that were done are in {out_dir}", style="yellow", highlight=False)
        raise typer.Exit(130) from None
