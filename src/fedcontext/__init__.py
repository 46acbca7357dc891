"""Federated learning with contextual aggregation: the weights with the lowest bound on the loss, every round.

Names are imported on first use, so that ``import fedcontext`` is fast. Type checkers read them in ``__init__.pyi``.
"""

from importlib import import_module

from fedcontext.version import __version__

EXPORTS = {
    "aggregation": ["Aggregation", "aggregate"],
    "algorithms": ["ALGORITHMS", "Algorithm", "Hyperparameters", "contextual_version", "expected_version"],
    "arrays.memmap": ["mapped"],
    "datasets": ["FederatedData", "federate", "load_dataset"],
    "errors": ["FedcontextError", "MissingExtra"],
    "experiment": ["Experiment"],
    "fleet": ["PROFILES", "Fleet", "Profile", "Spread", "make_fleet"],
    "geometry": ["Geometry"],
    "plan": ["RoundPlan", "plan_round"],
    "records": ["RoundRecord", "read_run"],
    "results.export": ["load_runs"],
    "rules": ["Rule", "bound", "by_samples", "contextual", "expected_contextual", "folb", "mean", "stateless"],
    "simulation": ["Simulation", "State", "prepare", "rounds"],
}
MODULES = ["presets", "runner"]  # public modules

_module_of = {name: module for module, names in EXPORTS.items() for name in names}
__all__ = [*_module_of, *MODULES, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name in MODULES:
        return import_module(f"fedcontext.{name}")
    if name not in _module_of:
        raise AttributeError(f"module 'fedcontext' has no attribute {name!r}")
    value = getattr(import_module(f"fedcontext.{_module_of[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
