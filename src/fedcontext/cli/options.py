"""Command-line options: one for each setting of `Experiment`, and those that commands share."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
import re
import shlex
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fedcontext.algorithms import unused_settings
from fedcontext.console import err, print_line
from fedcontext.errors import FedcontextError, by_name, shown
from fedcontext.experiment import (
    SETTING_OF,
    SETTINGS,
    Experiment,
    check_names,
    checked,
    settings_from_toml,
    with_limits,
)
from fedcontext.files.storage import check_folder
from fedcontext.presets import PRESETS


def _silence_log(quiet: bool) -> bool:
    if quiet:
        logging.getLogger("fedcontext").setLevel(logging.ERROR)
    return quiet


File = Annotated[Path | None, typer.Argument(help="TOML file with settings; options override it.")]
Preset = Annotated[
    str | None,
    typer.Option(
        help=f"Settings to start from, which FILE and options override: {', '.join(PRESETS)} (without defences against faulty devices)."
    ),
]
K2 = Annotated[
    str | None, typer.Option(metavar="0|N|INTEGER", help="The paper's name for --probes: 0 is cohort, N is all.")
]
DefencesOff = Annotated[
    str | None,
    typer.Option(metavar="none", help="none turns off all defences except those given by their own option."),
]
Out = Annotated[Path, typer.Option("--out", help="Directory for records and the TOML files that repeat the runs.")]
Quiet = Annotated[bool, typer.Option("--quiet", callback=_silence_log, help="Print errors only.")]
QuietOrJson = Annotated[
    bool, typer.Option("--quiet", callback=_silence_log, help="Print errors only, and the result if --json is given.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
ReportPage = Annotated[Path | None, typer.Option("--report", help="HTML page that is updated while rounds finish.")]
Track = Annotated[str, typer.Option(help="Also log to tensorboard, mlflow or wandb.")]
COMPARED = "fedavg,fedprox,folb,fedadam,fedavg-contextual,fedavg-memory"  # unless others are given
CORES = os.cpu_count() or 1
Jobs = Annotated[int, typer.Option(min=1, show_default=False, help="Number of processes. [default: one per core]")]
REUSED = "start the same command again: runs that are complete are reused"  # said after an interrupt


class Command(TyperCommand):
    """A command that also takes the names that other libraries use, such as --lr, and underscores in options.

    Its help is plain: Typer escapes brackets for Rich even where Rich does not print them.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the arguments that are no options; the values of options are in the context."""
        flags = {flag for parameter in self.params for flag in parameter.opts}
        return super().parse_args(ctx, [_own_name(arg, flags) for arg in args])

    def get_help(self, ctx: Any) -> str:
        """Return the help without the escapes."""
        return super().get_help(ctx).replace(r"\[", "[")


def _own_name(argument: str, flags: Collection[str]) -> str:
    """Return an option of another name, such as --lr or --learning_rate=0.1, under its own; others unchanged."""
    flag, equals, value = argument.partition("=")
    own = flag_of(SETTING_OF.get(flag.removeprefix("--").replace("-", "_"), ""))
    return f"{own}{equals}{value}" if flag.startswith("--") and flag not in flags and own in flags else argument


def flag_of(setting: str) -> str:
    """Return the option for a setting.

    >>> flag_of("learning_rate")
    '--learning-rate'
    """
    return f"--{setting.replace('_', '-')}"


def option_for(setting: Field[Any]) -> Any:
    """Return the annotation of the option for a setting. Its value stays text: the setting's own check converts it."""
    about = setting.metadata
    help = f"{about['help']}. [default: {about['default']}]"
    return Annotated[str | None, typer.Option(flag_of(setting.name), metavar=about["check"].metavar, help=help)]


OPTIONS = {setting.name: option_for(setting) for setting in fields(Experiment)}


def takes_settings(options: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a command whose first argument is a dict of settings.

    The decorated command takes FILE, --preset, --k2, --defences and the ``options`` (annotations by name) in place of
    that argument; options override the file, and the file overrides the preset.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        annotations = {"file": File, "preset": Preset, **options, "k2": K2, "defences": DefencesOff}
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in annotations.items()
        ]
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        ]

        @functools.wraps(command)
        def parsed(**values: Any) -> None:
            given = {name: values.pop(name) for name in annotations}
            tried = parse_grid(values.get("grid", ())).get("algorithm", ())
            command(merged(options, tried, **given), **values)

        parsed.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
        parsed.__annotations__ = {each.name: each.annotation for each in (*shared, *own)}
        return parsed

    return decorate


def merged(
    known: Mapping[str, Any],
    tried: Sequence[str],
    file: Path | None,
    preset: str | None,
    k2: str | None,
    **options: str | None,
) -> dict[str, Any]:
    """Return the settings of the preset, overridden by those of the file, overridden by the options that were given.

    An option that none of the algorithms uses is refused: those ``tried`` by a grid or else those of the settings.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if k2 is not None:
        if "probes" in given:
            raise FedcontextError("--probes and --k2 are the same setting: give one of them")
        given["probes"] = probes_from(k2)
    base = by_name("preset", preset, PRESETS) if preset else {}
    settings = {name: value for name, value in base.items() if name in known}
    settings |= (settings_from_toml(file, {**dict.fromkeys(SETTINGS), **known}) if file else {}) | with_limits(given)
    usual = COMPARED if "algorithms" in known else Experiment().algorithm
    chosen = settings.get("algorithms", settings.get("algorithm", usual))
    check_used(given, tried or distinct("algorithms", chosen))
    return settings


def check_used(given: Mapping[str, Any], algorithms: Sequence[str]) -> None:
    """Raise an error for a setting that none of the algorithms uses.

    >>> check_used({"mu": "5"}, ["fedavg", "fedprox"])
    >>> check_used({"mu": "5"}, ["fedavg"])
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: mu has no effect on algorithm 'fedavg' (got '5'): leave it out
    """
    for name, value in given.items():
        if all(name in unused_settings(each) for each in algorithms):
            checked(name, value)  # a wrong value comes first
            names = " and ".join(f"'{each}'" for each in algorithms)
            raise FedcontextError(f"{name} has no effect on algorithm {names} (got {shown(value)}): leave it out")


def probes_from(k2: str) -> str:
    """Return the value of --probes for one of --k2.

    >>> probes_from("0"), probes_from("N"), probes_from("20")
    ('cohort', 'all', '20')
    """
    if k2 != "N" and not k2.isdecimal():
        raise FedcontextError(f"k2 must be 0 (the cohort), N (all devices) or a number of devices, got {shown(k2)}")
    return {"0": "cohort", "N": "all"}.get(k2, k2)


def distinct(name: str, given: object) -> list[str]:
    """Return the values of a comma-separated list, or of one from a TOML file.

    >>> distinct("seeds", "0, 1,2")
    ['0', '1', '2']
    """
    listed = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else [given]
    values = [str(value).strip() for value in listed if isinstance(value, str | int | float)]
    if not all(values) or not 0 < len(set(values)) == len(listed):
        raise FedcontextError(f"{name} must be distinct comma-separated values, got {shown(given)}")
    return values


def parse_grid(given: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each setting of a grid.

    >>> parse_grid(["mu=0.1,1"])
    {'mu': ['0.1', '1']}
    """
    pairs = [each.partition("=") for each in given]
    check_names([name for name, _, _ in pairs], source="--grid: ")
    return {name: distinct(f"--grid {name}", values) for name, _, values in pairs}


def seeds_from(given: object) -> list[str]:
    """Return the seeds of a comma-separated list, or of one from a TOML file.

    >>> seeds_from("0,1,2")
    ['0', '1', '2']
    """
    seeds = distinct("seeds", given)
    if any(re.fullmatch(r"\d+(\.\.|-)\d+", seed) for seed in seeds):
        raise FedcontextError(f"seeds must be comma-separated values such as 0,1,2 and not a range, got {shown(given)}")
    return seeds


def levels_from(given: str) -> tuple[float, ...]:
    """Return the accuracy levels of a comma-separated list.

    >>> levels_from("0.7,0.85")
    (0.7, 0.85)
    """
    try:
        levels = tuple(float(value) for value in distinct("levels", given))
    except ValueError:
        levels = (math.nan,)
    if not all(0 < level <= 1 for level in levels):
        raise FedcontextError(
            f"levels must be distinct comma-separated numbers above 0 and up to 1, got {shown(given)}"
        )
    return levels


def results_folder(out_dir: Path, docs: Path | None, quick: bool) -> Path:
    """Return where results go: quick ones into a folder of their own, and never into docs."""
    if quick and docs is not None:
        raise FedcontextError("--quick does not write docs: run without --quick or without --docs")
    folder = out_dir / "quick" if quick else out_dir
    for each in filter(None, (folder, docs)):
        check_folder(each)
    return folder


def command_line(command: str, options: Mapping[str, object]) -> str:
    """Return the command with the options that were given, as generated pages print it.

    >>> command_line("stress", {"quick": True, "tasks": "mnist", "device": None, "docs": "my docs"})
    "fedcontext stress --quick --tasks mnist --docs 'my docs'"
    """
    given = {flag_of(name): value for name, value in options.items() if value}
    words = (flag if value is True else f"{flag} {shlex.quote(str(value))}" for flag, value in given.items())
    return " ".join((f"fedcontext {command}", *words))


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as an interrupt does."""


@contextmanager
def interruptible(out_dir: Path, how_to_continue: str) -> Iterator[None]:
    """Exit with 130 on an interrupt and 143 on SIGTERM, and print where the completed rounds are and how to go on."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except KeyboardInterrupt as error:
        word, code = ("terminated", 143) if isinstance(error, Terminated) else ("interrupted", 130)
        done = f"completed rounds are in {out_dir}; {how_to_continue}" if out_dir.exists() else "no round was completed"
        print_line(f"{word}: {done}", err, "yellow")
        raise typer.Exit(code) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: object) -> None:
    raise Terminated
