import numpy as np

import fedcontext as fc


def clipped():
    """Return a rule in which no update counts for more than one of median length: αₖ = min(1, m / ‖Δₖ‖) / K."""

    def weigh(geometry):
        lengths = np.sqrt(np.diag(geometry.gram))
        return np.minimum(1, np.median(lengths) / np.maximum(lengths, 1e-12)) / len(lengths)

    return fc.stateless("clipped", weigh)


trained = fc.train(dataset="synthetic-1-1", algorithm=clipped(), rounds=5)
