"""Multi-turn reinforcement learning of language models in JAX."""
