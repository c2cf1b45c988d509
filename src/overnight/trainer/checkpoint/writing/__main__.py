"""``python -m overnight.trainer.checkpoint.writing CHANNEL PULSE PARENT``: started by the trainer, not by people."""

import sys

from overnight.trainer.checkpoint.writing.process import main

main(sys.argv[1:])
