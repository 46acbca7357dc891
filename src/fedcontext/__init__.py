"""Federated learning with contextual aggregation: the weights with the lowest bound on the loss, every round."""

from fedcontext.aggregation import Aggregation, aggregate
from fedcontext.algorithms import ALGORITHMS, Algorithm, Hyperparameters, contextual_version, expected_version
from fedcontext.arrays.memmap import open_memmap
from fedcontext.datasets import FederatedData, federate, load_dataset
from fedcontext.errors import FedcontextError, MissingExtra
from fedcontext.experiment import Experiment
from fedcontext.fleet import PROFILES, Fleet, Profile, Spread, make_fleet
from fedcontext.geometry import Geometry
from fedcontext.plan import RoundPlan, plan_round
from fedcontext.records import RoundRecord, read_run
from fedcontext.results.export import load_runs
from fedcontext.rules import Rule, bound, by_samples, contextual, expected_contextual, folb, mean, stateless
from fedcontext.simulation import Simulation, State, prepare, rounds
from fedcontext.version import __version__

__all__ = [
    "ALGORITHMS",
    "PROFILES",
    "Aggregation",
    "Algorithm",
    "Experiment",
    "FedcontextError",
    "FederatedData",
    "Fleet",
    "Geometry",
    "Hyperparameters",
    "MissingExtra",
    "Profile",
    "RoundPlan",
    "RoundRecord",
    "Rule",
    "Simulation",
    "Spread",
    "State",
    "__version__",
    "aggregate",
    "bound",
    "by_samples",
    "contextual",
    "contextual_version",
    "expected_contextual",
    "expected_version",
    "federate",
    "folb",
    "load_dataset",
    "load_runs",
    "make_fleet",
    "mean",
    "open_memmap",
    "plan_round",
    "prepare",
    "read_run",
    "rounds",
    "stateless",
]
