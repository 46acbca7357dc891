"""FedJAX: its training loop over clients (jit backend) and its FedAvg step, on the planned batches."""

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms.fed_avg import create_train_for_each_client
from harness import CLASSES, RATE, arguments, play


def loss(params, batch, rng):
    scores = jax.nn.log_softmax(batch["x"] @ params["w"] + params["b"])
    return -jnp.mean(jnp.take_along_axis(scores, batch["y"][:, None], axis=1))


class FedJAX:
    def __init__(self, work):
        self.work = work
        self.features, self.labels = np.array(work.features), work.labels.astype(np.int32)
        self.train = create_train_for_each_client(jax.grad(loss), fedjax.optimizers.sgd(RATE))
        self.keys = jax.random.split(jax.random.PRNGKey(0), work.devices.shape[1])

    def reset(self):
        self.state = {"w": jnp.zeros((self.features.shape[1], CLASSES)), "b": jnp.zeros(CLASSES)}

    def clients(self, number):
        for place, key in enumerate(self.keys):
            batches = [{"x": self.features[rows], "y": self.labels[rows]} for rows in self.work.batches(number, place)]
            yield place, batches, key

    def round(self, number):
        samples = self.work.samples(number)
        total = fedjax.tree_util.tree_zeros_like(self.state)
        for place, delta in self.train(self.state, self.clients(number)):
            total = fedjax.tree_util.tree_add(total, fedjax.tree_util.tree_weight(delta, float(samples[place])))
        mean = fedjax.tree_util.tree_inverse_weight(total, float(samples.sum()))
        self.state = jax.block_until_ready(jax.tree_util.tree_map(lambda a, b: a - b, self.state, mean))

    def params(self):
        return np.vstack([self.state["w"], self.state["b"]])


if __name__ == "__main__":
    work, out = arguments()
    play(FedJAX(work), work, out)
