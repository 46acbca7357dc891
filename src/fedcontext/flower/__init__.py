"""Contextual aggregation for Flower: a strategy around FedAvg or FedProx, and helpers for client apps."""

from fedcontext.errors import require

require("flwr.serverapp", extra="flower")

from fedcontext.flower.client import numpy_client, torch_client  # noqa: E402
from fedcontext.flower.fedavg import contextual_fedavg  # noqa: E402
from fedcontext.flower.fedavg import fedavg as FedAvg  # noqa: E402
from fedcontext.flower.strategy import ContextualStrategy  # noqa: E402

__all__ = ["ContextualStrategy", "FedAvg", "contextual_fedavg", "numpy_client", "torch_client"]
