"""Find devices whose update contradicts their own gradient: usually one of the two has the wrong sign."""

from __future__ import annotations

import numpy as np

from fedcontext.arrays.tree import SCRATCH
from fedcontext.measurement.geometry import Name, Vectors, inner_products


def uphill(vectors: Vectors, measured: list[str], most: float, scratch: int = SCRATCH) -> dict[Name, str]:
    """Return whose update has a cosine of more than ``most`` with the gradient of the same device, and the reason.

    Local training goes down the device's own loss, so the cosine of an honest device is negative, or near zero where
    little is left to learn. Compared are devices that sent both.

    >>> from fedcontext.measurement.geometry import Names
    >>> slope, down, up = ({"w": np.array(entries)} for entries in ([2.0, 1.0], [-1.0, -1.0], [1.0, 1.0]))
    >>> names = Names(devices="abc", probes="abc")
    >>> uphill(Vectors([down, down, up], np.ones(3), [slope] * 3, [], None, [], [], names=names), ["w"], 0.1)
    {'c': 'update: not used, its cosine with the gradient of the same device is 0.949, more than 0.1'}
    """
    if not most:
        return {}
    gradients = dict(zip(vectors.names.probes, vectors.probes, strict=False))
    found = {}
    for name, update in zip(vectors.names.devices, vectors.updates, strict=False):
        if name not in gradients:
            continue
        gram = inner_products([update, gradients[name]], [], measured, scratch)
        lengths = np.sqrt(np.diag(gram))
        if np.isfinite(lengths).all() and lengths.all():
            cosine = float(gram[0, 1] / lengths[0] / lengths[1])
            if cosine > most:
                found[name] = (
                    f"update: not used, its cosine with the gradient of the same device is {cosine:.3g}, "
                    f"more than {most:g}"
                )
    return found
