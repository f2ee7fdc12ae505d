"""Benchmarks of tutelage, most of all one on-policy distillation step compared with the same step in TRL."""
