"""MLflow: a run is logged there besides on the lake."""
