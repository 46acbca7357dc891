"""A grid in memory: nodes are client apps in this process, and a test may meddle with what they answer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
Meddle = Callable[[int, Message, Message], list[Message]]  # (partition, message, reply) -> what is delivered


class MemoryGrid(Grid):
    def __init__(
        self,
        app: ClientApp,
        partitions: Iterable[int],
        run_config: dict | None = None,
        meddle: Meddle = lambda partition, message, reply: [reply],
        shuffle: int = 0,
        node_config: dict | None = None,
    ) -> None:
        self.node_config = node_config or {}
        self.app, self.run_config, self.meddle = app, run_config or {}, meddle
        self.chance = random.Random(shuffle)
        self.partitions = {self.chance.getrandbits(62): k for k in partitions}
        self.ids = itertools.count()
        self.sent: list[list[Message]] = []

    def get_node_ids(self) -> list[int]:
        return self.chance.sample(list(self.partitions), len(self.partitions))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        self.sent.append(messages)
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"message {next(self.ids)}"
        replies = [delivered for message in messages for delivered in self._replies(message)]
        self.chance.shuffle(replies)
        return replies

    def _replies(self, message: Message) -> list[Message]:
        node = message.metadata.dst_node_id
        partition = self.partitions[node]
        context = Context(1, node, {"partition-id": partition, **self.node_config}, RecordDict(), self.run_config)
        try:
            reply = self.app(message, context)
        except Exception as error:
            reply = Message(Error(2, f"Traceback\n{type(error).__name__}: {error}"), reply_to=message)
        if message.metadata.message_type == "query.whoami":
            return [reply]
        return self.meddle(partition, message, reply)

    def set_run(self, run: object) -> None: ...

    @property
    def run(self) -> None: ...

    def create_message(self, *args: object, **kwargs: object) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        raise NotImplementedError
