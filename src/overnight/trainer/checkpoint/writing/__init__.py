"""Writing checkpoints in a process of its own, so that training feels neither hashing, disk nor network.

The trainer holds a :class:`~overnight.trainer.checkpoint.writing.client.WriterClient`; the process
(``python -m overnight.trainer.checkpoint.writing``) imports neither torch nor numpy. They share the staging arena's
memory, and small messages over a socket pair.
"""
