"""Dense layers that keep what local steps add to their weights as factors, instead of a matrix for each device.

A step on B samples adds a matrix of rank B to a layer's (out, in) weights: the slopes of its outputs, turned, times its
inputs. So after S steps a device's weights are

    share · W + slopesᵀ inputs,    slopes (S B, out), inputs (S B, in),

with W, the start, the same for all devices. While S B is less than the rank of W, that is less to read, to write and to
multiply. Decay, proximal terms and momentum are linear in the weights: they act on (share, slopes) as they would on them.
"""

from __future__ import annotations

from typing import Any

from fedcontext.cohorts.learner import Learner, Params, seeded
from fedcontext.errors import require

require("torch", extra="torch")
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

PLACES = ("share", "slopes", "inputs", "input", "slope")  # a layer's own leaves; the last two are those of one step
ALIKE = 1e-2  # relative distance of gradients that may be rounding, also in TF32


class Factored(nn.Linear):
    """A Linear layer that takes its weights as factors, if it is given any."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x W'ᵀ + bias; W' is never formed."""
        factors: list[Any] = [getattr(self, place) for place in PLACES]
        if not factors[0].numel():
            return super().forward(x)
        if x.ndim != 2:
            raise ValueError(f"factors need inputs of two axes, got {x.ndim}")
        product: Tensor = _in_graph(x, self.weight, *factors)
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """The product with factored weights. What stands for their gradient is its two factors, one for each last leaf."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, share: Tensor, slopes: Tensor, inputs: Tensor, input: Tensor, slope: Tensor
    ) -> Tensor:
        return share * (x @ weight.T) + (x @ inputs.T) @ slopes

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5])

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, share, slopes, inputs = ctx.saved_tensors
        before = share * (slope @ weight) + (slope @ slopes.T) @ inputs
        return before, None, None, None, None, x, slope


def layers_of_low_rank(learner: Learner, rows: int) -> list[str]:
    """Return the names of the Linear layers to which ``rows`` samples add less than a full rank, and that take factors.

    A layer whose weights are used in any other way than to be multiplied once, by inputs of two axes, does not: the
    module's gradients would not be the same.
    """
    found: list[str] = []
    if learner.precision == "bfloat16":  # too coarse for sums of factors
        return found
    for name, layer in learner.module.named_modules():
        fits = type(layer) in (nn.Linear, Factored) and f"{name}.weight" in learner.trainable
        if fits and rows < min(layer.weight.shape) and _takes_factors(learner, name, layer):
            found.append(name)
    return found


def _takes_factors(learner: Learner, name: str, layer: nn.Module) -> bool:
    """Return whether the module has the same gradients with factors of this layer as with its weights multiplied out."""
    if not isinstance(layer, Factored):
        layer.__class__ = Factored
        for place in PLACES:
            layer.register_buffer(place, torch.empty(0), persistent=False)
    params, features, labels = learner.start(), learner.features[:2], learner.labels[:2]
    moving = {leaf: params[leaf] for leaf in learner.trainable}
    weight = moving[f"{name}.weight"]
    like: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}

    def gradients(leaves: Params, fixed: Params) -> dict[str, Tensor]:
        def loss(given: Params) -> Tensor:
            return learner.losses({**params, **fixed, **given}, features, labels).sum()

        with seeded(learner.device, 0):  # the same dropout
            found: dict[str, Tensor] = torch.func.grad(loss)({**moving, **leaves})
        return found

    with seeded(learner.device, 1), learner.mode(training=True):
        slopes, inputs = (torch.randn(3, side, **like) / weight.shape[1] ** 0.5 for side in weight.shape)
        kept = {"share": torch.tensor(0.5, **like), "slopes": slopes, "inputs": inputs}
        taken = {"input": torch.zeros(2, weight.shape[1], **like), "slope": torch.zeros(2, weight.shape[0], **like)}
        try:
            plain = gradients({f"{name}.weight": weight / 2 + slopes.T @ inputs}, {})
            ours = gradients(_named(name, taken), _named(name, kept))
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError):
            return False
    ours[f"{name}.weight"] = ours[f"{name}.slope"].T @ ours[f"{name}.input"]
    return all(bool((ours[leaf] - slope).norm() <= ALIKE * slope.norm()) for leaf, slope in plain.items())


def _named(layer: str, places: Params) -> dict[str, Tensor]:
    return {f"{layer}.{place}": leaf for place, leaf in places.items()}


_apply: Any = _Product.apply
# A compiler cannot look into it, and need not.
_in_graph: Any = torch.compiler.allow_in_graph(lambda *given: _apply(*given))  # type: ignore[no-untyped-call]
