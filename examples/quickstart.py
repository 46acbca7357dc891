"""Load data, run three algorithms on it, plot them: `python examples/quickstart.py` writes quickstart.png."""

from matplotlib.figure import Figure

import fedcontext as fc

data = fc.load_dataset("synthetic-1-1")
figure = Figure(figsize=(7, 4), layout="constrained")
axis = figure.subplots()

for name in ("fedavg", "folb", "fedavg-memory"):
    records = fc.train(data=data, algorithm=name, rounds=20).records
    axis.plot([record.number for record in records], [record.accuracy for record in records], label=name)
    print(f"{name}: loss {records[-1].loss:.3f}, accuracy {records[-1].accuracy:.1%}")

axis.set(xlabel="round", ylabel="test accuracy")
axis.legend()
figure.savefig("quickstart.png", dpi=150)
