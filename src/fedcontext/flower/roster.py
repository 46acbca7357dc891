"""Connected nodes and their device numbers; Flower's node ids change from run to run, partition ids do not."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedcontext.errors import FedcontextError
from fedcontext.flower.protocol import IDENTITY, QUERY_WHOAMI

log = logging.getLogger("flwr")
CLIENT_APP_RAISED = 2  # Flower's error code for an exception in a ClientApp
WHOAMI_TIMEOUT = 30  # seconds; the query needs no computation
WHOAMI_ATTEMPTS = 3  # rounds without a reply after which a node is identified by its node id
MAX_CALLS = 10  # of get_node_ids in one round; a strategy that exceeds them is waiting for more nodes


def wait_for_nodes(grid: Grid, minimum: int, timeout: float) -> list[int]:
    """Return the ids of all connected nodes once there are at least ``minimum``."""
    deadline = time.monotonic() + timeout
    while len(nodes := sorted(grid.get_node_ids())) < minimum:
        left = deadline - time.monotonic()
        if left <= 0:
            raise FedcontextError(
                f"at least {minimum} nodes must be connected, got {len(nodes)} after {timeout:g} s: "
                "start more nodes, or increase node_timeout"
            )
        time.sleep(min(0.5, left))
    return nodes


class Roster:
    """The device number of each node: its partition id, or its node id if it has none."""

    def __init__(self) -> None:
        self._device: dict[int, int] = {}  # node: device
        self._attempts: Counter[int] = Counter()  # node: queries without a reply

    def devices(self, grid: Grid, nodes: Sequence[int], timeout: float) -> dict[int, int]:
        """Return the node of each device, sorted by device; nodes not seen before are queried.

        Where two nodes report the same partition id (a node restarted before Flower gave up its old id), the
        one seen last is used.
        """
        if unknown := [node for node in nodes if node not in self._device]:
            self._query(grid, unknown, min(timeout, WHOAMI_TIMEOUT))
        connected, node_of = set(nodes), dict[int, int]()
        for node, device in self._device.items():
            if node in connected:
                if device in node_of:
                    log.warning("device %d: node %d replaces node %d", device, node, node_of[device])
                node_of[device] = node
        return dict(sorted(node_of.items()))

    def device_of(self, node: int) -> int | None:
        """Return the device number of a node, or None if unknown."""
        return self._device.get(node)

    def _query(self, grid: Grid, nodes: Sequence[int], timeout: float) -> None:
        messages = [Message(RecordDict(), node, QUERY_WHOAMI, ttl=timeout) for node in nodes]
        replies = grid.send_and_receive(messages, timeout=timeout)
        reply_to = {reply.metadata.reply_to_message_id: reply for reply in replies}
        for message in messages:
            node, reply = message.metadata.dst_node_id, reply_to.get(message.metadata.message_id)
            if reply is not None and (not reply.has_error() or reply.error.code == CLIENT_APP_RAISED):
                self._device[node] = _partition_id(reply, default=node)
                continue
            self._attempts[node] += 1
            if self._attempts[node] < WHOAMI_ATTEMPTS:
                log.warning("node %d did not reply to %s and is not sampled in this round", node, QUERY_WHOAMI)
            else:
                self._device[node] = node


def _partition_id(reply: Message, default: int) -> int:
    """Return the partition id in the reply; stock clients raise an exception, and some nodes have no partition."""
    identity = reply.content.config_records.get(IDENTITY) if reply.has_content() else None
    number = identity.get("partition-id") if identity else None
    return number if isinstance(number, int) and number >= 0 else default


def snapshot(grid: Grid, nodes: Sequence[int]) -> Grid:
    """Return ``grid`` with a fixed list of nodes: a strategy that waits for more raises instead of hanging."""
    return cast(Grid, _Snapshot(grid, nodes))


class _Snapshot:
    def __init__(self, grid: Grid, nodes: Sequence[int]) -> None:
        self._grid, self._nodes, self._calls = grid, list(nodes), 0

    def get_node_ids(self) -> list[int]:
        self._calls += 1
        if self._calls > MAX_CALLS:
            raise FedcontextError(
                f"the wrapped strategy waits for more nodes than the {len(self._nodes)} connected: "
                "set its min_available_nodes to the number that it needs, so that the round starts when they are connected"
            )
        return list(self._nodes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)
