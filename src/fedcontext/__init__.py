"""Aggregation rules for federated learning: the server decides from updates and gradients how far to move and where.

Names are imported on first use, so that ``import fedcontext`` is fast. Type checkers read them in ``__init__.pyi``.
"""

from importlib import import_module

from fedcontext.version import __version__

EXPORTS = {
    "aggregation.aggregate": ["aggregate"],
    "aggregation.correction": ["correct"],
    "aggregation.result": ["Aggregation"],
    "algorithms": [
        "ALGORITHMS",
        "Algorithm",
        "Hyperparameters",
        "contextual_version",
        "expected_version",
        "memory_version",
    ],
    "arrays.memmap": ["open_memmap"],
    "compression.codec": ["Codec"],
    "measurement.defences": ["Defences"],
    "datasets": ["FederatedData", "federate", "load_dataset"],
    "results.diagnosis": ["Finding", "diagnose"],
    "errors": ["FedcontextError", "MissingExtra"],
    "experiment": ["Experiment"],
    "fleet": ["PROFILES", "Fleet", "Profile", "Spread", "make_fleet"],
    "measurement.geometry": ["Geometry", "Report"],
    "local_sgd": ["LocalSGD"],
    "rules.memory": ["contextual_memory"],
    "rules.memory_state": ["MemorySettings"],
    "plan": ["RoundPlan", "plan_round"],
    "records": ["RoundRecord", "read_run"],
    "results.run_file": ["write_records"],
    "results.export": ["load_runs"],
    "rules.robust": [
        "coordinate_median",
        "fltrust",
        "geometric_median",
        "krum",
        "multi_krum",
        "norm_clipping",
        "robust_gradients",
        "trimmed_mean",
    ],
    "rules.averaging": ["by_samples", "fedexp", "fedmgda", "fednova", "folb", "mean"],
    "rules.base": ["CoordinateRule", "Rule", "SumRule", "stateless"],
    "rules.contextual": ["bound", "contextual", "expected_contextual"],
    "rules.server": ["ServerOptimizer", "fedadagrad", "fedadam", "fedavgm", "fedyogi"],
    "preparation": ["Trained", "prepare", "simulate", "train"],
    "simulation": ["Simulation"],
    "state": ["State"],
    "compression.sketch": ["Sketch"],
    "aggregation.streaming": ["Streamed", "StreamedRound"],
    "measurement.sums": ["Sums"],
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
