"""What travels between server and devices: the names of records, and arrays as views of the bytes that came."""

from __future__ import annotations

import math
from collections.abc import Mapping
from io import BytesIO
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, RecordDict

from fedcontext.errors import FedcontextError

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

WHOAMI, QUERY_GRADIENT, TRAIN = "query.whoami", "query.gradient", "train"  # types of messages
ARRAYS, UPDATE, GRADIENT = "arrays", "fedcontext.update", "fedcontext.gradient"  # records of arrays
IDENTITY = "fedcontext.identity"  # record with a device's number
ASKED = "fedcontext.asked"  # in a message's config: which records the server wants, with spaces between
SAMPLES = "num-examples"  # in a reply's metrics, as everywhere in Flower
EPOCHS = "local-epochs"  # in a message's config, where devices are given their own number


def record_of(arrays: Mapping[str, npt.NDArray[Any]]) -> ArrayRecord:
    """Return arrays by name as Flower's record.

    >>> list(record_of({"w": np.zeros(2)}))
    ['w']
    """
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def arrays_of(record: ArrayRecord) -> Arrays:
    """Return the arrays of a record by name, as read-only views: nothing is copied.

    >>> arrays_of(record_of({"w": np.ones((2, 1))}))
    {'w': array([[1.],
           [1.]])}
    """
    return {name: view(array) for name, array in record.items()}


def view(array: Array) -> npt.NDArray[Any]:
    """Return what an `Array` holds as a view of its bytes, which are believed in nothing.

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
    except Exception:  # NumPy's parser of headers raises many kinds, and a stranger chose the bytes
        raise FedcontextError("an array cannot be read: it is not in NumPy's format") from None


def size(record: ArrayRecord) -> int:
    """Return the bytes of a record's arrays."""
    return sum(len(array.data) for array in record.values())


def number_in(content: RecordDict, *names: str) -> float:
    """Return the first number under one of ``names`` in the reply's metrics; NaN where there is none.

    >>> number_in(RecordDict(), "num-examples")
    nan
    """
    values = [metrics.get(name) for name in names for metrics in content.metric_records.values()]
    return next((float(value) for value in values if isinstance(value, int | float)), math.nan)


def shown(text: str) -> str:
    """Return a stranger's words fit for logs and records: one short line of printable characters.

    >>> shown("an error" + chr(27) + "[2J")
    'an error[2J'
    """
    return "".join(character for character in text if character.isprintable())[:200]


def config_of(content: RecordDict) -> dict[str, Any]:
    """Return the settings that came with a message.

    >>> from flwr.app import ConfigRecord
    >>> config_of(RecordDict({"config": ConfigRecord({"lr": 0.1})}))
    {'lr': 0.1}
    """
    return {key: value for record in content.config_records.values() for key, value in record.items()}
