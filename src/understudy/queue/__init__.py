"""The sample queue between rollout and learner: the contract and its in-memory back end."""

from understudy.queue.contract import BatchRef, FailedGroup, QueueTimeout, SampleQueue, SchemaError, Tags
from understudy.queue.memory import MemoryQueue

__all__ = ["BatchRef", "FailedGroup", "MemoryQueue", "QueueTimeout", "SampleQueue", "SchemaError", "Tags"]
