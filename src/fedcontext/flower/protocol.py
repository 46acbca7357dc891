"""The wire format shared by server and clients: message types, record names, and arrays read without a copy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, Message, RecordDict

from fedcontext.errors import FedcontextError

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

# message types
TRAIN = "train"
QUERY_GRADIENT = "query.gradient"
QUERY_WHOAMI = "query.whoami"
# record names
ARRAYS = "arrays"
UPDATE = "fedcontext.update"
PREVIOUS = "fedcontext.previous"  # the params before the last aggregation or step, sent where a difference is requested
GRADIENT = "fedcontext.gradient"
DIFFERENCE = "fedcontext.difference"  # gradient at the params minus gradient at the previous params
REMAINING = "fedcontext.remaining-slope"  # ConfigRecord with the slope along the update at its end / that before it
LEAVES = "fedcontext.leaves"  # ConfigRecord with the names of the leaves in a coded gradient
IDENTITY = "fedcontext.identity"  # ConfigRecord with the node's partition-id
# keys of a message's config
REQUEST = "fedcontext.request"  # space-separated names of the records that the server wants
GRADIENT_CODE = "fedcontext.gradient-code"  # bits and key of the few-bit code; absent: float32
DIFFERENCE_CODE = "fedcontext.difference-code"
EPOCHS = "local-epochs"  # set if the strategy draws the epochs
# keys of a reply's configs and metrics
SHARE = "share"  # of the slope that remains
SAMPLES = "num-examples"


def record_of(arrays: Mapping[str, npt.NDArray[Any]]) -> ArrayRecord:
    """Return named arrays as a Flower `ArrayRecord`.

    >>> list(record_of({"w": np.zeros(2)}))
    ['w']
    """
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def arrays_of(record: ArrayRecord) -> Arrays:
    """Return the named arrays of a record as read-only views of its bytes.

    >>> arrays_of(record_of({"w": np.ones((2, 1))}))
    {'w': array([[1.],
           [1.]])}
    """
    return {name: view(array) for name, array in record.items()}


def view(array: Array) -> npt.NDArray[Any]:
    """Return a Flower `Array` as a read-only view of its bytes, which are untrusted and checked first.

    >>> view(Array("float64", (2,), "numpy.ndarray", b"something else"))
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: an array cannot be read: it is not in NumPy's format
    """
    try:
        stream = BytesIO(array.data)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = readers[np.lib.format.read_magic(stream)](stream)
        flat = np.frombuffer(array.data, dtype, math.prod(shape), stream.tell())
        if dtype.hasobject or flat.nbytes + stream.tell() != len(array.data):
            raise ValueError("length")
        return flat.reshape(shape, order="F" if fortran else "C")
    except Exception:  # NumPy's header parser raises many kinds of errors on malformed input
        raise FedcontextError("an array cannot be read: it is not in NumPy's format") from None


def array_bytes(messages: Iterable[Message]) -> int:
    """Return the total size of the arrays in ``messages``; error replies have none."""
    contents = (message.content for message in messages if message.has_content())
    records = (record for content in contents for record in content.array_records.values())
    return sum(len(array.data) for record in records for array in record.values())


def metric(content: RecordDict, *names: str) -> float:
    """Return the first numeric metric under one of ``names``, or NaN.

    >>> metric(RecordDict(), "num-examples")
    nan
    """
    values = [metrics.get(name) for name in names for metrics in content.metric_records.values()]
    return next((float(value) for value in values if isinstance(value, int | float)), math.nan)


def config_of(content: RecordDict) -> dict[str, Any]:
    """Return all settings of a message's config records.

    >>> from flwr.app import ConfigRecord
    >>> config_of(RecordDict({"config": ConfigRecord({"lr": 0.1})}))
    {'lr': 0.1}
    """
    return {key: value for record in content.config_records.values() for key, value in record.items()}


def printable(text: str) -> str:
    """Return untrusted text fit for logs and records: at most 200 printable characters.

    >>> printable("an error" + chr(27) + "[2J")
    'an error[2J'
    """
    return "".join(character for character in text if character.isprintable())[:200]
