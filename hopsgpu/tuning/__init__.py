"""Hyperparameter search and ablation: Optuna proposes trials, which run on elastic executors."""
