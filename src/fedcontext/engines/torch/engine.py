"""Any torch.nn.Module as the devices' model: one device after another, or all devices of a cohort at once.

Params are the module's ``state_dict``. Both ways take their batches from the plan and agree to rounding; the first
is PyTorch's own optimiser on one model, the truth that the second (`stacked`) is tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, get_args

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.datasets.federated import FederatedData, Split, check_devices
from fedcontext.engines.torch.convolutions import Convolutions, converted, hindrance_to_fused
from fedcontext.engines.torch.models import model_named
from fedcontext.engines.torch.stage import Speed
from fedcontext.engines.torch.task import (
    Loss,
    Params,
    Precision,
    Task,
    cross_entropy,
    device_named,
    first_line,
    seeded,
)
from fedcontext.engines.torch.vmapped import AtOnce, in_chunks, obstacle
from fedcontext.errors import FedcontextError, require
from fedcontext.plan import IntArray, Stream, batches, generator

require("torch", extra="torch")
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

if TYPE_CHECKING:
    from fedcontext.engines.base import Work

# Numbers in the samples of one pass over data; activations take a multiple, and large ones cost a CPU fresh pages.
PASS = {"cpu": 2**16, "cuda": 2**23}


class TorchEngine:
    """Trains a module on every device's data. The module given is copied, never changed.

    Args:
        data: the devices' samples, flat; ``input_shape`` gives them the shape that the module takes.
        module: a ``torch.nn.Module``, or a function that makes one (its random weights then follow ``seed``).
        loss: (outputs, labels) -> one loss a sample; cross-entropy where not given.
        device: auto (a GPU where there is one), cpu or cuda; all samples are kept there.
        at_once: all devices of a cohort in one vectorised step, or one after another; where None, at once on a GPU
            for modules that can.
        chunk: how many devices at once at most; where None, all that fit the memory.
        speed: plain, graph (CUDA graphs), compile (`torch.compile`, then a graph) or search (the same, and the fastest
            kernel tried out for each matrix product: minutes to start); auto is graph on a GPU. What cannot be had
            falls back with a warning.
        precision: of training: full (the module's own), tf32, or bfloat16 (params and updates stay in the module's own).
        convolutions: library; as matrix products over columns made by unfold or slices; or fused, gathered and
            multiplied in one kernel (on a GPU, and where there is a kernel; else slices). auto is fused where devices
            train at once on a GPU that can, else library.

    >>> import fedcontext as fc
    >>> data = fc.load_dataset("synthetic-iid")
    >>> engine = TorchEngine(data, lambda: nn.Sequential(nn.Linear(60, 16), nn.ReLU(), nn.Linear(16, 10)))
    >>> list(engine.initial_params())
    ['0.weight', '0.bias', '2.weight', '2.bias']
    >>> experiment = fc.Experiment(algorithm="fedavg", rounds=2, epochs=(1, 1), learning_rate=0.1, momentum=0.9)
    >>> records = [record for _, record in fc.prepare(experiment, data, engine).play()]
    >>> records[1].loss < records[0].loss
    True
    """

    def __init__(
        self,
        data: FederatedData,
        module: nn.Module | Callable[[], nn.Module],
        *,
        loss: Loss = cross_entropy,
        input_shape: tuple[int, ...] | None = None,
        device: str = "auto",
        at_once: bool | None = None,
        chunk: int | None = None,
        speed: Speed = "auto",
        precision: Precision = "full",
        convolutions: Convolutions = "auto",
        seed: int = 0,
    ) -> None:
        if speed not in get_args(Speed):
            raise FedcontextError(f"speed must be one of {', '.join(get_args(Speed))}, got {speed!r}")
        if chunk is not None and chunk < 1:
            raise FedcontextError(f"chunk must be at least 1, got {chunk}")
        if not isinstance(data.train, Split):
            raise FedcontextError(
                "engine 'torch' keeps all samples in one place, got data made on demand: use engine 'numba'"
            )
        self.data, self.split = data, data.train
        self.task = Task(
            data,
            self.split,
            module,
            loss=loss,
            input_shape=input_shape,
            device=device_named(device),
            precision=precision,
            convolutions=convolutions,
            seed=seed,
        )
        hindrance = obstacle(self.task.module)
        if at_once and hindrance:
            raise FedcontextError(hindrance)
        on_gpu = self.task.device.type == "cuda"
        self.at_once = on_gpu and not hindrance if at_once is None else at_once
        if convolutions == "auto" and self.at_once and hindrance_to_fused(self.task.device) is None:
            converted(self.task.module, "fused")
        if convolutions == "fused" and on_gpu and (reason := hindrance_to_fused(self.task.device)):
            raise FedcontextError(f"convolutions='fused' is not to be had here ({reason}): take 'slices'")
        self.stacked = AtOnce(self.task, self.split, chunk, speed)
        self.buffers = self.task.constants  # leaves for the door to average: no gradient moves them
        self.rows = max(16, min(4096, PASS.get(self.task.device.type, 2**16) // max(1, data.dimension)))

    def initial_params(self) -> dict[str, Tensor]:
        """Return a copy of the module's ``state_dict``."""
        return self.task.initial_params()

    def train(self, params: Params, work: Work) -> list[dict[str, Tensor]]:
        """Return each device's update after local training from ``params``, buffers included."""
        self.task.check(params)
        self._check_devices(work.devices)
        if not len(work.devices):
            return []
        if self.at_once:
            with _explained("all at once", "; one device after another it may work: at_once=False"):
                moved, sound = self.stacked.train(params, work)
            still = {name: torch.zeros_like(params[name]) for name in self.task.constants}
            moved = [{**moves, **still} for moves in moved]
        else:
            pairs = zip(work.devices.tolist(), work.epochs.tolist(), strict=True)
            moved = [self._train_device(params, device, epochs, work) for device, epochs in pairs]
            sound = [_finite(moves) for moves in moved]
        self._check_sound(sound, work)
        return [{name: moves[name] for name in params} for moves in moved]

    def _train_device(self, params: Params, device: int, epochs: int, work: Work) -> dict[str, Tensor]:
        task, local, rows = self.task, work.local, self.split.rows(device)
        own = {name: tensor.clone() for name, tensor in params.items()}
        moving = [own[name].requires_grad_() for name in task.trainable]
        anchors = [params[name] for name in task.trainable]
        optimiser = torch.optim.SGD(
            moving, lr=local.learning_rate, momentum=local.momentum, weight_decay=local.weight_decay
        )
        draw = int(generator(work.seed, work.number, Stream.DROPOUT, device).integers(2**62))
        with task.mode(training=True), seeded(task.device, draw), _explained(f"device {device}"):
            features, labels = task.features[rows], task.labels[rows]
            for batch in batches(work.seed, work.number, device, len(labels), epochs, local.batch_size):
                at = torch.from_numpy(batch).to(task.device)
                loss = task.losses(own, features[at], labels[at]).mean()
                slopes = torch.autograd.grad(loss, moving, allow_unused=True, materialize_grads=True)
                for leaf, slope in zip(moving, slopes, strict=True):
                    leaf.grad = slope
                if local.clip:
                    nn.utils.clip_grad_norm_(moving, local.clip)
                if local.mu:
                    for leaf, slope, anchor in zip(moving, slopes, anchors, strict=True):
                        slope.add_(leaf.detach() - anchor, alpha=local.mu)
                optimiser.step()
        return {name: tensor.detach() - params[name] for name, tensor in own.items()}

    def gradients(self, params: Params, devices: IntArray) -> list[dict[str, Tensor]]:
        """Return ∇F_k(params) of each device, the module in its evaluation mode (no dropout, saved statistics)."""
        self.task.check(params)
        self._check_devices(devices)
        if self.at_once:
            with _explained("all at once", "; one device after another it may work: at_once=False"):
                return self.stacked.gradients(params, devices.tolist(), self.rows)
        return [self.gradient(params, devices[at : at + 1], np.ones(1)) for at in range(len(devices))]

    def gradient(self, params: Params, devices: IntArray, weights: FloatArray) -> dict[str, Tensor]:
        """Return Σ weights ∇F_k(params): one pass over the devices' data, as if it were one device's."""
        self.task.check(params)
        self._check_devices(devices)
        task, sizes = self.task, self.split.sizes[devices]
        firsts = self.split.offsets[devices] - (np.cumsum(sizes) - sizes)
        at = torch.from_numpy(np.arange(sizes.sum()) + np.repeat(firsts, sizes)).to(task.device)
        each = torch.from_numpy(np.repeat(weights / sizes, sizes)).to(task.device, task.dtype)
        own = {name: tensor.detach().clone() for name, tensor in params.items()}
        moving = [own[name].requires_grad_() for name in task.trainable]
        totals = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in moving]

        def attempt(start: int, stop: int) -> None:
            rows = at[start:stop]
            loss = task.losses(own, task.features[rows], task.labels[rows]) @ each[start:stop]
            slopes = torch.autograd.grad(loss, moving, allow_unused=True, materialize_grads=True)
            for total, slope in zip(totals, slopes, strict=True):
                total += slope

        with task.mode(training=False):
            in_chunks(len(at), self.rows, attempt, "taking gradients of samples")
        return {name: total.to(task.dtype) for name, total in zip(task.trainable, totals, strict=True)}

    @torch.no_grad()
    def evaluate(self, params: Params) -> tuple[float, float]:
        """Return the mean loss over all training samples and the share of all test samples classified right."""
        task = self.task
        task.check(params)
        loss = torch.zeros((), dtype=torch.float64, device=task.device)
        right = torch.zeros((), dtype=torch.int64, device=task.device)

        def lose(start: int, stop: int) -> None:
            found = task.losses(params, task.features[start:stop], task.labels[start:stop])
            loss.add_(found.sum(dtype=torch.float64))

        def judge(start: int, stop: int) -> None:
            guesses = task.outputs(params, task.test_features[start:stop]).argmax(dim=1)
            right.add_((guesses == task.test_labels[start:stop]).sum())

        with task.mode(training=False):
            in_chunks(len(task.labels), self.rows, lose, "evaluating samples")
            in_chunks(len(task.test_labels), self.rows, judge, "evaluating samples")
        return float(loss) / len(task.labels), int(right) / max(1, len(task.test_labels))

    def _check_devices(self, devices: IntArray) -> None:
        check_devices(self.split, devices)
        empty = devices[self.split.sizes[devices] == 0]
        if len(empty):
            raise FedcontextError(f"device {empty[0]} has no training samples: leave it out of the fleet")

    def _check_sound(self, sound: list[Tensor], work: Work) -> None:
        """Name the devices whose training ran away: nothing of theirs may reach an aggregation."""
        bad = work.devices[~torch.stack(sound).cpu().numpy()]
        if len(bad):
            raise work.local.divergence_error(bad.tolist())


def torch_engine(data: FederatedData, model: str = "softmax", device: str = "auto", seed: int = 0) -> TorchEngine:
    """Return the engine for a model of the table, its samples in the shape that it takes.

    >>> import fedcontext as fc
    >>> torch_engine(fc.load_dataset("synthetic-iid"), "logistic", device="cpu").at_once
    False
    """
    factory, shape = model_named(model, data.dimension, data.classes)
    return TorchEngine(data, factory, input_shape=shape, device=device, seed=seed)


@contextmanager
def _explained(what: str, advice: str = "") -> Iterator[None]:
    """Turn what a module raises in training into an error that says where, and what to change."""
    try:
        yield
    except FedcontextError:
        raise
    except torch.cuda.OutOfMemoryError as error:
        raise FedcontextError(
            f"{what}: out of GPU memory ({first_line(error)}): take a smaller batch or model"
        ) from error
    except (RuntimeError, ValueError) as error:
        if "more than 1 value per channel" in str(error):
            advice = "; BatchNorm needs batches of two samples or more: use GroupNorm or another batch size"
        raise FedcontextError(
            f"{what}: the module or its loss failed in training ({first_line(error)}){advice}"
        ) from error


def _finite(moves: Params) -> Tensor:
    return torch.stack([move.isfinite().all() for move in moves.values()]).all()
