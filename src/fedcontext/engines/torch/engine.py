"""The PyTorch engine: any `torch.nn.Module`, trained one device after another or all devices of a cohort at once.

Params are the module's ``state_dict``. Both ways draw their batches from the plan and agree to rounding: the first is
`torch.optim.SGD` on one model, and the tests compare the second (`vmapped`) with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from fedcontext.arrays.tree import FloatArray
from fedcontext.datasets.federated import FederatedData, check_devices
from fedcontext.engines.base import Work
from fedcontext.engines.torch.convolutions import Convolutions, convert_convolutions
from fedcontext.engines.torch.cuda_graph import COMPILED, Acceleration
from fedcontext.engines.torch.sequential import gradient, train_device
from fedcontext.engines.torch.task import Loss, Params, Precision, Task, cross_entropy, first_line, resolve_device
from fedcontext.engines.torch.vmapped import VmappedTrainer, batch_norm_in, run_in_chunks
from fedcontext.errors import FedcontextError, unknown_value_error
from fedcontext.plan import IntArray

FEATURES_PER_PASS = {"cpu": 2**16, "cuda": 2**23}  # more is slower on a CPU: activations leave the caches
# Parameters of a model that one CPU thread runs about as fast as several, and many times faster beside other work: the
# 101,770 of --model mlp on MNIST, not the 108,618 of cnn-small, whose gradients take 40 % less time on two threads.
SMALL = 105_000
MANY_SAMPLES = 100_000  # per gradient; more take a CPU minutes for a CNN
ONE_BY_ONE = "; vectorize=False trains one device after another"


class TorchEngine:
    """Trains a copy of a module on every device's data.

    Args:
        data: the devices' samples, flat; ``input_shape`` is the shape of one sample that the module expects.
        module: a ``torch.nn.Module``, or a function that returns one (its random weights then follow ``seed``).
        loss: (outputs, labels) -> (n,) losses; cross-entropy by default.
        device: "cpu", "cuda", "cuda:1", or "auto" for a GPU if there is one; all samples are kept there.
        vectorize: True trains all devices of a cohort at once with `torch.vmap`, False one after another; None is
            True on a GPU if the module supports it.
        chunk_size: the most devices trained at once; None is all of them, halved whenever memory runs out.
        acceleration: of vectorized steps: "eager", "cuda-graph", "compile" (`torch.compile`, then a CUDA graph) or
            "max-autotune" (also benchmarks matrix-product kernels: minutes to start). "auto" is "cuda-graph" on a GPU
            and "eager" on a CPU. An unavailable one falls back with a warning.
        precision: of training: "full" (the module's own), "tf32", or "bfloat16" (params and updates stay in full).
        convolutions: "native", or as matrix products over patches from "unfold" or from "slices"; "auto" is "slices"
            for vectorized, compiled steps on a GPU, and "native" otherwise.

    Attributes:
        buffers: names of the leaves without a gradient, buffers and frozen parameters: aggregation averages them.
        vectorize, acceleration, chunk_size: as in use, after fallbacks.

    >>> import fedcontext as fc
    >>> data = fc.load_dataset("synthetic-iid")
    >>> engine = TorchEngine(data, lambda: nn.Sequential(nn.Linear(60, 16), nn.ReLU(), nn.Linear(16, 10)))
    >>> list(engine.initial_params())
    ['0.weight', '0.bias', '2.weight', '2.bias']
    >>> experiment = fc.Experiment(algorithm="fedavg", rounds=2, epochs=(1, 1), learning_rate=0.1, momentum=0.9)
    >>> records = [record for _, record in fc.prepare(experiment, data=data, engine=engine).run()]
    >>> records[1].loss < records[0].loss
    True
    """

    supports_corrections = True

    def __init__(
        self,
        data: FederatedData,
        module: nn.Module | Callable[[], nn.Module],
        *,
        loss: Loss = cross_entropy,
        input_shape: tuple[int, ...] | None = None,
        device: str | torch.device = "auto",
        vectorize: bool | None = None,
        chunk_size: int | None = None,
        acceleration: Acceleration = "auto",
        precision: Precision = "full",
        convolutions: Convolutions = "auto",
        seed: int = 0,
    ) -> None:
        _check_choice("acceleration", acceleration, Acceleration)
        _check_choice("precision", precision, Precision)
        _check_choice("convolutions", convolutions, Convolutions)
        _check_integer("seed", seed, least=0)
        if chunk_size is not None:
            _check_integer("chunk_size", chunk_size, least=1)
        if not (vectorize is None or isinstance(vectorize, bool)):
            raise FedcontextError(f"vectorize must be True, False or None, got {vectorize!r}")
        if not callable(loss):
            raise FedcontextError(f"loss must be a function (outputs, labels) -> losses, got {loss!r}")
        self.data, self.device = data, resolve_device(device)
        self.task = Task(
            data, module, loss=loss, input_shape=input_shape, device=self.device, precision=precision, seed=seed
        )
        self.buffers = self.task.buffers
        self.vectorize = self._vectorizes(vectorize)
        on_gpu = self.device.type == "cuda"
        if acceleration == "auto":
            acceleration = "cuda-graph" if on_gpu and self.vectorize else "eager"
        self._warn_ignored(acceleration, precision)
        if convolutions == "auto":
            convolutions = "slices" if on_gpu and self.vectorize and acceleration in COMPILED else "native"
        convert_convolutions(self.task.module, convolutions)
        self._trainer = VmappedTrainer(self.task, chunk_size, acceleration if self.vectorize else "eager")
        self._rows = max(16, min(4096, FEATURES_PER_PASS["cuda" if on_gpu else "cpu"] // max(1, data.dimension)))
        self._warned = False

    @property
    def acceleration(self) -> Acceleration:
        """Return how steps run now."""
        return self._trainer.acceleration

    @property
    def chunk_size(self) -> int | None:
        """Return the most devices trained at once now."""
        return self._trainer.chunk_size

    def initial_params(self) -> dict[str, Tensor]:
        """Return a copy of the module's ``state_dict``, tied parameters once."""
        return self.task.initial_params()

    def train(self, params: Params, work: Work) -> list[dict[str, Tensor]]:
        """Return each device's update after local training from ``params``, buffers included."""
        self._check(params, work.devices)
        if not len(work.devices):
            return []
        if self.vectorize:
            with _explained("vectorized training", ONE_BY_ONE):
                trained, finite = self._trainer.train(params, work)
            unchanged = {name: torch.zeros_like(params[name]) for name in self.buffers}
            updates = [{**update, **unchanged} for update in trained]
        else:
            updates = []
            for row, device in enumerate(work.devices.tolist()):
                with _explained(f"device {device}"), self._threads():
                    updates.append(train_device(self.task, params, row, work))
            finite = [torch.stack([leaf.isfinite().all() for leaf in update.values()]).all() for update in updates]
        updates = [{name: update[name] for name in params} for update in updates]
        diverged = work.devices[~torch.stack(finite).cpu().numpy()]
        if len(diverged):
            raise work.local.divergence_error(diverged.tolist(), updates)
        return updates

    def gradients(self, params: Params, devices: IntArray) -> list[dict[str, Tensor]]:
        """Return ∇F_k(params) of each device, with the module in evaluation mode (no dropout, saved statistics)."""
        self._check(params, devices)
        self._warn_many_samples(devices)
        if self.vectorize:
            with _explained("vectorized gradients", ONE_BY_ONE):
                return self._trainer.gradients(params, devices, self._rows)
        return [self.gradient(params, devices[at : at + 1], np.ones(1)) for at in range(len(devices))]

    def gradient(self, params: Params, devices: IntArray, weights: FloatArray) -> dict[str, Tensor]:
        """Return Σ weights ∇F_k(params), in one pass over the samples of all these devices."""
        self._check(params, devices)
        self._warn_many_samples(devices)
        with self._threads():
            return gradient(self.task, params, devices, weights, self._rows)

    @torch.no_grad()
    def evaluate(self, params: Params) -> tuple[float, float]:
        """Return the mean loss over all training samples and the accuracy over all test samples."""
        task = self.task
        task.check_params(params)
        loss = torch.zeros((), dtype=torch.float64, device=task.device)
        correct = torch.zeros((), dtype=torch.int64, device=task.device)

        def add_losses(start: int, stop: int) -> None:
            losses = task.losses(params, task.features[start:stop], task.labels[start:stop])
            loss.add_(losses.sum(dtype=torch.float64))

        def add_correct(start: int, stop: int) -> None:
            predicted = task.outputs(params, task.test_features[start:stop]).argmax(dim=1)
            correct.add_((predicted == task.test_labels[start:stop]).sum())

        with task.mode(training=False), self._threads():
            run_in_chunks(len(task.labels), self._rows, add_losses, "evaluating samples")
            run_in_chunks(len(task.test_labels), self._rows, add_correct, "evaluating samples")
        return float(loss) / len(task.labels), int(correct) / max(1, len(task.test_labels))

    def _vectorizes(self, asked: bool | None) -> bool:
        layer = batch_norm_in(self.task.module)
        if asked and layer:
            raise FedcontextError(f"{layer} cannot be vectorized; use GroupNorm or vectorize=False")
        if asked is None and layer and self.device.type == "cuda":
            warnings.warn(f"{layer} cannot be vectorized; training one device after another", stacklevel=3)
        return self.device.type == "cuda" and not layer if asked is None else asked

    def _warn_ignored(self, acceleration: Acceleration, precision: Precision) -> None:
        if acceleration != "eager" and not self.vectorize:
            warnings.warn(f"acceleration={acceleration!r} is ignored: it needs vectorize=True", stacklevel=3)
        if precision == "tf32" and self.device.type != "cuda":
            warnings.warn("precision='tf32' is ignored: it needs a GPU", stacklevel=3)

    def _warn_many_samples(self, devices: IntArray) -> None:
        samples = int(self.task.split.sizes[devices].sum())
        if samples > MANY_SAMPLES and self.device.type == "cpu" and not self._warned:
            self._warned = True
            warnings.warn(
                f"each round computes gradients of {samples:,} samples from {len(devices):,} devices on a CPU; "
                "fewer probes (probes=20) or a GPU (device='cuda') would be faster",
                stacklevel=3,
            )

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Run small models on one CPU thread: several wait for each other at every operation on a few samples."""
        small = self.device.type == "cpu" and sum(map(Tensor.numel, self.task.module.parameters())) < SMALL
        before = torch.get_num_threads()
        torch.set_num_threads(1 if small else before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _check(self, params: Params, devices: IntArray) -> None:
        self.task.check_params(params)
        check_devices(self.task.split, devices)
        empty = devices[self.task.split.sizes[devices] == 0]
        if len(empty):
            raise FedcontextError(f"device {empty[0]} has no training samples; remove it from the data")


def _check_choice(name: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        raise unknown_value_error(name, value, get_args(choices))


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise FedcontextError(f"{name} must be an integer of at least {least}, got {value!r}")


@contextmanager
def _explained(action: str, advice: str = "") -> Iterator[None]:
    """Raise errors of the module as a FedcontextError that says where it failed and what to change."""
    try:
        yield
    except FedcontextError:
        raise
    except torch.cuda.OutOfMemoryError as error:
        raise FedcontextError(
            f"{action}: out of GPU memory ({first_line(error)}); use a smaller batch or model"
        ) from error
    except (RuntimeError, ValueError) as error:
        if "more than 1 value per channel" in str(error):
            advice = "; BatchNorm needs batches of at least two samples: use GroupNorm or another batch size"
        raise FedcontextError(f"{action}: the module or its loss failed ({first_line(error)}){advice}") from error
