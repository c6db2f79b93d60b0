"""What a search of hyperparameters is to be made of; there is no `search` yet.

Here are its decisions, none of which needs Spark: which trial runs where and when executors come
and go (`placing`); what Optuna proposes, is told and judges (`asking`, `space`), and its journal on
the lake (`journal`); what a trial's end and its reports say (`outcome`); and where GPU time goes
(`tally`). Nothing starts a trial on an executor, and hopsgpu exports none of this.
"""
