"""Find devices whose update and gradient contradict each other: one of the two has the wrong sign."""

from __future__ import annotations

import numpy as np

from fedcontext.arrays.tree import SCRATCH
from fedcontext.measurement.geometry import Name, Vectors, inner_products

UPHILL = "update: its cosine with the gradient of the same device"


def uphill(vectors: Vectors, measured: list[str], most: float, scratch: int = SCRATCH) -> dict[Name, str]:
    """Return whose update points along its own gradient, with a cosine of more than ``most``, and the reason.

    Local training lowers the device's own loss, so the cosine of an honest device is negative, or near zero where
    little is left to learn. Compared are devices that sent both.

    >>> slope, steps = {"w": np.array([2.0, 1.0])}, {"w": np.array([-1.0, -1.0])}
    >>> reversed_steps = {"w": np.array([1.0, 1.0])}
    >>> updates = [steps, steps, reversed_steps]
    >>> from fedcontext.measurement.geometry import Names
    >>> names = Names(devices="abc", probes="abc")
    >>> uphill(Vectors(updates, np.ones(3), [slope] * 3, [], None, [], [], names=names), ["w"], 0.1)
    {'c': 'update: its cosine with the gradient of the same device is 0.949, so one of them has the wrong sign'}
    """
    gradients = dict(zip(vectors.names.probes, vectors.probes, strict=False))
    found = {}
    for name, update in zip(vectors.names.devices, vectors.updates, strict=False):
        if most and name in gradients:
            gram = inner_products([update, gradients[name]], [], measured, scratch)
            length = float(np.sqrt(gram[0, 0]) * np.sqrt(gram[1, 1]))
            cosine = float(gram[0, 1]) / length if 0 < length < np.inf else 0.0
            if cosine > most:
                found[name] = f"{UPHILL} is {cosine:.3g}, so one of them has the wrong sign"
    return found
