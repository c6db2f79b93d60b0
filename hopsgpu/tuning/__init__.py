"""Hyperparameter search and ablation: Optuna proposes, executors come and go."""
