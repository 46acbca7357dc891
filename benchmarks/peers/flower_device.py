"""The client of the Flower benchmark, in its own module so that Ray's actors can import it."""

from functools import cache

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from harness import Work
from torch_rounds import PlainLoop

client = ClientApp()


@cache
def client_loop(folder, row, rounds):
    """Return the plain loop of `torch_rounds`, created once per actor."""
    loop = PlainLoop(Work(folder, row, rounds))
    loop.reset()
    return loop


@client.train()
def train(message, context):
    config, arrays = message.content["config"], message.content["arrays"]
    loop = client_loop(config["folder"], config["row"], config["rounds"])
    loop.train([torch.from_numpy(array) for array in arrays.to_numpy_ndarrays()], config["number"], config["place"])
    update = ArrayRecord([parameter.detach().numpy() for parameter in loop.model.parameters()])
    count = int(loop.work.samples(config["number"])[config["place"]])
    content = RecordDict({"arrays": update, "metrics": MetricRecord({"num-examples": count})})
    return Message(content=content, reply_to=message)
