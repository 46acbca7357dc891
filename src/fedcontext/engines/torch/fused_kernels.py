"""Triton's kernels for the convolutions of stacked models: an output's inputs are gathered and multiplied in one go.

Devices are the last axis of the grid. All sizes but the number of samples are known when a kernel is compiled. All arrays
are contiguous: samples are (C, samples, channels, high, wide).
"""

from __future__ import annotations

from fedcontext.errors import require

require("triton", extra="torch")
import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def convolve(
    x, kernels, y, samples, INPUTS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    OUTPUTS: tl.constexpr, TALL: tl.constexpr, BROAD: tl.constexpr, UP: tl.constexpr, LEFT: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, PRECISION: tl.constexpr,
    PLACES: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """Write OUT channels at PLACES places of y, in steps of IN channels of x; kernels are (C, down, across, out, in)."""
    device = tl.program_id(2).to(tl.int64)
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    sample, within = place // (TALL * BROAD), place % (TALL * BROAD)
    top, side = within // BROAD - UP, within % BROAD - LEFT
    real = sample < samples
    output, input = tl.program_id(1) * OUT + tl.arange(0, OUT), tl.arange(0, IN)
    x += device * (samples * INPUTS * HIGH * WIDE)
    y += device * (samples * OUTPUTS * TALL * BROAD)
    kernels += device * (DOWN * ACROSS * OUTPUTS * INPUTS)
    corners = x + sample * (INPUTS * HIGH * WIDE) + top * WIDE + side
    sums = tl.zeros((PLACES, OUT), tl.float32)
    for step in range(DOWN * ACROSS * (INPUTS // IN)):
        shift, channel = step // (INPUTS // IN), step % (INPUTS // IN) * IN + input
        row, column = shift // ACROSS, shift % ACROSS
        inside = real
        if UP > 0 or LEFT > 0:
            inside &= (top + row >= 0) & (top + row < HIGH) & (side + column >= 0) & (side + column < WIDE)
        around = corners[:, None] + channel[None, :] * (HIGH * WIDE) + row * WIDE + column
        values = tl.load(around, mask=inside[:, None], other=0.0)
        weights = tl.load(kernels + (shift * OUTPUTS + output[None, :]) * INPUTS + channel[:, None])
        sums = tl.dot(values, weights, sums, input_precision=PRECISION)
    target = y + sample * (OUTPUTS * TALL * BROAD) + within
    tl.store(target[:, None] + output[None, :] * (TALL * BROAD), sums, mask=real[:, None])


@triton.jit
def correlate(
    x, slopes, y, samples, INPUTS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    OUTPUTS: tl.constexpr, TALL: tl.constexpr, BROAD: tl.constexpr, UP: tl.constexpr, LEFT: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, PRECISION: tl.constexpr,
    PARTS: tl.constexpr, WEIGHTS: tl.constexpr, OUT: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Write the slopes of WEIGHTS weights of OUT channels over one of PARTS parts of all places, in steps of PLACES.

    y is (parts, C, out, in, down, across).
    """
    device, part = (tl.program_id(2) // PARTS).to(tl.int64), tl.program_id(2) % PARTS
    weight = tl.program_id(0) * WEIGHTS + tl.arange(0, WEIGHTS)
    shift, input = weight // INPUTS, weight % INPUTS
    row, column = shift // ACROSS - UP, shift % ACROSS - LEFT
    real = shift < DOWN * ACROSS
    output = tl.program_id(1) * OUT + tl.arange(0, OUT)
    x += device * (samples * INPUTS * HIGH * WIDE)
    slopes += device * (samples * OUTPUTS * TALL * BROAD)
    y += (part * (tl.num_programs(2) // PARTS) + device) * (OUTPUTS * INPUTS * DOWN * ACROSS)
    corners, sources = x + input * (HIGH * WIDE) + row * WIDE + column, slopes + output * (TALL * BROAD)
    sums = tl.zeros((WEIGHTS, OUT), tl.float32)
    for step in range((samples * TALL * BROAD + PARTS * PLACES - 1) // (PARTS * PLACES)):
        place = (step * PARTS + part) * PLACES + tl.arange(0, PLACES)
        sample, within = place // (TALL * BROAD), place % (TALL * BROAD)
        top, side = within // BROAD, within % BROAD
        there = sample < samples
        inside = there[None, :] & real[:, None]
        if UP > 0 or LEFT > 0:
            high, wide = row[:, None] + top[None, :], column[:, None] + side[None, :]
            inside &= (high >= 0) & (high < HIGH) & (wide >= 0) & (wide < WIDE)
        around = corners[:, None] + (sample * (INPUTS * HIGH * WIDE) + top * WIDE + side)[None, :]
        values = tl.load(around, mask=inside, other=0.0)
        behind = sources[None, :] + (sample * (OUTPUTS * TALL * BROAD) + within)[:, None]
        pulls = tl.load(behind, mask=there[:, None], other=0.0)
        sums = tl.dot(values, pulls, sums, input_precision=PRECISION)
    target = y + output[None, :] * (INPUTS * DOWN * ACROSS) + (input * (DOWN * ACROSS) + shift)[:, None]
    tl.store(target, sums, mask=real[:, None])
