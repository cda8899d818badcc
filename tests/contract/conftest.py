"""Property tests run on machines with other work to do: no deadline for a single example."""

from hypothesis import settings

settings.register_profile("coatcheck", deadline=None)
settings.load_profile("coatcheck")
