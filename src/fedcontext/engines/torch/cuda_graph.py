"""CUDA graph capture of a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch

Acceleration: TypeAlias = Literal["auto", "eager", "cuda-graph", "compile", "max-autotune"]
COMPILED = ("compile", "max-autotune")
WARM_UP = 3  # eager steps before the capture, in which libraries allocate memory and choose kernels


def capture(step: Callable[[], None], graphs: list[torch.cuda.CUDAGraph]) -> Callable[[], None]:
    """Return the replay of ``step`` as a CUDA graph, and append the graph to ``graphs``, which share one memory pool.

    The warm-up runs ``step`` a few times: the caller resets what it changed.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=graphs[0].pool() if graphs else None):
        step()
    graphs.append(graph)
    return graph.replay
