"""Contextual aggregation inside Flower: a strategy that wraps any other, and helpers for the devices' side."""

from fedcontext.errors import require

require("flwr.serverapp", extra="flower")

from fedcontext.flower.client import numpy_client, torch_client  # noqa: E402
from fedcontext.flower.strategy import ContextualStrategy, contextual_fedavg  # noqa: E402

__all__ = ["ContextualStrategy", "contextual_fedavg", "numpy_client", "torch_client"]
