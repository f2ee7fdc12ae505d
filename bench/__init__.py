"""Benchmarks of understudy: one on-policy distillation step beside the same step in TRL."""
