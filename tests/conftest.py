"""What holds for all tests: an example takes as long as a busy machine needs; pytest's own time limit is the judge."""

from hypothesis import settings

settings.register_profile("overnight", deadline=None)
settings.load_profile("overnight")
