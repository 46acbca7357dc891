"""The command that runs all methods under all faults and attacks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcontext.callbacks.progress import progress
from fedcontext.cli.options import CORES, REUSED, Jobs, Quiet, command_line, distinct, interruptible, results_folder
from fedcontext.cli.tables import plain_table
from fedcontext.console import out, print_line

OMITTED_COLUMNS = ("cells within 3 points", "rounds lost", "runs ended")  # the terminal table would be too wide


def stress(
    tasks: Annotated[str, typer.Option(metavar="NAMES", help="Comma-separated tasks. [default: all]")] = "",
    methods: Annotated[str, typer.Option(metavar="NAMES", help="Comma-separated methods. [default: all]")] = "",
    conditions: Annotated[
        str, typer.Option(metavar="NAMES", help="Comma-separated faults and attacks. [default: all]")
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="One task, one seed and a few faults and attacks: a minute on two cores.")
    ] = False,
    out_dir: Annotated[Path, typer.Option("--out", help="Directory for records and results.")] = Path("runs/stress"),
    docs: Annotated[Path | None, typer.Option(help="Also write reliability.md and reliability.json here.")] = None,
    device: Annotated[str, typer.Option(help="Compute device of the CNN: cpu or cuda.")] = "cpu",
    jobs: Jobs = CORES,
    quiet: Quiet = False,
) -> None:
    """Run methods under faults and attacks, and write reliability.md and reliability.json into --out.

    Runs whose records are complete are reused. Cells that are on the page already and are not run again stay.
    """
    from fedcontext.stress.cases import SEEDS, select
    from fedcontext.stress.cells import stress as run_all
    from fedcontext.stress.document import SUMMARY, publish, published, summary_rows

    folder = results_folder(out_dir, docs, quick)
    names = {"tasks": tasks, "methods": methods, "conditions": conditions}
    listed = {name: distinct(name, text) for name, text in names.items() if text}
    chosen, entrants, disturbances = select(**listed, quick=quick, device=device)
    given = {"quick": quick, **names, "device": "" if device == "cpu" else device, "docs": docs}
    for each in filter(None, (folder, docs)):
        published(each)  # a file that cannot be read is an error before the runs, not after them
    with interruptible(folder, REUSED):
        made = run_all(
            folder,
            jobs,
            tasks=chosen,
            methods=entrants,
            conditions=disturbances,
            seeds=SEEDS[:1] if quick else SEEDS,
            progress=lambda title, rounds: progress(title, rounds, quiet),
            command=command_line("stress", given),
        )
    paths = publish(made, folder) + (publish(made, docs) if docs else [])
    if quiet:
        return
    rows = list(summary_rows(made))
    columns = [name for name in rows[0] if name not in OMITTED_COLUMNS]
    out.print(plain_table(columns, [[row[name] for name in columns] for row in rows]))
    print_line(SUMMARY, style="dim")
    for path in paths:
        print_line(f"written: {path}")
