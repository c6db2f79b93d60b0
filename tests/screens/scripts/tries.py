"""A search for two parameters."""

from optuna.distributions import CategoricalDistribution, FloatDistribution

import hopsgpu


def train(rate, layers):
    return abs(rate - 0.01) * 10 + layers / 10


hopsgpu.session("tries")
space = {
    "rate": FloatDistribution(1e-4, 0.1, log=True),
    "layers": CategoricalDistribution((2, 4, 8)),
}
found = hopsgpu.search(train, space, trials=16, max_concurrent=2, metric="loss", name="tries")
print(found.best.params)
