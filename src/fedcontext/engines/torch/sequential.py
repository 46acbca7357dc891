"""Training one device after another with `torch.optim.SGD`, and gradients over the samples of several devices."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from fedcontext.arrays.tree import FloatArray
from fedcontext.engines.base import Work
from fedcontext.engines.torch.task import Params, Task, seeded
from fedcontext.engines.torch.vmapped import run_in_chunks
from fedcontext.plan import IntArray, Stream, batches, generator


def train_device(task: Task, params: Params, row: int, work: Work) -> dict[str, Tensor]:
    """Return the update of the device in a row of ``work`` after local training from ``params``, buffers included."""
    device, epochs, local = int(work.devices[row]), int(work.epochs[row]), work.local
    rows = task.split.rows(device)
    corrections = [work.corrections[row][name] for name in task.trainable] if work.corrections is not None else []
    own, trained = _leaves(task, params)
    initial = [params[name] for name in task.trainable]
    optimizer = torch.optim.SGD(
        trained, lr=local.learning_rate, momentum=local.momentum, weight_decay=local.weight_decay
    )
    dropout_seed = int(generator(work.seed, work.number, Stream.DROPOUT, device).integers(2**62))
    with task.mode(training=True), seeded(task.device, dropout_seed):
        features, labels = task.features[rows], task.labels[rows]
        for batch in batches(work.seed, work.number, device, len(labels), epochs, local.batch_size):
            at = torch.from_numpy(batch).to(task.device)
            loss = task.losses(own, features[at], labels[at]).mean()
            gradients = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
            for leaf, part in zip(trained, gradients, strict=True):
                leaf.grad = part
            if local.clip:
                nn.utils.clip_grad_norm_(trained, local.clip)
            if local.mu:
                for leaf, part, start in zip(trained, gradients, initial, strict=True):
                    part.add_(leaf.detach() - start, alpha=local.mu)
            for part, correction in zip(gradients, corrections, strict=False):
                part.add_(correction)
            optimizer.step()
    return {name: tensor.detach() - params[name] for name, tensor in own.items()}


def gradient(task: Task, params: Params, devices: IntArray, weights: FloatArray, rows: int) -> dict[str, Tensor]:
    """Return Σ weights ∇F_k(params), in passes over ``rows`` samples of any of the devices."""
    sizes = task.split.sizes[devices]
    firsts = task.split.offsets[devices] - (np.cumsum(sizes) - sizes)
    samples = torch.from_numpy(np.arange(sizes.sum()) + np.repeat(firsts, sizes)).to(task.device)
    sample_weights = torch.from_numpy(np.repeat(weights / sizes, sizes)).to(task.device, task.dtype)
    own, trainable = _leaves(task, params)
    totals = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in trainable]

    def run(start: int, stop: int) -> None:
        at = samples[start:stop]
        loss = task.losses(own, task.features[at], task.labels[at]) @ sample_weights[start:stop]
        parts = torch.autograd.grad(loss, trainable, allow_unused=True, materialize_grads=True)
        for total, part in zip(totals, parts, strict=True):
            total += part

    with task.mode(training=False):
        run_in_chunks(len(samples), rows, run, "computing gradients of samples")
    return {name: total.to(task.dtype) for name, total in zip(task.trainable, totals, strict=True)}


def _leaves(task: Task, params: Params) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return a copy of params, and its leaves that require a gradient."""
    own = {name: tensor.detach().clone() for name, tensor in params.items()}
    return own, [own[name].requires_grad_() for name in task.trainable]
