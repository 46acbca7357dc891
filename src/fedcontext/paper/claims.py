"""The claims of the paper's section IV, each with the check it is put to and the outcomes in our records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedcontext.paper import checks
from fedcontext.paper.checks import CONTEXTUAL, Check, Panel, panels_of
from fedcontext.paper.experiments import MUS
from fedcontext.paper.figures import RecordIndex


@dataclass(frozen=True)
class Claim:
    """A claim of the paper in our words, how it is tested, and the outcome in each setting."""

    study: str
    text: str
    test: str
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> str:
        """Return 'holds', 'does not hold', or the settings in which it does or does not, whichever are fewer."""
        good = [check for check in self.checks if check.holds]
        bad = [check for check in self.checks if not check.holds]
        if not bad or not good:
            return "holds" if good else "does not hold"
        if len(good) <= len(bad):
            return f"holds only when: {self._settings(good)}"
        return f"holds except when: {self._settings(bad)}"

    def _settings(self, chosen: Sequence[Check]) -> str:
        """Return the settings of checks; a figure whose panels are all among them is named once."""
        whole = {check.figure for check in chosen} - {check.figure for check in self.checks if check not in chosen}
        return "; ".join(dict.fromkeys(check.figure if check.figure in whole else check.setting for check in chosen))


def check_claims(index: RecordIndex) -> list[Claim]:
    """Return every claim with its outcome in the records."""
    variants, weights, comparison, rounds = (
        panels_of(study, index) for study in ("variants", "weights", "comparison", "rounds")
    )
    largest_mu = _named(comparison, f"μ = {MUS[-1]:g}")
    return [
        Claim(
            "variants",
            "K2 = N, 50, 20 and 10 are visually indistinguishable",
            "mean gap to K2 = N over all rounds: accuracy below 0.01 and loss below 5 % for each of 50, 20, 10",
            _each(variants, checks.k2_gap, ("K2 = 50", "K2 = 20", "K2 = 10")),
        ),
        Claim(
            "variants",
            "K2 = 0 differs from K2 = N only by minor fluctuations",
            "the same test for K2 = 0",
            _each(variants, checks.k2_gap, ("K2 = 0",)),
        ),
        Claim(
            "variants",
            "all variants converge after about 20 rounds and stay at their peak",
            "accuracy at round 20 within 0.01 of the last, for every K2",
            _each(variants, checks.gain_after_round_20),
        ),
        Claim(
            "variants",
            "the proximal constant μ makes little difference",
            "final loss at K2 = N differs by less than 5 % between the values of μ",
            tuple(checks.effect_of_mu(variants)),
        ),
        Claim(
            "weights",
            "weights differ between devices and stages: most count early, few when near converged, alike at the end",
            "effective number of devices (Σ|α|)²/Σα² of 10, averaged over seeds: lower near convergence than early, highest at the end",
            _each(weights, checks.effective_devices),
        ),
        Claim(
            "comparison",
            "the contextual versions are always better than FedAvg, FedProx and FOLB: lower loss, higher accuracy",
            "share of rounds (mean over seeds) in which both have lower loss and higher accuracy than all three: above 95 %",
            _each(comparison, checks.always_better),
        ),
        Claim(
            "comparison",
            "the contextual curves are very smooth, FedAvg and FedProx fluctuate greatly",
            "swing (standard deviation of accuracy over the last 20 rounds) of FedAvg and FedProx at least 3 times the contextual versions'",
            _each(comparison, checks.swing_ratio, ("FedAvg", "FedProx")),
        ),
        Claim(
            "comparison",
            "FOLB fluctuates as well, most with small μ",
            "swing of FOLB at least 3 times the contextual versions'",
            _each(comparison, checks.swing_ratio, ("FOLB",)),
        ),
        Claim(
            "comparison",
            "FOLB is better than FedAvg and FedProx in individual rounds",
            "share of rounds (mean over seeds) in which FOLB has lower loss than both: above one half",
            _each(comparison, checks.folb_ahead),
        ),
        Claim(
            "comparison",
            "contextual aggregation reduces the loss in every round",
            "share of rounds in which the loss rose is zero for both contextual versions (K2 = N)",
            _each(comparison, checks.never_rises),
        ),
        Claim(
            "comparison",
            "FedAvg (Contextual) and FedProx (Contextual) perform markedly the same",
            "final losses within 5 % of each other",
            _each(comparison, checks.equal_final_loss),
        ),
        Claim(
            "comparison",
            "FedProx with a large μ has some margin over FedAvg",
            "final loss of FedProx at μ = 1 below FedAvg's",
            _each(largest_mu, checks.fedprox_margin),
        ),
        *(
            Claim(
                "rounds",
                f"{name}: {factor} times fewer rounds than {' and '.join(others)} at every accuracy level",
                f"median rounds of each of {', '.join(others)} at least {factor} times that of both contextual versions (K2 = N), or of FedAvg (Contextual) with K2 = 0, at every level that either reaches",
                tuple(check for panel in _named(rounds, name) for check in checks.fewer_rounds(panel, others, factor)),
            )
            for name in ("MNIST", "FEMNIST")
            for others, factor in ((("FedAvg", "FedProx"), 3), (("FOLB",), 2))
        ),
        Claim(
            "rounds",
            "Synthetic_IID: FOLB, FedProx and the contextual versions are alike and much better than FedAvg",
            "final loss of each of the four below two thirds of FedAvg's, and within a factor 1.5 of each other",
            _each(
                _named(rounds, "Synthetic_IID"),
                checks.much_lower_loss,
                ("FedProx", "FOLB", *CONTEXTUAL),
                ("FedAvg",),
                1.5,
            ),
        ),
        Claim(
            "rounds",
            "Synthetic_1_1: FedAvg and FedProx fall short, FOLB and the contextual versions need few rounds",
            "final loss of FOLB and both contextual versions below two thirds of FedAvg's and FedProx's",
            _each(
                _named(rounds, "Synthetic_1_1"), checks.much_lower_loss, ("FOLB", *CONTEXTUAL), ("FedAvg", "FedProx")
            ),
        ),
    ]


def _each(panels: Sequence[Panel], check: Callable[..., Check], *arguments: Any) -> tuple[Check, ...]:
    return tuple(check(panel, *arguments) for panel in panels)


def _named(panels: Sequence[Panel], name: str) -> list[Panel]:
    return [panel for panel in panels if panel.name == name]
