"""What our messages add to Flower's: the previous params, and gradients.

Gradients are sent as they are or as few-bit codes (`compression.codec`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedcontext.coding import Coding
from fedcontext.compression.codec import IDENTITY, Codec
from fedcontext.errors import FedcontextError
from fedcontext.flower.protocol import DIFFERENCE, GRADIENT, LEAVES, Arrays, arrays_of, record_of, view
from fedcontext.measurement.sums import flat, unflat
from fedcontext.plan import Stream, words

CODE = "code"  # name of the only array of a coded record
NAMES = "names"  # key of the leaves' names


@dataclass(frozen=True)
class Code:
    """The code of one vector: bits an entry, and the key that device and server derive the rotation from."""

    bits: int
    key: tuple[int, ...]

    @classmethod
    def of(cls, value: Any) -> Code | None:
        """Return the code in a message's config, or None.

        >>> Code.of([2, 0, 1, 8, 3])
        Code(bits=2, key=(0, 1, 8, 3))
        """
        return cls(int(value[0]), tuple(map(int, value[1:]))) if value else None


@dataclass(frozen=True)
class Extras:
    """What a round's messages contain beyond the wrapped strategy's; each vector has a code with its own key."""

    coding: Coding = Coding()  # of gradients and differences  # noqa: RUF009
    seed: int = 0
    number: int = 0  # of the round
    previous: ArrayRecord | None = None  # where differences are requested: the params that they are to
    remaining: bool = False  # whether the cohort is asked for the slopes that are left along its updates
    stream: Stream = Stream.DIFFERENCE_CODE  # of the keys of the differences' codes

    def codes(self, device: int) -> dict[str, Code | None]:
        """Return the codes of a device's gradient and difference; None where it is sent as it is.

        >>> Extras(Coding(Codec(2), IDENTITY), seed=0, number=1).codes(3)
        {'fedcontext.gradient': Code(bits=2, key=(0, 1, 8, 3)), 'fedcontext.difference': None}
        """
        streams = {GRADIENT: Stream.GRADIENT_CODE, DIFFERENCE: self.stream}
        keys = [tuple(words(self.seed, self.number, stream, device)) for stream in streams.values()]
        codecs = self.coding.gradient, self.coding.difference
        return {
            name: Code(codec.bits, key) if isinstance(codec, Codec) and codec != IDENTITY else None
            for name, key, codec in zip(streams, keys, codecs, strict=True)
        }


def add_vector(
    content: RecordDict, name: str, vector: Mapping[str, npt.NDArray[Any]], params: Arrays, code: Code | None
) -> None:
    """Add a gradient or difference to a reply: as it is, or as the code of floating-point leaves in params' order."""
    if code is None:
        content[name] = record_of(vector)
        return
    names = [leaf for leaf, array in params.items() if leaf in vector and array.dtype.kind == "f"]
    data = Codec(code.bits).encode(flat(dict(vector), names), code.key)
    content[name] = ArrayRecord({CODE: Array(np.frombuffer(data, np.uint8))})
    content[LEAVES] = ConfigRecord({NAMES: names})


def read_vector(content: RecordDict, name: str, params: Arrays, code: Code | None) -> Arrays | None:
    """Return the gradient or difference in a reply, or None if there is none; the reply is untrusted."""
    record = content.array_records.get(name)
    if record is None or code is None:
        return None if record is None else arrays_of(record)
    kind = name.removeprefix("fedcontext.")
    if CODE not in record:
        raise FedcontextError(f"{kind}: expected a code of {code.bits} bits, got {', '.join(record) or 'nothing'}")
    data, names = view(record[CODE]), _leaf_names(content, params, kind)
    try:
        vector = Codec(code.bits).decode(data.tobytes(), code.key, sum(params[leaf].size for leaf in names))
    except FedcontextError as error:
        raise FedcontextError(f"{kind}: {error}") from None
    return dict(unflat(vector.astype(np.float64), params, names))


def _leaf_names(content: RecordDict, params: Arrays, kind: str) -> list[str]:
    """Return the names of the coded leaves: floating-point leaves of params, in their order."""
    names = content.config_records[LEAVES].get(NAMES) if LEAVES in content.config_records else None
    known = [leaf for leaf, array in params.items() if array.dtype.kind == "f"]
    chosen = set(names) if isinstance(names, Sequence) else set()
    if not chosen or names != [leaf for leaf in known if leaf in chosen]:
        raise FedcontextError(f"{kind}: its leaves must be floating-point leaves of the params, in their order")
    return [leaf for leaf in known if leaf in chosen]
