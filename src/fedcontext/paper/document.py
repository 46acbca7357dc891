"""docs/reproduction.md, written from the records: every claim, what was measured, and the verdict."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fedcontext.paper.claims import Claim, judge
from fedcontext.paper.experiments import SEEDS, STUDIES
from fedcontext.paper.figures import Book
from fedcontext.paper.reproduce import draw, open_book
from fedcontext.results.summary import LEVELS, median_rounds, summarise
from fedcontext.version import __version__

INTRODUCTION = """# What became of the paper's claims

Written by `fedcontext reproduce claims` from the records that `fedcontext reproduce all` makes (fedcontext {version}, {date},
seeds {seeds}). Do not edit: change the code and run it again.

Common to all runs: K = 10 devices a round drawn uniformly without replacement, local epochs uniform in 1..20, mini-batches of 10, softmax
regression from zero, stragglers kept, no deadline; the same seed gives all algorithms the same devices, epochs and batches. Unless a setting says
otherwise: K2 = N, gradients averaged by samples (so that K2 = N is the exact gradient of the loss shown), and the published learning rates
(MNIST 0.03, FEMNIST 0.003, Synthetic 0.01) and rounds (100, 200, 200). The paper states neither learning rates, nor β's value, nor how FedAvg weighs
devices; so both averagings (plain mean, eq. 2; by samples, as most code does), and two choices of β are shown: β = 1/lr, as printed, and the
largest curvature of the loss measured at the start and one gradient step on. The loss is over all devices' training data, the accuracy over all their test data.
MNIST pixels are standardised over the whole set, test samples included, as published with FedProx. FEMNIST is a subset of 328 of LEAF's
3,600 writers, short of those with most samples, about 70 % digits (the file `femnist_leaf_writers.npz`). All seeds share one generated or partitioned data set (data seed 0); a seed
decides devices, epochs, batches and fleet. Numbers are means over seeds with (lowest-highest), in the tables of all numbers ± the standard deviation; rounds are medians.
"""


def write(out: Path, docs: Path, quick: bool = False) -> Path:
    """Write reproduction.md and its figures into ``docs`` from the records in ``out``, and return its path."""
    studies = STUDIES.values()
    book = open_book(
        [line for study in studies for line in (study.quick_lines() if quick else study.lines)], out, quick
    )
    pictures = {study.name: draw(study, book, out / "figures") for study in studies}
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    for path in (path for paths in pictures.values() for path in paths):
        shutil.copy(path, docs / "figures" / path.name)
    target = docs / "reproduction.md"
    target.write_text("\n".join(_text(judge(book), book, pictures)) + "\n", encoding="utf-8")
    return target


def _text(claims: Sequence[Claim], book: Book, pictures: dict[str, list[Path]]) -> Iterator[str]:
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    yield INTRODUCTION.format(version=__version__, date=today, seeds=", ".join(map(str, SEEDS)))
    yield "## Verdicts\n"
    yield "| # | claim (section IV) | verdict |"
    yield "|---|---|---|"
    for number, claim in enumerate(claims, 1):
        yield f"| [{number}](#claim-{number}) | {claim.text} | {claim.verdict} |"
    for study in STUDIES.values():
        yield f"\n## {study.title}\n"
        yield f"`fedcontext reproduce {study.name}`\n"
        for path in pictures[study.name]:
            yield f"![{study.title}: {path.stem}](figures/{path.name})\n"
        for number, claim in enumerate(claims, 1):
            if claim.study == study.name:
                yield from _claim(number, claim)
        if study.drawn_as != "weights":
            yield from _numbers(study.name, book)


def _claim(number: int, claim: Claim) -> Iterator[str]:
    yield f"### Claim {number}\n"
    yield f"{claim.text[0].upper()}{claim.text[1:]}. Tested as: {claim.test}. **{claim.verdict[0].upper()}{claim.verdict[1:]}.**\n"
    yield "| setting | measured | holds |"
    yield "|---|---|---|"
    for finding in claim.findings:
        yield f"| {finding.setting} | {finding.numbers} | {'yes' if finding.holds else 'no'} |"
    yield ""


def _numbers(study: str, book: Book) -> Iterator[str]:
    yield "<details><summary>All numbers</summary>\n"
    yield "| setting | algorithm | final loss | final accuracy | rounds to 50/60/70/80 % | swing | loss rose |"
    yield "|---|---|---|---|---|---|---|"
    for line in (line for line in STUDIES[study].lines if line in book):
        runs = [summarise(run) for run in book[line]]
        rounds = [median_rounds([run.rounds_to[level] for run in runs]) for level in LEVELS]
        cells = (
            f"{line.sheet}, {line.panel}",
            line.label,
            f"{np.mean([run.loss for run in runs]):.3f} ± {np.std([run.loss for run in runs]):.3f}",
            f"{np.mean([run.accuracy for run in runs]):.3f} ± {np.std([run.accuracy for run in runs]):.3f}",
            "/".join(f"{count:g}" if np.isfinite(count) else "-" for count in rounds),
            f"{np.mean([run.swing for run in runs]):.4f}",
            f"{np.mean([run.rises for run in runs]):.0%}",
        )
        yield f"| {' | '.join(cells)} |"
    yield "\n</details>\n"
