"""The server app: FedAvg with contextual aggregation with memory, or another algorithm of fedcontext."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedcontext.flower import ContextualStrategy
from fedcontext.flower.protocol import record_of
from fedcontext_app.task import algorithm, initial_params

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    chosen, probes = algorithm(config), str(config["probes"])
    bits = int(config["gradient-bits"])
    strategy = ContextualStrategy(
        FedAvg(
            fraction_train=float(config["fraction-train"]),
            fraction_evaluate=float(config["fraction-evaluate"]),
            min_train_nodes=1,
            min_evaluate_nodes=1,
            min_available_nodes=int(config["min-nodes"]),
        ),
        rule=chosen.rule,
        server=chosen.server,
        probes=int(probes) if probes.isdigit() else None if probes == "default" else probes,
        gradient_bits=bits or "auto",
        seed=int(config["seed"]),
        epochs=(int(config["min-epochs"]), int(config["max-epochs"])),
        min_replies=int(config["min-replies"]),
        node_timeout=float(config["node-timeout"]),
        records=config["records"] or None,
        checkpoint=config["checkpoint"] or None,
        name=str(config["dataset"]),
    )
    strategy.start(
        grid,
        record_of(initial_params(config)),
        num_rounds=int(config["num-server-rounds"]),
        timeout=float(config["timeout"]),
    )
