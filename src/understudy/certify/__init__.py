"""Proofs of objectives: the mean gradient of what the code computes, against the exact gradient of what it claims."""

from understudy.certify.files import load_file
from understudy.certify.judge import ALL_CHECKS, Row, certify
from understudy.certify.subjects import Subject

__all__ = ["ALL_CHECKS", "Row", "Subject", "certify", "load_file"]
