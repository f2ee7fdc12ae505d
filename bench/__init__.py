"""Benchmarks of tutelage: one on-policy distillation step beside the same step in TRL."""
