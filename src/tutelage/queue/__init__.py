"""The sample queue between rollout and learner: the contract and its in-memory back end."""

from tutelage.queue.contract import BatchRef, FailedGroup, QueueTimeout, SampleQueue, SchemaError, Tags
from tutelage.queue.memory import MemoryQueue

__all__ = ["BatchRef", "FailedGroup", "MemoryQueue", "QueueTimeout", "SampleQueue", "SchemaError", "Tags"]
