"""A module, its loss and the data in one place, checked: what both ways of training any torch.nn.Module build on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeAlias

import numpy as np

from fedcontext.datasets.federated import FederatedData, Split
from fedcontext.engines.torch.convolutions import Convolutions, converted
from fedcontext.errors import FedcontextError, require

require("torch", extra="torch")
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

Params: TypeAlias = Mapping[str, Tensor]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) -> one loss a sample
Precision: TypeAlias = Literal["full", "tf32", "bfloat16"]


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return (n,) cross-entropies.

    >>> cross_entropy(torch.zeros(1, 4), torch.tensor([2])).item()
    1.3862943649291992
    """
    return nn.functional.cross_entropy(outputs, labels, reduction="none")


def device_named(word: str) -> torch.device:
    """Return where to compute: "auto" is a GPU where there is one; or "cpu", "cuda", "cuda:1".

    >>> device_named("cpu")
    device(type='cpu')
    """
    if word == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(word)
    except (RuntimeError, TypeError):
        raise FedcontextError(f"device must be auto, cpu or cuda, got {word!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise FedcontextError(f"device {word!r} was asked for, and PyTorch {torch.__version__} sees no GPU here")
    return device


class Task:
    """A copy of the module, its loss and all samples, on one device; `losses` is the only door to the module."""

    def __init__(
        self,
        data: FederatedData,
        train: Split,
        module: nn.Module | Callable[[], nn.Module],
        *,
        loss: Loss,
        input_shape: tuple[int, ...] | None,
        device: torch.device,
        precision: Precision,
        convolutions: Convolutions,
        seed: int,
    ) -> None:
        if precision not in ("full", "tf32", "bfloat16"):
            raise FedcontextError(f"precision must be full, tf32 or bfloat16, got {precision!r}")
        with seeded(device, seed):
            made = copy.deepcopy(module() if callable(module) and not isinstance(module, nn.Module) else module)
        if not isinstance(made, nn.Module):
            raise FedcontextError(
                f"module must be a torch.nn.Module or a function that makes one, got {type(made).__name__}"
            )
        self.device, self.precision, self.loss, self.classes = device, precision, loss, data.classes
        self.module = converted(made, convolutions).to(device)
        parameters, saved = dict(self.module.named_parameters()), self.module.state_dict()
        self.trainable = [name for name, tensor in parameters.items() if tensor.requires_grad]
        self.constants = [name for name, tensor in parameters.items() if not tensor.requires_grad]
        self.constants += [name for name, _ in self.module.named_buffers() if name in saved]
        self.names = [name for name in saved if name in {*self.trainable, *self.constants}]  # tied ones once
        if not self.trainable:
            raise FedcontextError(f"module {type(made).__name__} has no parameter to train")
        self.dtype = parameters[self.trainable[0]].dtype
        self.shapes = {name: tuple(saved[name].shape) for name in self.names}
        shape = _shape(data.dimension, input_shape)
        try:
            self.features, self.labels = self._place(train, shape)
            self.test_features, self.test_labels = self._place(data.test, shape)
        except torch.cuda.OutOfMemoryError as error:
            raise FedcontextError(f"the samples do not fit {device}'s memory ({first_line(error)}): use cpu") from error
        self._check()

    def initial_params(self) -> dict[str, Tensor]:
        """Return a copy of the module's ``state_dict`` (tied parameters once)."""
        found = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {name: found[name].detach().clone() for name in self.names}

    def check(self, params: Params) -> None:
        """Refuse params that are not the module's: other names, shapes or places."""
        if not isinstance(params, Mapping):
            raise FedcontextError(f"params must be the module's tensors by name, got {type(params).__name__}")
        if unlike := self.shapes.keys() ^ params.keys():
            raise FedcontextError(
                f"params must have the module's names, got a difference in {', '.join(sorted(unlike))}"
            )
        for name, shape in self.shapes.items():
            if tuple(params[name].shape) != shape:
                raise FedcontextError(f"params {name!r} must have shape {shape}, got {tuple(params[name].shape)}")
            if params[name].device.type != self.device.type:
                raise FedcontextError(f"params {name!r} must be on {self.device}, got {params[name].device}")

    def outputs(self, params: Params, features: Tensor) -> Tensor:
        """Return the module's outputs for a batch, at ``params``; only training may use lower precision."""
        if self.precision != "bfloat16" or not self.module.training:
            result: Tensor = torch.func.functional_call(self.module, dict(params), (features,))
            return result
        low = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in params.items()}
        result = torch.func.functional_call(self.module, low, (features.bfloat16(),))
        return result.to(self.dtype)

    def losses(self, params: Params, features: Tensor, labels: Tensor) -> Tensor:
        """Return one loss a sample, at ``params``."""
        return self.loss(self.outputs(params, features), labels)

    @contextmanager
    def mode(self, training: bool) -> Iterator[None]:
        """Put the module in its training or its evaluation mode, and float32 products at the precision asked for."""
        cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
        before = cudnn.allow_tf32, products.allow_tf32
        self.module.train(training)
        try:
            if self.device.type == "cuda":
                cudnn.allow_tf32 = products.allow_tf32 = training and self.precision != "full"
            yield
        finally:
            if self.device.type == "cuda":
                cudnn.allow_tf32, products.allow_tf32 = before

    def _place(self, split: Split, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        low, high = (int(end(split.labels, initial=0)) for end in (np.min, np.max))
        if low < 0 or high >= self.classes:
            raise FedcontextError(f"labels must be from 0 to {self.classes - 1}, got {low} to {high}")
        features = np.ascontiguousarray(split.features)
        if not features.flags.writeable:
            features = features.copy()  # PyTorch has no read-only tensors
        placed = torch.from_numpy(features).to(self.device, self.dtype).reshape(-1, *shape)
        return placed, torch.from_numpy(np.array(split.labels)).to(self.device)

    @torch.no_grad()
    def _check(self) -> None:
        """Try the module and the loss on two samples: what does not fit shows here, before any round."""
        if not len(self.labels):
            raise FedcontextError("there are no training samples")
        features, labels, params = self.features[:2], self.labels[:2], self.initial_params()
        shape, count = tuple(features.shape[1:]), len(labels)
        with self.mode(training=False):
            try:
                outputs = self.outputs(params, features)
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                raise FedcontextError(
                    f"the module does not take samples of shape {shape} (input_shape changes that): {first_line(error)}"
                ) from error
            if self.loss is cross_entropy and not (outputs.ndim == 2 and outputs.shape[1] >= self.classes):
                raise FedcontextError(
                    f"the module must give ({count}, {self.classes}) outputs for {count} samples, "
                    f"got {tuple(outputs.shape)}"
                )
            losses = self.loss(outputs, labels)
        if tuple(losses.shape) != (count,):
            raise FedcontextError(
                f"the loss must return one number a sample (reduction='none'), shape ({count},), "
                f"got {tuple(losses.shape)}"
            )


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Make PyTorch's random numbers (initial weights, dropout) follow ``seed`` inside, and leave no trace outside.

    >>> with seeded(torch.device("cpu"), 3): first = torch.rand(1)
    >>> with seeded(torch.device("cpu"), 3): second = torch.rand(1)
    >>> bool(first == second)
    True
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        current = torch.cuda.current_device()
        generators.append(torch.cuda.default_generators[current if device.index is None else device.index])
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def first_line(error: BaseException) -> str:
    """Return the start of an error's message.

    >>> first_line(ValueError("this went wrong: so\\nand a long story"))
    'this went wrong: so'
    """
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _shape(dimension: int, asked: tuple[int, ...] | None) -> tuple[int, ...]:
    if asked is None:
        return (dimension,)
    if int(np.prod(asked)) != dimension:
        raise FedcontextError(f"input_shape {tuple(asked)} holds {int(np.prod(asked))} numbers, a sample {dimension}")
    return tuple(asked)
