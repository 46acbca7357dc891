"""Softmax regression on one device's data, computed by the simulator's reference engine."""

import numpy as np
from flwr.app import Context, UserConfig

import fedcontext as fc
from fedcontext.algorithms import Algorithm, algorithm_named
from fedcontext.datasets.federated import FederatedData, Split
from fedcontext.engines.base import Work
from fedcontext.engines.softmax import SoftmaxReference


def algorithm(config: UserConfig) -> Algorithm:
    rate = float(config["learning-rate"])
    hyperparameters = fc.Hyperparameters(
        learning_rate=rate,
        smoothness=float(config["smoothness"]) or 1 / rate,
        batch_size=int(config["batch-size"]),
        mu=float(config["mu"]),
    )
    chosen = algorithm_named(str(config["algorithm"]), hyperparameters)
    if chosen.variates or chosen.oracle or "steps" in chosen.rule.needs:
        raise fc.FedcontextError(f"{chosen.name} runs in simulations only; use another algorithm in Flower")
    return chosen


def initial_params(config: UserConfig) -> dict[str, np.ndarray]:
    return {"softmax": SoftmaxReference(fc.load_dataset(str(config["dataset"]))).initial_params()}


def train(params: dict[str, np.ndarray], config: dict, context: Context) -> tuple[dict[str, np.ndarray], int]:
    device, data = own_data(context)
    epochs = np.array([config["local-epochs"]])
    local = algorithm(context.run_config).local
    work = Work(int(context.run_config["seed"]), config["server-round"], np.array([device]), epochs, local)
    (update,) = SoftmaxReference(data).train(params["softmax"], work)
    return {"softmax": params["softmax"] + update}, int(data.train.sizes[device])


def gradient(params: dict[str, np.ndarray], context: Context) -> tuple[dict[str, np.ndarray], int]:
    device, data = own_data(context)
    (result,) = SoftmaxReference(data).gradients(params["softmax"], np.array([device]))
    return {"softmax": result}, int(data.train.sizes[device])


def evaluate(params: dict[str, np.ndarray], context: Context) -> dict[str, float]:
    device, data = own_data(context)
    loss, accuracy = SoftmaxReference(subset(data, device)).evaluate(params["softmax"])
    return {"loss": loss, "accuracy": accuracy, "num-examples": int(data.train.sizes[device])}


def own_data(context: Context) -> tuple[int, FederatedData]:
    """Return the number of this node's device, and the dataset."""
    return int(context.node_config["partition-id"]), fc.load_dataset(str(context.run_config["dataset"]))


def subset(data: FederatedData, device: int) -> FederatedData:
    """Return the dataset of one device alone."""

    def rows_of(split: Split) -> Split:
        rows = split.rows(device)
        return Split(split.features[rows], split.labels[rows], np.array([0, rows.stop - rows.start]))

    return FederatedData(data.name, rows_of(data.train), rows_of(data.test), data.classes)
