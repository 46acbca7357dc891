"""Which devices are connected, and which node each of them is; Flower's node ids change from run to run."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedcontext.errors import FedcontextError
from fedcontext.flower.protocol import IDENTITY, WHOAMI

if TYPE_CHECKING:
    from flwr.supercore.run import Run

log = logging.getLogger("flwr")
RAISED = 2  # Flower's code for an exception in a client app
WHOAMI_TIME = 30  # seconds at most for that answer, which needs no work: a round does not wait for the silent
TRIES = 3  # rounds in which a node may keep silent about who it is before it goes by its node id
PATIENCE = 10  # how often a strategy may look at the same nodes before it must be waiting for others


def connected(grid: Grid, least: int, timeout: float, pause: float = 0.5) -> list[int]:
    """Return the nodes that are connected, once there are ``least`` of them."""
    deadline = time.monotonic() + timeout
    while len(nodes := sorted(grid.get_node_ids())) < least:
        left = deadline - time.monotonic()
        if left <= 0:
            raise FedcontextError(f"{least} devices must be connected, got {len(nodes)} after {timeout:g} s")
        time.sleep(min(pause, left))
    return nodes


class Roster:
    """The devices' own numbers: partition ids where they tell them, node ids where they cannot."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}  # node: device
        self._silences: Counter[int] = Counter()  # node: how often it did not say

    def devices(self, grid: Grid, nodes: Sequence[int], timeout: float) -> dict[int, int]:
        """Return the node of each device, in the order of the devices; only nodes seen first are asked.

        Where two nodes are the same device (it was restarted, and the old node is not yet given up), the newer
        one counts.
        """
        if fresh := [node for node in nodes if node not in self._known]:
            self._ask(grid, fresh, min(timeout, WHOAMI_TIME))
        found: dict[int, int] = {}
        present = set(nodes)
        for node in [node for node in self._known if node in present]:
            if (device := self._known[node]) in found:
                log.warning("device %d: node %d takes the place of node %d", device, node, found[device])
            found[device] = node
        return dict(sorted(found.items()))

    def device_of(self, node: int) -> int | None:
        """Return the device of a node, where it is known."""
        return self._known.get(node)

    def _ask(self, grid: Grid, nodes: Sequence[int], timeout: float) -> None:
        messages = [Message(RecordDict(), node, WHOAMI, ttl=timeout) for node in nodes]
        replies = grid.send_and_receive(messages, timeout=timeout)
        said = {reply.metadata.reply_to_message_id: reply for reply in replies}
        for message in messages:
            node = message.metadata.dst_node_id
            number = _number_in(said.get(message.metadata.message_id))
            self._silences[node] += number is None
            if number is not None or self._silences[node] == TRIES:
                self._known[node] = node if number is None or number < 0 else number


def _number_in(reply: Message | None) -> int | None:
    """Return the number that a device gave; negative where it has none, None where it did not answer."""
    if reply is None or reply.has_error():
        return -1 if reply is not None and reply.error.code == RAISED else None
    identity = reply.content.config_records.get(IDENTITY)
    number = identity.get("partition-id") if identity else None
    return number if isinstance(number, int) else -1


class Snapshot(Grid):
    """A grid whose nodes do not change while a strategy configures a round, so that it cannot wait for ever."""

    def __init__(self, grid: Grid, nodes: Sequence[int]) -> None:
        self._grid, self._nodes, self._looks = grid, list(nodes), 0

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes of the snapshot."""
        self._looks += 1
        if self._looks > PATIENCE:
            raise FedcontextError(f"the inner strategy waits for more devices than the {len(self._nodes)} connected")
        return list(self._nodes)

    def set_run(self, run: Run) -> None:
        """Pass on."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """Pass on."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Pass on."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pass on."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Pass on."""
        return self._grid.send_and_receive(messages, timeout=timeout)
