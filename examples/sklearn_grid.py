"""scikit-learn on a gang: each rank cross-validates a part of a grid, on CPU executors.

eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
python examples/sklearn_grid.py
"""

from __future__ import annotations

from typing import Any

import hopsgpu

WORKERS = 2
GRID = {"C": [0.01, 1.0, 10.0], "gamma": ["scale", 0.1]}


def validate(grid: dict[str, list[Any]]) -> list[tuple[float, dict[str, Any]]]:
    """Return the accuracies of this rank's part of the grid."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import ParameterGrid, cross_val_score
    from sklearn.svm import SVC

    ctx = hopsgpu.context()
    images, labels = load_digits(return_X_y=True)
    found = []
    for parameters in list(ParameterGrid(grid))[ctx.rank :: ctx.world_size]:
        # -1: all cores of the rank, by processes of joblib's.
        folds = cross_val_score(SVC(**parameters), images / 16, labels, cv=3, n_jobs=-1)
        found.append((float(folds.mean()), parameters))
        ctx.report(len(found), accuracy=max(found, key=lambda one: one[0])[0])
    return found


def fit(parameters: dict[str, Any]) -> int:
    """Fit the best with all rows, and leave it to be published."""
    import joblib
    from sklearn.datasets import load_digits
    from sklearn.svm import SVC

    images, labels = load_digits(return_X_y=True)
    model = SVC(**parameters).fit(images / 16, labels)
    joblib.dump(model, hopsgpu.context().model_dir / "digits.joblib")
    return len(labels)


def main() -> None:
    spark = hopsgpu.session("sklearn-grid")
    result = hopsgpu.launch(
        validate, args=(GRID,), workers=WORKERS, gpus_per_worker=0, cores_per_worker=2
    )
    tried = [one for rank in result.values for one in rank]
    accuracy, best = max(tried, key=lambda one: one[0])
    fitted = hopsgpu.launch(fit, args=(best,), gpus_per_worker=0, model="digits-svc")
    spark.stop()
    print(f"the best of {len(tried)}: {best}, accuracy {accuracy:.4f}, {fitted.model.url}")


if __name__ == "__main__":
    main()
