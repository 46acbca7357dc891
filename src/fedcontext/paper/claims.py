"""The claims of the paper's section IV, each with the test it is put to and what our own records say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedcontext.paper import evidence
from fedcontext.paper.evidence import CONTEXTUAL, Finding, Results
from fedcontext.paper.figures import Book


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper in our words, the test it is put to, and what each setting showed."""

    study: str
    text: str
    test: str
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> str:
        """Return 'holds', 'does not hold', or the settings in which it does or does not, whichever are fewer."""
        good, bad = ([each for each in self.findings if each.holds is side] for side in (True, False))
        if not bad or not good:
            return "holds" if good else "does not hold"
        if len(good) <= len(bad):
            return f"holds only when: {self._named(good)}"
        return f"holds except when: {self._named(bad)}"

    def _named(self, chosen: Sequence[Finding]) -> str:
        """Return the settings of findings; a sheet whose panels are all among them stands for them."""
        whole = {f.sheet for f in chosen} - {f.sheet for f in self.findings if f not in chosen}
        return "; ".join(dict.fromkeys(f.sheet if f.sheet in whole else f.setting for f in chosen))


def judge(book: Book) -> list[Claim]:
    """Return every claim with what the records say of it."""
    results = Results(book)
    return [
        Claim(
            "variants",
            "K2 = N, 50, 20 and 10 are visually indistinguishable",
            "mean gap to K2 = N over all rounds: accuracy below 0.01 and loss below 5 % for each of 50, 20, 10",
            tuple(evidence.gaps(results, ("K2 = 50", "K2 = 20", "K2 = 10"))),
        ),
        Claim(
            "variants",
            "K2 = 0 differs from K2 = N only by minor fluctuations",
            "the same test for K2 = 0",
            tuple(evidence.gaps(results, ("K2 = 0",))),
        ),
        Claim(
            "variants",
            "all variants converge after about 20 rounds and stay at their peak",
            "accuracy at round 20 within 0.01 of the last, for every K2",
            tuple(evidence.converged(results)),
        ),
        Claim(
            "variants",
            "the proximal constant μ makes little difference",
            "final loss at K2 = N differs by less than 5 % between the values of μ",
            tuple(evidence.mu_matters_little(results)),
        ),
        Claim(
            "weights",
            "weights differ between devices and stages: most count early, few when near converged, alike at the end",
            "effective number of devices (Σ|α|)²/Σα² of 10, averaged over seeds: lower near convergence than early, highest at the end",
            tuple(evidence.weight_stages(results)),
        ),
        Claim(
            "comparison",
            "the contextual versions are always better than FedAvg, FedProx and FOLB: lower loss, higher accuracy",
            "share of rounds (mean over seeds) in which both have lower loss and higher accuracy than all three: above 95 %",
            tuple(evidence.always_better(results)),
        ),
        Claim(
            "comparison",
            "the contextual curves are very smooth, FedAvg and FedProx fluctuate greatly",
            "swing (standard deviation of accuracy over the last 20 rounds) of FedAvg and FedProx at least 3 times the contextual versions'",
            tuple(evidence.swings(results, ("FedAvg", "FedProx"))),
        ),
        Claim(
            "comparison",
            "FOLB fluctuates as well, most with small μ",
            "swing of FOLB at least 3 times the contextual versions'",
            tuple(evidence.swings(results, ("FOLB",))),
        ),
        Claim(
            "comparison",
            "FOLB is better than FedAvg and FedProx in individual rounds",
            "share of rounds (mean over seeds) in which FOLB has lower loss than both: above one half",
            tuple(evidence.folb_ahead(results)),
        ),
        Claim(
            "comparison",
            "contextual aggregation reduces the loss in every round",
            "share of rounds in which the loss rose is zero for both contextual versions (K2 = N)",
            tuple(evidence.never_rises(results)),
        ),
        Claim(
            "comparison",
            "FedAvg (Contextual) and FedProx (Contextual) perform markedly the same",
            "final losses within 5 % of each other",
            tuple(evidence.alike(results)),
        ),
        Claim(
            "comparison",
            "FedProx with a large μ has some margin over FedAvg",
            "final loss of FedProx at μ = 1 below FedAvg's",
            tuple(evidence.prox_margin(results)),
        ),
        *(
            Claim(
                "rounds",
                f"{panel}: {factor} times fewer rounds than {' and '.join(others)} at every accuracy level",
                f"median rounds of each of {', '.join(others)} at least {factor} times that of both contextual versions (K2 = N), or of FedAvg (Contextual) with K2 = 0, at every level that either reaches",
                tuple(evidence.fewer_rounds(results, panel, others, factor)),
            )
            for panel in ("MNIST", "FEMNIST")
            for others, factor in ((("FedAvg", "FedProx"), 3), (("FOLB",), 2))
        ),
        Claim(
            "rounds",
            "Synthetic_IID: FOLB, FedProx and the contextual versions are alike and much better than FedAvg",
            "final loss of each of the four below two thirds of FedAvg's, and within a factor 1.5 of each other",
            tuple(evidence.much_better(results, "Synthetic_IID", ("FedProx", "FOLB", *CONTEXTUAL), ("FedAvg",), 1.5)),
        ),
        Claim(
            "rounds",
            "Synthetic_1_1: FedAvg and FedProx fall short, FOLB and the contextual versions need few rounds",
            "final loss of FOLB and both contextual versions below two thirds of FedAvg's and FedProx's",
            tuple(evidence.much_better(results, "Synthetic_1_1", ("FOLB", *CONTEXTUAL), ("FedAvg", "FedProx"))),
        ),
    ]
