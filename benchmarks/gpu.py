"""Row d of the benchmark: a round of local training of a CNN on a GPU, this package against its peers.

The CIFAR-10 benchmark of pfl-research in its shapes: a CNN of 1,626,442 parameters, 1,000 devices of 50 images (random
numbers: speed does not depend on them), 50 devices a round, 1 epoch, batches of 10. Needs PyTorch and NumPy alone:

    PYTHONPATH=src python benchmarks/gpu.py --pfl PATH_OF_UNPACKED_PFL --out gpu.json

Every variant starts from the same params on the same plan; ``distance`` is the largest relative distance of a device's
update from sequential training in full precision (for pfl-research: of the round's mean update); ``median`` is the
median device's, ``cohort`` that of all updates taken together. ``alike`` is the largest distance from sequential
training with the same precision and convolutions.
"""

from __future__ import annotations

import argparse
import gc
import importlib.abc
import importlib.util
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import torch
import torch._dynamo
from torch import nn

import fedcontext as fc
from fedcontext.datasets.federated import FederatedData, Split
from fedcontext.engines.base import Work
from fedcontext.engines.torch.engine import TorchEngine
from fedcontext.engines.torch.models import cnn
from fedcontext.local_sgd import sgd
from fedcontext.plan import batches, plan_round

SHAPE, CLASSES, BATCH, RATE, SEED = (3, 32, 32), 10, 10, 0.01, 0
GRAPH = {"vectorize": True, "acceleration": "cuda-graph", "convolutions": "native"}
COMPILED = {**GRAPH, "acceleration": "compile"}
VARIANTS: dict[str, dict] = {
    "one by one": {"vectorize": False},
    "vmap": {**GRAPH, "acceleration": "eager"},
    "graph": GRAPH,
    "graph unfold": {**GRAPH, "convolutions": "unfold"},
    "graph tf32": {**GRAPH, "precision": "tf32"},
    "graph unfold tf32": {**GRAPH, "convolutions": "unfold", "precision": "tf32"},
    "graph bfloat16": {**GRAPH, "precision": "bfloat16"},
    "graph unfold bfloat16": {**GRAPH, "convolutions": "unfold", "precision": "bfloat16"},
    "compile": COMPILED,
    "compile unfold": {**COMPILED, "convolutions": "unfold"},
    "compile unfold tf32": {**COMPILED, "convolutions": "unfold", "precision": "tf32"},
    "compile unfold bfloat16": {**COMPILED, "convolutions": "unfold", "precision": "bfloat16"},
    "compile slices": {**COMPILED, "convolutions": "slices"},
    "search slices": {**COMPILED, "acceleration": "max-autotune", "convolutions": "slices"},
    "compile slices tf32": {**COMPILED, "convolutions": "slices", "precision": "tf32"},
    "compile slices bfloat16": {**COMPILED, "convolutions": "slices", "precision": "bfloat16"},
    "compile tf32": {**COMPILED, "precision": "tf32"},
    "compile bfloat16": {**COMPILED, "precision": "bfloat16"},
}
NEEDED_S = {"compile": 70, "search": 170, "graph": 10, "vmap": 10}  # a variant is skipped if fewer seconds are left


class Bench:
    """The workload, the timer and the results."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began, self.results = args, time.perf_counter(), {}
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(auto if args.device == "auto" else args.device)
        self.data = images(args.devices, args.samples)
        self.params: dict[str, torch.Tensor] = {}
        self.reference: list[dict[str, torch.Tensor]] = []

    def left(self) -> float:
        return self.args.budget - (time.perf_counter() - self.began)

    def work(self, number: int) -> Work:
        plan = plan_round(SEED, number, self.args.devices, devices_per_round=self.args.cohort, epochs=(1, 1))
        return Work(SEED, number, plan.devices, plan.epochs, sgd(RATE, BATCH))

    def clock(self, train: Callable[[int], object]) -> dict:
        """Return the median, lowest and highest ms of ``train(number)`` over the rounds, and the first's seconds."""
        times = []
        for number in range(1, 3 + self.args.rounds):  # the first two warm up
            self.wait()
            start = time.perf_counter()
            train(number)
            self.wait()
            times.append(1e3 * (time.perf_counter() - start))
            if number == 3 and times[-1] * self.args.rounds > 1e3 * self.left():
                break
        timed = times[2:]
        low, high = round(min(timed), 3), round(max(timed), 3)
        return {"ms": round(statistics.median(timed), 3), "low": low, "high": high, "first_s": round(times[0] / 1e3, 2)}

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def engine(self, options: dict) -> TorchEngine:
        make = partial(cnn, SHAPE, CLASSES)
        return TorchEngine(self.data, make, input_shape=SHAPE, device=str(self.device), seed=SEED, **options)

    def check(self, updates: list[dict[str, torch.Tensor]]) -> dict:
        pairs = zip(updates, self.reference, strict=True)
        apart = [relative(ours, theirs) for ours, theirs in pairs]
        whole = relative(*(flat(updates), flat(self.reference)))
        same = {"every device to 1e-4": max(apart) < 1e-4, "cohort to 1e-4": whole < 1e-4}
        return {"distance": max(apart), "median": statistics.median(apart), "cohort": whole, **same}

    def variant(self, name: str) -> dict:
        """Return the time of a variant of this package, and the distance of its updates from the reference."""
        engine = self.engine(VARIANTS[name])
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        timing = self.clock(lambda number: engine.train(self.params, self.work(number)))
        if self.device.type == "cuda":
            timing["peak_gb"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        updates = engine.train(self.params, self.work(1))
        return {**timing, "ran as": engine.acceleration, **self.check(updates), **self.alike(name, updates)}

    def alike(self, name: str, updates: list[dict[str, torch.Tensor]]) -> dict:
        """Return the largest distance from sequential training with the same precision and convolutions."""
        options = {key: VARIANTS[name][key] for key in ("convolutions", "precision") if key in VARIANTS[name]}
        if not options:
            return {}
        theirs = self.engine({"vectorize": False, **options}).train(self.params, self.work(1))
        return {"alike": max(relative(*pair) for pair in zip(updates, theirs, strict=True))}

    def cudnn_search(self) -> dict:
        """Return the results of "graph" with `torch.backends.cudnn.benchmark`."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            return self.variant("graph")
        finally:
            torch.backends.cudnn.benchmark = before

    def loop(self) -> dict:
        """Return the time of plain PyTorch: a model, an optimizer, two loops."""
        features = torch.from_numpy(self.data.train.features).to(self.device).reshape(-1, *SHAPE)
        labels = torch.from_numpy(self.data.train.labels).to(self.device)
        model = cnn(SHAPE, CLASSES).to(self.device)

        def train(number: int) -> list[dict[str, torch.Tensor]]:
            work, updates = self.work(number), []
            for device in work.devices.tolist():
                model.load_state_dict(self.params)
                optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
                for at in self.orders(number, device):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(features[at]), labels[at]).backward()
                    optimizer.step()
                updates.append({name: leaf.detach() - self.params[name] for name, leaf in model.named_parameters()})
            return updates

        return {**self.clock(train), **self.check(train(1))}

    def orders(self, number: int, device: int) -> Iterator[torch.Tensor]:
        start = int(self.data.train.offsets[device])
        for batch in batches(SEED, number, device, self.args.samples, 1, BATCH):
            yield torch.from_numpy(batch + start).to(self.device)

    def aggregation(self) -> dict:
        """Return the time of `aggregate` on the updates of one round: the plain mean, and the contextual rule."""
        updates = self.reference
        rules = {"mean": (fc.mean(), None), "contextual": (fc.contextual(1 / RATE), updates[0])}
        return {
            name: self.clock(lambda _, r=rule, g=gradient: fc.aggregate(self.params, updates, rule=r, gradient=g))
            for name, (rule, gradient) in rules.items()
        }

    def pfl(self) -> dict:
        """Return the time of pfl-research itself, in this process."""
        trained, timing = pfl_rounds(self, self.args.rounds)
        mean = {name: torch.stack([update[name] for update in self.reference]).mean(dim=0) for name in self.params}
        return {**timing, "distance": relative({name: trained[name] - self.params[name] for name in mean}, mean)}

    def pfl_processes(self) -> dict:
        """Return the time of several processes of pfl-research that share the GPU and the cohort, and never meet.

        Its own exchange of updates between processes is left out, so this is less than a real round takes.
        """
        count = self.args.pfl_processes
        share = -(-self.args.cohort // count)
        command = [sys.executable, __file__, "--pfl", self.args.pfl, "--pfl-worker", "--device", str(self.device)]
        command += ["--cohort", str(share), "--devices", str(self.args.devices), "--rounds", str(self.args.rounds)]
        command += ["--samples", str(self.args.samples)]
        pipe = subprocess.PIPE
        workers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(count)]
        alarm = threading.Timer(max(5, min(120, self.left())), lambda: [worker.kill() for worker in workers])
        alarm.start()
        try:
            for worker in workers:
                if "ready" not in worker.stdout.readline():
                    raise RuntimeError("a worker did not start")
            for worker in workers:
                worker.stdin.write("go\n")
                worker.stdin.flush()
            timings = [json.loads(worker.stdout.readline()) for worker in workers]
        finally:
            alarm.cancel()
            for worker in workers:
                worker.kill()
        return {"ms": max(each["ms"] for each in timings), "processes": count, "devices each": share}


def images(devices: int, samples: int) -> FederatedData:
    """Return random images on devices."""
    random = np.random.default_rng(SEED)
    count = devices * samples
    features = random.standard_normal((count, int(np.prod(SHAPE))), dtype=np.float32)
    split = Split(features, random.integers(0, CLASSES, count), np.arange(devices + 1) * samples)
    return FederatedData("random images", split, Split(features[:10], split.labels[:10], np.zeros(2, int)), CLASSES)


def flat(updates: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return all devices' updates as one."""
    return {f"{k}/{name}": leaf for k, update in enumerate(updates) for name, leaf in update.items()}


def relative(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the distance of two updates over the length of the second."""
    apart = sum(float((ours[name].double() - leaf.double()).square().sum()) for name, leaf in theirs.items())
    return (apart / sum(float(leaf.double().square().sum()) for leaf in theirs.values())) ** 0.5


class PflCnn(nn.Module):
    """The CNN with the two methods that pfl-research asks a model for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = cnn(SHAPE, CLASSES)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict:
        from pfl.metrics import Weighted

        return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


def pfl_rounds(bench: Bench, rounds: int, ready: Callable[[], None] = lambda: None) -> tuple[dict, dict]:
    """Return the params after pfl-research's first round, and the time of its later ones.

    Its users are this plan's devices with their samples in the plan's order on the GPU; evaluation is switched off.
    """
    stand_in_for_missing()
    sys.path.insert(0, str(bench.args.pfl))
    os.environ["PFL_PYTORCH_DEVICE"] = str(bench.device)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    features = torch.from_numpy(bench.data.train.features).to(bench.device).reshape(-1, *SHAPE)
    labels = torch.from_numpy(bench.data.train.labels).to(bench.device)
    total = 3 + rounds
    queue = [(number, int(device)) for number in range(1, total + 1) for device in bench.work(number).devices]
    users = {}
    for number, device in queue:
        at = torch.cat(list(bench.orders(number, device)))
        users[f"{number}/{device}"] = Dataset(raw_data=[features[at], labels[at]], user_id=f"{number}/{device}")
    names = iter(users)
    model = PflCnn().to(bench.device)
    model.net.load_state_dict(bench.params)
    central = torch.optim.SGD(model.parameters(), lr=1.0)
    first: dict[str, torch.Tensor] = {}
    stamps: list[float] = []

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            bench.wait()
            if not first:
                first.update({n: leaf.detach().clone() for n, leaf in model.pytorch_model.net.named_parameters()})
            if len(stamps) == 2:
                ready()
            stamps.append(time.perf_counter())
            return False, type(aggregate_metrics)()

    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=total,
            evaluation_frequency=10**6,
            train_cohort_size=bench.args.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(FederatedDataset(users.__getitem__, lambda: next(names)), None),
        PyTorchModel(model, torch.optim.SGD, central),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    timed = [1e3 * (after - before) for before, after in itertools.pairwise(stamps[2:])]
    return first, {"ms": round(statistics.median(timed), 3), "low": round(min(timed), 3), "high": round(max(timed), 3)}


def stand_in_for_missing() -> None:
    """Let pfl-research be imported where libraries that this work never calls (privacy accounting) are missing."""
    unused = ("scipy", "dp_accounting", "prv_accountant", "dill", "sklearn", "multiprocess", "packaging")
    missing = {name for name in unused if importlib.util.find_spec(name) is None}
    sys.meta_path.append(StandIn(missing))
    if "multiprocess" in missing:
        sys.modules["multiprocess"] = multiprocessing
    if "packaging" in missing:
        importlib.import_module("packaging.version").Version = lambda text: [int(n) for n in text.split(".")[:2]]


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of missing packages; every name in them is an empty class."""

    def __init__(self, packages: set[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return AnyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class AnyModule(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def worker(bench: Bench) -> None:
    """Time pfl-research on a share of the cohort, and start the timed rounds on a line of standard input."""

    def ready() -> None:
        print("ready", flush=True)
        sys.stdin.readline()

    bench.params = bench.engine({"vectorize": False}).initial_params()
    _, timing = pfl_rounds(bench, bench.args.rounds, ready)
    print(json.dumps(timing), flush=True)


def attempt(bench: Bench, name: str, measure: Callable[[], dict]) -> None:
    """Add what ``measure`` returns, or its error, to the results and the output file."""
    needed = NEEDED_S.get(name.split()[0], 5)
    start = time.perf_counter()
    try:
        if bench.left() < needed and bench.device.type == "cuda":
            bench.results[name] = {"skipped": f"{bench.left():.0f} s left"}
        else:
            bench.results[name] = measure()
    except Exception as error:
        print(traceback.format_exc(), file=sys.stderr)
        bench.results[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
    torch._dynamo.reset()  # a compiler gives up on a function after eight versions of it
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - start:6.1f} s  {name}: {bench.results[name]}", file=sys.stderr, flush=True)
    if bench.args.out:
        bench.args.out.write_text(report(bench), encoding="utf-8")


def report(bench: Bench) -> str:
    """Return all results as JSON."""
    gpu = torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu"
    versions = {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}
    versions |= {"cuda": torch.version.cuda, "fedcontext": fc.__version__}
    work = {"parameters": sum(leaf.numel() for leaf in bench.params.values()), "batch": BATCH, "epochs": 1}
    work |= {name: getattr(bench.args, name) for name in ("devices", "samples", "cohort", "rounds")}
    times = {name: each["ms"] for name, each in bench.results.items() if "ms" in each}
    ratios = {
        peer: {name: round(times[peer] / ms, 2) for name, ms in times.items() if name in VARIANTS}
        for peer in ("pfl", "pfl processes", "loop")
        if peer in times
    }
    results = {
        "machine": gpu,
        "date": f"{date.today()}",
        "versions": versions,
        "work": work,
        "results": bench.results,
        "times faster": ratios,
    }
    return json.dumps(results, indent=1)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated names; default: all")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--pfl", type=Path, help="a folder that holds pfl-research's package `pfl`")
    parser.add_argument("--pfl-processes", type=int, default=4)
    parser.add_argument("--pfl-worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds, after two warm-up rounds")
    parser.add_argument("--budget", type=float, default=285, help="seconds; variants that do not fit are skipped")
    parser.add_argument("--out", type=Path, help="also write the JSON here, after every variant")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    bench = Bench(args)
    if args.pfl_worker:
        worker(bench)
        return
    todo: dict[str, Callable[[], dict]] = {"loop": bench.loop}
    if args.pfl:
        todo |= {"pfl": bench.pfl, "pfl processes": bench.pfl_processes}
    todo |= {name: partial(bench.variant, name) for name in VARIANTS}
    todo |= {"graph cudnn search": bench.cudnn_search, "aggregation": bench.aggregation}
    chosen = [name.strip() for name in args.only.split(",") if name.strip()] or list(todo)
    if args.list or set(chosen) - set(todo):
        print("\n".join(todo))
        sys.exit(0 if args.list else f"unknown: {', '.join(sorted(set(chosen) - set(todo)))}")
    reference = bench.engine({"vectorize": False})
    bench.params = reference.initial_params()
    bench.reference = reference.train(bench.params, bench.work(1))
    del reference
    for name in chosen:
        attempt(bench, name, todo[name])
    print(report(bench))


if __name__ == "__main__":
    main()
