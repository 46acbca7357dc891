"""Client apps that reply with updates and gradients: one call around a Flower `ClientApp`, or from NumPy functions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedcontext.errors import FedcontextError, accepts, require, shown
from fedcontext.flower.coding import Code, add_vector
from fedcontext.flower.protocol import (
    ARRAYS,
    DIFFERENCE,
    DIFFERENCE_CODE,
    GRADIENT,
    GRADIENT_CODE,
    IDENTITY,
    PREVIOUS,
    QUERY_GRADIENT,
    QUERY_WHOAMI,
    REMAINING,
    REQUEST,
    SAMPLES,
    SHARE,
    TRAIN,
    UPDATE,
    Arrays,
    arrays_of,
    config_of,
    record_of,
)
from fedcontext.measurement.sums import flat, remaining_slope

log = logging.getLogger("flwr")
Gradient: TypeAlias = Callable[[Arrays, Context], tuple[Mapping[str, Any], int]]
Gradients: TypeAlias = Callable[[Sequence[Arrays], Context], tuple[list[Mapping[str, Any]], int]]  # at several params
Train: TypeAlias = Callable[[Arrays, dict[str, Any], Context], tuple[Mapping[str, Any], int]]
Evaluate: TypeAlias = Callable[[Arrays, Context], Mapping[str, float]]


def torch_client(
    app: ClientApp,
    module: Callable[..., Any],
    batches: Callable[[Context], Iterable[Any]],
    loss: Callable[[Any, Any], Any] | None = None,
    device: str = "cpu",
) -> ClientApp:
    """Return ``app`` extended for `ContextualStrategy`: it replies to `query.gradient`, and to `train` with the update.

    The gradient is that of the mean loss over all batches, at the model that the server sent, in evaluation mode:
    without dropout, and with BatchNorm's running statistics. If the server sent the previous model too, the reply has
    the difference to the gradient there, on the same batches.

    Args:
        app: the client app; its `train` returns the new weights, as in Flower's examples.
        module: a ``torch.nn.Module``, which is copied, or a function that returns one, such as its class.
        batches: returns the training data of the node: pairs of inputs and labels, or mappings with these two values.
        loss: mean loss of a batch from outputs and labels; cross-entropy by default.
        device: the PyTorch device that computes the gradient.
    """
    torch = require("torch", extra="torch")
    from fedcontext.engines.torch.task import check_module, new_module  # here, since PyTorch is optional

    mean_loss = torch.nn.functional.cross_entropy if loss is None else loss
    check_module(module)
    _check_functions(app, batches, mean_loss)

    def gradients(several: Sequence[Arrays], context: Context) -> tuple[list[Mapping[str, Any]], int]:
        with torch.random.fork_rng(devices=[]):  # neither new modules nor shuffling change what training draws
            models, samples = [loaded(params) for params in several], 0
            for batch in batches(context):  # read once: all gradients are of the same data, even if it is augmented
                inputs, labels = (part.to(device) for part in _inputs_and_labels(batch))
                for model in models:
                    (mean_loss(model(inputs), labels) * len(labels)).backward()
                samples += len(labels)
        return [_mean_gradient(model, samples) for model in models], samples

    def loaded(params: Arrays) -> Any:
        model = new_module(module).to(device).eval()
        model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in params.items()})
        model.zero_grad()
        return model

    return GradientApp(app, gradients)


def numpy_client(train: Train, gradient: Gradient, evaluate: Evaluate | None = None) -> ClientApp:
    """Return a client app made of NumPy functions; params are a mapping from names to read-only arrays.

    Args:
        train: (params, config, context) -> the new params and the number of samples.
        gradient: (params, context) -> the full local gradient at params and the number of samples.
        evaluate: (params, context) -> metrics, including ``num-examples``.

    >>> app = numpy_client(lambda params, config, context: (params, 1), lambda params, context: (params, 1))
    >>> isinstance(app, ClientApp)
    True
    """
    app = ClientApp()

    @app.train()
    def _train(message: Message, context: Context) -> Message:
        params, samples = train(_model(message), config_of(message.content), context)
        content = RecordDict({ARRAYS: record_of(params), "metrics": MetricRecord({SAMPLES: int(samples)})})
        return Message(content, reply_to=message)

    if evaluate is not None:

        @app.evaluate()
        def _evaluate(message: Message, context: Context) -> Message:
            metrics: dict[str, Any] = {name: _number(v) for name, v in evaluate(_model(message), context).items()}
            return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    def gradients(several: Sequence[Arrays], context: Context) -> tuple[list[Mapping[str, Any]], int]:
        results = [gradient(params, context) for params in several]
        return [result for result, _ in results], results[0][1]

    return GradientApp(app, gradients)


class GradientApp(ClientApp):
    """A wrapper of a client app: it adds updates, gradients and differences if `ContextualStrategy` requests them."""

    def __init__(self, app: ClientApp, gradients: Gradients) -> None:
        super().__init__()
        self.app, self.gradients = app, gradients

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the reply to one message."""
        kind = message.metadata.message_type
        if kind == QUERY_WHOAMI:
            identity: dict[str, Any] = {"partition-id": int(context.node_config.get("partition-id", -1))}
            return Message(RecordDict({IDENTITY: ConfigRecord(identity)}), reply_to=message)
        if kind not in (TRAIN, QUERY_GRADIENT):
            return self.app(message, context)
        config = config_of(message.content)
        request = str(config.get(REQUEST, "")).split()
        previous = _previous(message.content)  # removed: the wrapped app expects one model
        params = _model(message) if request or kind == QUERY_GRADIENT else {}
        if kind == QUERY_GRADIENT:
            reply = Message(RecordDict(), reply_to=message)
            samples = self._add_gradients(reply.content, params, previous, config, context, request != [DIFFERENCE])
            reply.content["metrics"] = MetricRecord({SAMPLES: int(samples)})
            return reply
        reply = self.app(message, context)
        if UPDATE in request and reply.has_content():
            _replace_weights_by_update(reply.content, params)
        if REMAINING in request and reply.has_content():
            self._add_remaining_slope(reply.content, params, context)
        if GRADIENT in request and reply.has_content():
            self._add_gradients(reply.content, params, previous, config, context)
        return reply

    def _add_remaining_slope(self, content: RecordDict, params: Arrays, context: Context) -> None:
        """Add the slope along the update at its end, as a share of that before; a reply is usable without it."""
        try:
            update = arrays_of(content.array_records[UPDATE])
            trained = {name: (array + update[name]).astype(array.dtype) for name, array in params.items()}
            (before, after), _ = self.gradients([params, trained], context)
            names = [name for name in before if name in update]
            share = remaining_slope(*(flat(dict(vector), names) for vector in (update, before, after)))
            content[REMAINING] = ConfigRecord({SHARE: share})
        except Exception as error:
            log.warning("no remaining slope is reported (%s: %s)", type(error).__name__, error)

    def _add_gradients(
        self,
        content: RecordDict,
        params: Arrays,
        previous: Arrays | None,
        config: dict[str, Any],
        context: Context,
        itself: bool = True,
    ) -> int:
        """Add the gradient ``itself`` and its difference to the one at the previous params; return the samples."""
        (gradient, *before), samples = self.gradients([params] if previous is None else [params, previous], context)
        if itself:
            add_vector(content, GRADIENT, gradient, params, Code.of(config.get(GRADIENT_CODE)))
        for old in before:
            difference = {name: np.subtract(array, old[name]) for name, array in gradient.items()}
            add_vector(content, DIFFERENCE, difference, params, Code.of(config.get(DIFFERENCE_CODE)))
        return samples


def _check_functions(app: Any, batches: Any, loss: Any) -> None:
    """Raise an error for what cannot be called, before rounds are lost to it."""
    if not callable(app) or isinstance(app, type):
        raise FedcontextError(f"app must be a ClientApp, such as app = ClientApp(), got {shown(app)}")
    if not accepts(batches, None):
        raise FedcontextError(
            "batches must be a function of the context that returns a loader, such as "
            f"lambda context: load_data(context)[0], got {shown(batches)}"
        )
    if isinstance(loss, type) or not accepts(loss, None, None):
        raise FedcontextError(
            f"loss must be a function of outputs and labels, such as CrossEntropyLoss(), got {shown(loss)}"
        )


def _mean_gradient(model: Any, samples: int) -> dict[str, Any]:
    grads = {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}
    return {name: (grad / max(samples, 1)).cpu().numpy() for name, grad in grads.items() if grad is not None}


def _inputs_and_labels(batch: Any) -> tuple[Any, Any]:
    parts = tuple(batch.values() if isinstance(batch, Mapping) else batch)
    if len(parts) != 2 or not all(hasattr(part, "to") for part in parts):
        raise FedcontextError(
            f"a batch must be two tensors, inputs and labels, got {type(batch).__name__}: batches must return one "
            "loader, such as load_data(...)[0]"
        )
    return parts


def _replace_weights_by_update(content: RecordDict, params: Arrays) -> None:
    """Replace the record of new weights by the update Δ = new - params."""
    for key, record in list(content.array_records.items()):
        if record.keys() == params.keys():
            new = arrays_of(record)
            content[UPDATE] = record_of({name: np.subtract(new[name], old) for name, old in params.items()})
            del content[key]
            return


def _previous(content: RecordDict) -> Arrays | None:
    """Remove the previous params from a message, and return them."""
    if PREVIOUS not in content.array_records:
        return None
    previous = arrays_of(content.array_records[PREVIOUS])
    del content[PREVIOUS]
    return previous


def _model(message: Message) -> Arrays:
    """Return the model in the message: its only record of arrays."""
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise FedcontextError(f"a message must contain one model, got {len(records)}")
    return arrays_of(records[0])


def _number(value: Any) -> float | int:
    return int(value) if isinstance(value, int | np.integer) else float(value)
