"""Reading checkpoints: one pass that verifies and places, newest good one first; nothing live is touched before.

``source`` brings bytes, ``transfer`` hashes and places them segment by segment, ``assembly`` knows which bytes make up
a tensor under the sharding of today, ``restored`` hands out objects, ``lineage`` and ``finding`` choose the checkpoint.
"""
