"""pfl-research: its FederatedAveraging on its SimulatedBackend; a small subclass adds epochs per device."""

import numpy as np
import torch
from harness import BATCH, CLASSES, RATE, arguments, play
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.model.pytorch import PyTorchModel


class Logistic(torch.nn.Linear):
    def loss(self, x, y, eval=False):
        return torch.nn.functional.cross_entropy(self(x), y)

    def metrics(self, x, y, eval=False):
        return {}


class PlannedDataset(Dataset):
    """A device's data in the planned batches of all its epochs."""

    def __init__(self, batches, **kwargs):
        super().__init__(**kwargs)
        self.batches = batches

    def iter(self, batch_size):
        x, y = self.raw_data
        return ((x[rows], y[rows]) for rows in self.batches)


class PFL:
    def __init__(self, work):
        torch.set_num_threads(1)
        pytorch_ops.get_default_device()
        self.work, self.features = work, torch.from_numpy(np.array(work.features))
        self.labels = torch.from_numpy(work.labels)
        self.train = NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH, local_max_grad_norm=None
        )
        self.settings = NNAlgorithmParams(
            central_num_iterations=2, evaluation_frequency=2, train_cohort_size=work.devices.shape[1], val_cohort_size=0
        )

    def reset(self):
        module = Logistic(self.features.shape[1], CLASSES)
        for parameter in module.parameters():
            torch.nn.init.zeros_(parameter)
        self.model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
        self.algorithm = FederatedAveraging()
        self.places = iter([(n, place) for n in range(self.work.rounds) for place in range(self.work.devices.shape[1])])
        cohort = FederatedDataset(self.dataset, lambda: next(self.places))
        self.backend = SimulatedBackend(cohort, cohort, postprocessors=[WeightByDatapoints()])

    def dataset(self, who):
        number, place = who
        device = self.work.devices[number, place]
        rows = slice(int(self.work.offsets[device]), int(self.work.offsets[device + 1]))
        batches = [torch.from_numpy(batch - self.work.offsets[device]) for batch in self.work.batches(number, place)]
        return PlannedDataset(batches, raw_data=[self.features[rows], self.labels[rows]], user_id=str(device))

    def round(self, number):
        self.algorithm._current_central_iteration = 1  # the first iteration would evaluate too
        self.algorithm.run(self.settings, self.backend, self.model, self.train, send_metrics_to_platform=False)

    def params(self):
        weight, bias = (parameter.detach().numpy() for parameter in self.model.pytorch_model.parameters())
        return np.vstack([weight.T, bias])


if __name__ == "__main__":
    work, out = arguments()
    play(PFL(work), work, out)
