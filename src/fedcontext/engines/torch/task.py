"""The learning task of the PyTorch engine: a module, its loss and all samples, checked and on one device."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fedcontext.datasets.federated import FederatedData, Split
from fedcontext.errors import FedcontextError

Params: TypeAlias = Mapping[str, Tensor]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) -> (n,) losses
Precision: TypeAlias = Literal["full", "tf32", "bfloat16"]
NO_MODULE = "module must be a torch.nn.Module or a function that returns one"


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return (n,) cross-entropies.

    >>> cross_entropy(torch.zeros(1, 4), torch.tensor([2])).item()
    1.3862943649291992
    """
    return nn.functional.cross_entropy(outputs, labels, reduction="none")


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the `torch.device` of a name; "auto" is a GPU if there is one.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        resolved = torch.device("meta")
    if resolved.type not in ("cpu", "cuda"):
        raise FedcontextError(f"device must be auto, cpu or cuda, got {device!r}")
    if resolved.type == "cpu":
        return resolved
    if (resolved.index or 0) >= torch.cuda.device_count():
        raise FedcontextError(f"device={str(device)!r} needs a GPU that PyTorch {torch.__version__} does not find")
    return torch.device("cuda", torch.cuda.current_device() if resolved.index is None else resolved.index)


class Task:
    """A copy of the module, its loss, and the training and test samples, all on one device."""

    def __init__(
        self,
        data: FederatedData,
        module: nn.Module | Callable[[], nn.Module],
        *,
        loss: Loss,
        input_shape: Sequence[int] | None,
        device: torch.device,
        precision: Precision,
        seed: int,
    ) -> None:
        if not isinstance(data.train, Split):
            raise FedcontextError("engine 'torch' does not support data made on demand; use engine 'numba'")
        self.split, self.classes = data.train, data.classes
        self.device, self.precision, self.loss = device, precision, loss
        self.module = _built(module, device, seed).to(device)
        parameters, state = dict(self.module.named_parameters()), self.module.state_dict()
        self.trainable = [name for name, tensor in parameters.items() if tensor.requires_grad]
        frozen = [name for name, tensor in parameters.items() if not tensor.requires_grad]
        self.buffers = (*frozen, *(name for name, _ in self.module.named_buffers() if name in state))
        # A tied parameter is in the state_dict under each of its names, but trains under the first one alone.
        self.shapes = {name: tuple(state[name].shape) for name in state if name in {*self.trainable, *self.buffers}}
        if not self.trainable:
            raise FedcontextError(f"module {type(self.module).__name__} has no trainable parameter")
        self.dtype = parameters[self.trainable[0]].dtype
        shape = _sample_shape(data.dimension, input_shape)
        try:
            self.features, self.labels = self._tensors(data.train, shape)  # (n, *shape), (n,)
            self.test_features, self.test_labels = self._tensors(data.test, shape)
        except torch.cuda.OutOfMemoryError as error:
            raise FedcontextError(
                f"the samples do not fit the memory of {device} ({first_line(error)}); use device='cpu'"
            ) from error
        self._try_module()

    def initial_params(self) -> dict[str, Tensor]:
        """Return a copy of the module's ``state_dict``, tied parameters once."""
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {name: tensors[name].detach().clone() for name in self.shapes}

    def check_params(self, params: Params) -> None:
        """Raise if names, shapes or the device of ``params`` are not the module's."""
        if not isinstance(params, Mapping):
            raise FedcontextError(f"params must map names to tensors, got {type(params).__name__}")
        if differing := self.shapes.keys() ^ params.keys():
            raise FedcontextError(f"params must have the module's names, they differ in {', '.join(sorted(differing))}")
        for name, shape in self.shapes.items():
            if tuple(params[name].shape) != shape:
                raise FedcontextError(f"params {name!r} must have shape {shape}, got {tuple(params[name].shape)}")
            if params[name].device.type != self.device.type:
                raise FedcontextError(f"params {name!r} must be on {self.device}, got {params[name].device}")

    def outputs(self, params: Params, features: Tensor) -> Tensor:
        """Return the module's outputs at ``params``; bfloat16 is used in training mode alone."""
        if self.precision != "bfloat16" or not self.module.training:
            result: Tensor = torch.func.functional_call(self.module, dict(params), (features,))
            return result
        low = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in params.items()}
        result = torch.func.functional_call(self.module, low, (features.bfloat16(),))
        return result.to(self.dtype)

    def losses(self, params: Params, features: Tensor, labels: Tensor) -> Tensor:
        """Return (n,) losses at ``params``."""
        return self.loss(self.outputs(params, features), labels)

    @contextmanager
    def mode(self, training: bool) -> Iterator[None]:
        """Set the module to training or evaluation mode, and TF32 as ``precision`` says, inside the block."""
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        before = cudnn.allow_tf32, matmul.allow_tf32
        self.module.train(training)
        try:
            if self.device.type == "cuda":
                cudnn.allow_tf32 = matmul.allow_tf32 = training and self.precision != "full"
            yield
        finally:
            if self.device.type == "cuda":
                cudnn.allow_tf32, matmul.allow_tf32 = before

    def _tensors(self, split: Split, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        low, high = (int(end(split.labels, initial=0)) for end in (np.min, np.max))
        if low < 0 or high >= self.classes:
            raise FedcontextError(f"labels must be from 0 to {self.classes - 1}, got {low} to {high}")
        features = np.require(split.features, requirements=["C", "W"])  # PyTorch has no read-only tensors
        return (
            torch.from_numpy(features).to(self.device, self.dtype).reshape(-1, *shape),
            torch.from_numpy(np.array(split.labels)).to(self.device),
        )

    @torch.no_grad()
    def _try_module(self) -> None:
        """Run the module and the loss on two samples, so that a mismatch raises before the first round."""
        if not len(self.labels):
            raise FedcontextError("the data has no training samples")
        features, labels = self.features[:2], self.labels[:2]
        count = len(labels)
        with self.mode(training=False):
            try:
                outputs = self.outputs(self.initial_params(), features)
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                reason = f"samples of shape {tuple(features.shape[1:])} ({first_line(error)})"
                advice = "if they are flat images, give engine=TorchEngine(data, module, input_shape=(1, 28, 28))"
                raise FedcontextError(f"the module does not accept {reason}; {advice}") from error
            if not isinstance(outputs, torch.Tensor):
                raise FedcontextError(f"the module must return a tensor, got {type(outputs).__name__}")
            if self.loss is cross_entropy and not (outputs.ndim == 2 and outputs.shape[1] >= self.classes):
                raise FedcontextError(
                    f"the module must return ({count}, {self.classes}) outputs for {count} samples, "
                    f"got {tuple(outputs.shape)}"
                )
            losses = self.loss(outputs, labels)
        if tuple(losses.shape) != (count,):
            raise FedcontextError(
                f"the loss must return one number per sample (reduction='none'), shape ({count},), "
                f"got {tuple(losses.shape)}"
            )


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed PyTorch's generators (initial weights, dropout) inside the block and restore their state after it.

    >>> with seeded(torch.device("cpu"), 3): first = torch.rand(1)
    >>> with seeded(torch.device("cpu"), 3): second = torch.rand(1)
    >>> bool(first == second)
    True
    """
    gpu = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpu):
        torch.default_generator.manual_seed(seed)
        for each in gpu:
            torch.cuda.default_generators[each.index].manual_seed(seed)
        yield


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters.

    >>> first_line(ValueError("shapes differ\\nand a long traceback"))
    'shapes differ'
    """
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _built(module: nn.Module | Callable[[], nn.Module], device: torch.device, seed: int) -> nn.Module:
    check_module(module)
    with seeded(device, seed):
        return new_module(module)


def new_module(module: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return a copy of a module, or of what a function returns, which may be the same one each time.

    >>> new_module(nn.Flatten)
    Flatten(start_dim=1, end_dim=-1)
    """
    built = copy.deepcopy(module if isinstance(module, nn.Module) else module())
    if not isinstance(built, nn.Module):
        raise FedcontextError(f"{NO_MODULE}, got {type(built).__name__}")
    return built


def check_module(module: nn.Module | Callable[[], nn.Module]) -> None:
    """Raise an error for what `new_module` cannot use, such as the class ``nn.Linear`` itself, which needs arguments.

    >>> check_module(5)
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: module must be a torch.nn.Module or a function that returns one, got int
    """
    if isinstance(module, nn.Module):
        return
    if not callable(module):
        raise FedcontextError(f"{NO_MODULE}, got {type(module).__name__}")
    try:
        inspect.signature(module).bind()
    except ValueError:  # builtins have no signature
        return
    except TypeError as error:
        name = getattr(module, "__name__", type(module).__name__)
        instance = f"; give an instance, such as {name}(...)" if inspect.isclass(module) else ""
        raise FedcontextError(
            f"module must be a torch.nn.Module or a function without arguments that returns one, but {name} needs "
            f"arguments ({error}){instance}"
        ) from None


def _sample_shape(dimension: int, asked: Sequence[int] | None) -> tuple[int, ...]:
    if asked is None:
        return (dimension,)
    if not isinstance(asked, tuple | list) or not all(isinstance(size, int) and size > 0 for size in asked):
        raise FedcontextError(f"input_shape must be a tuple of positive integers, got {asked!r}")
    if int(np.prod(asked)) != dimension:
        raise FedcontextError(
            f"input_shape {tuple(asked)} has {int(np.prod(asked))} entries, but a sample has {dimension}"
        )
    return tuple(asked)
