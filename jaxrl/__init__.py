"""Multi-turn reinforcement learning of language models in JAX."""

import os

# transformers says at every start that torch is missing, which is how it is meant to be.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
