"""The client app, made of three NumPy functions."""

from fedcontext.flower import numpy_client
from fedcontext_app.task import evaluate, gradient, train

app = numpy_client(train, gradient, evaluate)
