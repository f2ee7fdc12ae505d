"""The record of a run: the files in its directory (see run_directory.py), its report, and what it prints."""

from tutelage.record.display import Display, final_table
from tutelage.record.report import write_report
from tutelage.record.run_directory import EvalSample, Measured, RolloutRow, RunDirectory
from tutelage.record.writers import MetricWriter, TensorBoardWriter, WandbWriter

__all__ = [
    "Display",
    "EvalSample",
    "Measured",
    "MetricWriter",
    "RolloutRow",
    "RunDirectory",
    "TensorBoardWriter",
    "WandbWriter",
    "final_table",
    "write_report",
]
