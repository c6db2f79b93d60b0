"""Search of hyperparameters: Optuna proposes, executors come and go.

What needs no Spark is decided in `placing` (which trial runs where, and when executors come and
go) and `outcome` (what a trial's end comes to). `asking`, `space` and `journal` are Optuna's side.
`searching` performs: it is one thread, which takes in what happens and does what is decided.
"""
