"""How the gradients of probes are sent: as they are, as few-bit codes or as sketches."""

from __future__ import annotations

from dataclasses import dataclass

from fedcontext.compression.codec import IDENTITY, Codec
from fedcontext.compression.sketch import Sketch
from fedcontext.errors import FedcontextError
from fedcontext.fleet import ProbeCost


@dataclass(frozen=True)
class Coding:
    """The codes of gradients and of gradient differences on the uplink."""

    gradient: Codec | Sketch = IDENTITY
    difference: Codec = IDENTITY

    @property
    def exact(self) -> bool:
        """Whether vectors are sent as they are."""
        return self.gradient == self.difference == IDENTITY

    @property
    def distortions(self) -> tuple[float, float]:
        """The shares of decoded gradients and differences that are noise."""
        return self.gradient.distortion, self.difference.distortion

    def cost(self, size: int, model_bytes: int, differences: bool) -> ProbeCost:
        """Return what one answer costs a device with a model of ``size`` parameters."""
        sent = [self.gradient, self.difference] if differences else [self.gradient]
        up = sum(model_bytes if codec == IDENTITY else codec.nbytes(size) for codec in sent)
        return ProbeCost(len(sent), up, model_bytes if differences else 0)

    def change_cost(self, size: int, model_bytes: int) -> ProbeCost:
        """Return what reporting the change of its gradient over a proposed step costs a device that keeps no state."""
        up = model_bytes if self.difference == IDENTITY else self.difference.nbytes(size)
        return ProbeCost(2, up, model_bytes)


def coding_for(bits: int | str, memory: bool, cohort_probes: bool, sketch: int = 0) -> Coding:
    """Return the codes for a setting of bits an entry, or of numbers in a ``sketch`` in place of gradients.

    Differences get half of the gradients' bits, rounded down, at least 1. "auto" is exact vectors for every rule but
    the one with memory, for which it is 3 bits where the cohort probes and 2 bits where other devices do, which are
    more.

    >>> coding_for("auto", memory=True, cohort_probes=False)
    Coding(gradient=Codec(bits=2), difference=Codec(bits=1))
    >>> coding_for("auto", memory=False, cohort_probes=False, sketch=64).gradient
    Sketch(numbers=64)
    """
    if sketch and bits not in ("auto", IDENTITY.bits):
        raise FedcontextError(f"sketch and gradient_bits cannot be combined, got {sketch} and {bits}: give one of them")
    if bits == "auto":
        bits = (3 if cohort_probes else 2) if memory else IDENTITY.bits
    gradient = Codec(int(bits))
    difference = gradient if gradient == IDENTITY else Codec(max(1, gradient.bits // 2))
    return Coding(Sketch(sketch) if sketch else gradient, difference)
