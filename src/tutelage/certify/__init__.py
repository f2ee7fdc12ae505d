"""Certify objectives: compare the mean gradient that the code computes with the exact gradient that it claims."""

from tutelage.certify.files import load_file
from tutelage.certify.judge import ALL_CHECKS, Row, certify
from tutelage.certify.subjects import Subject

__all__ = ["ALL_CHECKS", "Row", "Subject", "certify", "load_file"]
