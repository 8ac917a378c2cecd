"""Which loss, at which staleness: variants x seeds x gaps between sampler and trainer on one game, in one report.

The command is `python -m recipes.loss_study` (see `__main__.py`).
"""
