"""The commands that tune and compare algorithms, and recommend one: `leaderboard`, `tune` and `recommend`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcontext.callbacks.progress import progress
from fedcontext.cli.options import (
    CORES,
    OPTIONS,
    REUSED,
    Jobs,
    Out,
    Quiet,
    check_used,
    command_line,
    distinct,
    interruptible,
    levels_from,
    parse_grid,
    results_folder,
    seeds_from,
    takes_settings,
)
from fedcontext.cli.tables import plain_table
from fedcontext.console import out, print_line
from fedcontext.errors import FedcontextError
from fedcontext.experiment import experiment_from
from fedcontext.files.storage import check_folder, lock, write_text
from fedcontext.files.toml import to_toml
from fedcontext.leaderboard import entries
from fedcontext.runner import missing_experiments

Names = Annotated[str, typer.Option(metavar="NAMES", help="Comma-separated names. [default: all]")]


def leaderboard(
    group: Annotated[str, typer.Option(help="Tasks: convex, nonconvex or all.")] = "convex",
    tasks: Names = "",
    entrants: Names = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="A few tasks and entrants, fewer rounds and seeds: minutes on two cores.")
    ] = False,
    device: Annotated[str, typer.Option(help="Compute device of the nonconvex tasks, such as cuda.")] = "",
    out_dir: Annotated[Path, typer.Option("--out", help="Directory for records and results.")] = Path(
        "runs/leaderboard"
    ),
    docs: Annotated[
        Path | None, typer.Option(help="Also write leaderboard.md here, and update the data of `recommend`.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="HTML page about the runs on test seeds.")] = None,
    jobs: Jobs = CORES,
    quiet: Quiet = False,
) -> None:
    """Tune algorithms on some seeds, compare them on others, and write leaderboard.md and results.json into --out.

    Runs whose records are complete are reused.
    """
    from fedcontext.leaderboard import board, results
    from fedcontext.leaderboard.document import document

    out_dir = results_folder(out_dir, docs, quick)
    chosen = entries.select_tasks(group, _names("tasks", tasks), quick=quick, device=device)
    rivals = entries.select_entrants(_names("entrants", entrants), quick=quick)
    if report is not None:
        from fedcontext.report import check_page, write_report

        check_page(report)
    tuning, seeds = list(entries.TUNING_SEEDS), list(entries.TEST_SEEDS)
    if quick:
        tuning, seeds = tuning[:1], seeds[:2]
    path = out_dir / "results.json"
    given = {"quick": quick, "group": group, "tasks": tasks, "entrants": entrants, "device": device, "docs": docs}
    with interruptible(out_dir, REUSED), lock(path):
        kept = path if docs is None else results.PUBLISHED  # whose other rows stay
        earlier = results.read_results(kept) if kept.exists() and not quick else []
        made = board.compete(
            chosen,
            rivals,
            out_dir,
            jobs,
            tuning=tuning,
            seeds=seeds,
            progress=lambda title, rounds: progress(title, rounds, quiet),
            earlier=earlier,
        )
        made = [replace(each, commands=[command_line("leaderboard", given)]) for each in made]
        merged = results.merge(earlier, made)
        results.write_results(merged, path)
    page = document(merged, results.commands_of(merged))
    write_text(out_dir / "leaderboard.md", page)
    if docs is not None:
        results.write_results(merged, results.PUBLISHED)
        write_text(docs / "leaderboard.md", page)
    if report is not None:
        runs = board.all_test_experiments(chosen, rivals, tuning, seeds, out_dir)
        write_report([path for each in runs if (path := out_dir / f"{each.name}.jsonl").exists()], report)
    if not quiet:
        _print_ratios(results.ratios([each for each in merged if each.task in {task.name for task in chosen}]))
        out.print(f"written: {(docs or out_dir) / 'leaderboard.md'}", soft_wrap=True, highlight=False)


TUNE = {name: option for name, option in OPTIONS.items() if name != "seed"}


@takes_settings(TUNE)
def tune(
    settings: dict[str, Any],
    grid: Annotated[
        list[str], typer.Option(metavar="NAME=VALUE,...", help="Values of a setting to try; repeat it for several.")
    ],
    seeds: Annotated[str, typer.Option(metavar="INTEGERS", help="Comma-separated tuning seeds.")] = "100,101",
    levels: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Target accuracies; reaching them in the fewest rounds is best.")
    ] = "0.7,0.8,0.85",
    out_dir: Out = Path("runs/tuning"),
    jobs: Jobs = CORES,
    quiet: Quiet = False,
) -> None:
    """Try all combinations of a grid of settings, and print the best one as TOML."""
    from fedcontext.leaderboard.tuning import PENALTY, candidate_scores, run_missing, tuning_experiments
    from fedcontext.leaderboard.tuning import tune as choose

    check_folder(out_dir)
    task = entries.Task("tune", "", {**settings, "rounds": experiment_from(settings).rounds}, levels_from(levels))
    entrant = entries.Entrant("tune", {}, parse_grid(grid))
    tuning = [experiment_from({**settings, "seed": seed}).seed for seed in seeds_from(seeds)]
    candidates = [experiment_from({**settings, **each}) for each in entrant.candidates()]
    check_used(
        {name: values[0] for name, values in entrant.grid.items()}, list(dict.fromkeys(c.algorithm for c in candidates))
    )
    if len(candidates) == 1:
        raise FedcontextError("grid must have at least two combinations of values to choose from, got one")
    missing = missing_experiments(tuning_experiments(task, entrant, tuning), out_dir)
    with interruptible(out_dir, REUSED), progress("tune", sum(each.rounds for each in missing), quiet) as on_round:
        run_missing(missing, out_dir, jobs, on_round)
    best = choose(task, entrant, tuning, out_dir)
    scores = candidate_scores(task, entrant, tuning, out_dir)
    rows = [
        (*map(str, candidate.values()), f"{rounds:.1f}", f"{loss:.3f}", "best" if candidate == best else "")
        for candidate, (rounds, loss) in zip(entrant.candidates(), scores, strict=True)
    ]
    if not quiet:
        out.print(plain_table((*entrant.grid, "mean rounds", "final loss", ""), rows))
        percents = "/".join(f"{100 * level:g}" for level in task.levels)
        out.print(
            f"mean rounds: to {percents} % accuracy; a level that is not reached counts as {PENALTY:g} times all rounds"
        )
    chosen = experiment_from({**settings, **best})
    typer.echo(to_toml({name: getattr(chosen, name) for name in (*settings, *best)}), nl=False)


def recommend(
    uplink: Annotated[float, typer.Option(help="Largest uplink of a round, as a multiple of FedAvg's.")] = float("inf"),
    probes: Annotated[bool, typer.Option(help="Devices that do not train can send a gradient.")] = True,
    device_state: Annotated[bool, typer.Option(help="Devices can keep a model between rounds.")] = True,
    secure_aggregation: Annotated[
        bool, typer.Option("--secure-aggregation", help="The server sees only sums over devices.")
    ] = False,
    nonconvex: Annotated[bool, typer.Option("--nonconvex", help="The model is a deep network.")] = False,
    results: Annotated[
        Path | None, typer.Option(help="Results of `fedcontext leaderboard`. [default: the published ones]")
    ] = None,
) -> None:
    """Recommend the algorithm that needs the fewest rounds in the leaderboard among those you can run.

    Only rows with 10 devices a round are compared.
    """
    from fedcontext.leaderboard import recommendation
    from fedcontext.leaderboard.results import PUBLISHED, read_results

    constraints = recommendation.Constraints(uplink, probes, device_state, secure_aggregation, nonconvex)
    allowed = recommendation.recommend(read_results(results or PUBLISHED), constraints)
    entrant, ratio = allowed[0]
    print_line(
        f"{entrant.name}: {ratio.mean:.2f} times the rounds of the best tuned baseline (geometric mean of "
        f"{len(ratio.by_task)} tasks, worst {ratio.worst:.2f}), {ratio.uplink_round:.2f} times FedAvg's bytes a round"
    )
    print_line(recommendation.command_for(entrant))
    _print_ratios([each for _, each in allowed[1:]])
    if allowed[1:]:
        print_line("To run or tune the others:")
    for other, _ in allowed[1:]:
        print_line(f"{other.name}: {recommendation.command_for(other)}")


def _names(option: str, given: str) -> list[str]:
    return distinct(option, given) if given else []


def _print_ratios(rows: Sequence[Any]) -> None:
    titles = ("entrant", "rounds\nmean", "worst", "uplink\nmean", "worst", "uplink\na round")
    cells = [
        (
            row.entrant,
            *(f"{value:.2f}" for value in (row.mean, row.worst, row.uplink, row.worst_uplink, row.uplink_round)),
        )
        for row in rows
    ]
    if cells:
        out.print(plain_table(titles, cells))
