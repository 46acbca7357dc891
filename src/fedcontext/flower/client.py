"""The devices' side: one call makes a Flower `ClientApp` answer with updates and full local gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedcontext.errors import FedcontextError, require
from fedcontext.flower.protocol import (
    ARRAYS,
    ASKED,
    GRADIENT,
    IDENTITY,
    QUERY_GRADIENT,
    SAMPLES,
    TRAIN,
    UPDATE,
    WHOAMI,
    Arrays,
    arrays_of,
    config_of,
    record_of,
)

Gradient: TypeAlias = Callable[[Arrays, Context], tuple[Mapping[str, Any], int]]
Train: TypeAlias = Callable[[Arrays, dict[str, Any], Context], tuple[Mapping[str, Any], int]]
Evaluate: TypeAlias = Callable[[Arrays, Context], Mapping[str, float]]


def torch_client(
    app: ClientApp,
    module: Callable[[], Any],
    batches: Callable[[Context], Iterable[Any]],
    loss: Callable[[Any, Any], Any] | None = None,
    device: str = "cpu",
) -> ClientApp:
    """Return ``app`` with gradients: it also answers `query.gradient`, and `train` with the update.

    The gradient is that of the mean loss over all batches, at the model that the server sent and with the module
    in evaluation mode: no dropout, and batch normalisation by its running statistics.

    Args:
        app: the user's app, as it is; its `train` may answer with the new weights, as Flower's examples do.
        module: makes the model, such as its class.
        batches: the device's training data: pairs of inputs and labels, or mappings with these two values.
        loss: the mean loss of a batch from outputs and labels; cross-entropy if not given.
        device: where PyTorch computes.
    """
    torch = require("torch", extra="torch")
    mean_loss = loss or torch.nn.functional.cross_entropy

    def gradient(params: Arrays, context: Context) -> tuple[Mapping[str, Any], int]:
        model = module().to(device).eval()
        model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in params.items()})
        model.zero_grad()
        samples = 0
        for batch in batches(context):
            inputs, labels = (part.to(device) for part in _pair(batch))
            (mean_loss(model(inputs), labels) * len(labels)).backward()
            samples += len(labels)
        named = model.named_parameters(remove_duplicate=False)
        found = {name: param.grad for name, param in named if param.grad is not None}
        return {name: (grad / max(samples, 1)).cpu().numpy() for name, grad in found.items()}, samples

    return GradientApp(app, gradient)


def numpy_client(train: Train, gradient: Gradient, evaluate: Evaluate | None = None) -> ClientApp:
    """Return an app from plain NumPy functions of the params, a mapping from names to (read-only) arrays.

    Args:
        train: (params, config, context) -> the new params and the number of samples.
        gradient: (params, context) -> the full local gradient at params and the number of samples.
        evaluate: (params, context) -> numbers by name, among them ``num-examples``.

    >>> app = numpy_client(lambda params, config, context: (params, 1), lambda params, context: (params, 1))
    >>> isinstance(app, ClientApp)
    True
    """
    app = ClientApp()

    @app.train()
    def _train(message: Message, context: Context) -> Message:
        params, samples = train(_sent(message), config_of(message.content), context)
        return _reply(message, {ARRAYS: params}, samples)

    if evaluate is not None:

        @app.evaluate()
        def _evaluate(message: Message, context: Context) -> Message:
            metrics: dict[str, Any] = {name: _plain(v) for name, v in evaluate(_sent(message), context).items()}
            return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return GradientApp(app, gradient)


class GradientApp(ClientApp):
    """An app around another: it adds what contextual aggregation asks for, and passes the rest on."""

    def __init__(self, app: ClientApp, gradient: Gradient) -> None:
        super().__init__()
        self.app, self.gradient = app, gradient

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer one message."""
        kind = message.metadata.message_type
        if kind == WHOAMI:
            known: dict[str, Any] = {"partition-id": int(context.node_config.get("partition-id", -1))}
            return Message(RecordDict({IDENTITY: ConfigRecord(known)}), reply_to=message)
        if kind == QUERY_GRADIENT:
            gradient, samples = self.gradient(_sent(message), context)
            return _reply(message, {GRADIENT: gradient}, samples)
        asked = str(config_of(message.content).get(ASKED, "")).split() if kind == TRAIN else []
        sent = _sent(message) if asked else {}
        reply = self.app(message, context)
        if UPDATE in asked and reply.has_content():
            _leave_update(reply.content, sent)
        if GRADIENT in asked and reply.has_content():
            reply.content[GRADIENT] = record_of(_arrays(self.gradient(sent, context)[0]))
        return reply


def _pair(batch: Any) -> tuple[Any, Any]:
    parts = tuple(batch.values() if isinstance(batch, Mapping) else batch)
    if len(parts) != 2:
        raise FedcontextError(f"a batch must be inputs and labels, got {len(parts)} parts")
    return parts


def _leave_update(content: RecordDict, sent: Arrays) -> None:
    """Put the update in place of the new weights: Δ = new - sent."""
    for key, record in list(content.array_records.items()):
        if record.keys() == sent.keys():
            new = arrays_of(record)
            content[UPDATE] = record_of({name: np.subtract(new[name], old) for name, old in sent.items()})
            del content[key]
            return


def _sent(message: Message) -> Arrays:
    """Return the model that came with the message: its one record of arrays."""
    records: list[ArrayRecord] = list(message.content.array_records.values())
    if len(records) != 1:
        raise FedcontextError(f"a message must bring one model, got {len(records)}")
    return arrays_of(records[0])


def _reply(message: Message, records: Mapping[str, Mapping[str, Any]], samples: int) -> Message:
    content: dict[str, Any] = {key: record_of(_arrays(arrays)) for key, arrays in records.items()}
    return Message(
        RecordDict({**content, "metrics": MetricRecord({SAMPLES: int(samples)})}),
        reply_to=message,
    )


def _arrays(arrays: Mapping[str, Any]) -> Arrays:
    return {name: np.asarray(array) for name, array in arrays.items()}


def _plain(value: Any) -> float | int:
    return int(value) if isinstance(value, int | np.integer) else float(value)
