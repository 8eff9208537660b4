"""Differential privacy: clipped gradients, noise, sampling, accounting, budgets, private optimisers."""
