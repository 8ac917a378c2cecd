"""An answer's score under a model is the log-likelihood of its tokens, whatever else is in the conversation."""

import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from small_run import write_model

from jaxrl.chat.families import renderer_for
from jaxrl.chat.supervised import supervise
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.models.forward import hidden_states, logits
from jaxrl.runtime.policy import load_policy
from jaxrl.runtime.reward_model import CheckpointScore
from jaxrl.types import Message

RENDERER = renderer_for(byte_tokenizer())


def test_a_checkpoint_scores_an_answer_by_its_likelihood(tmp_path: Path) -> None:
    name = write_model(tmp_path / "model")
    prompt, completion = (Message("user", "Why?"),), (Message("assistant", "So."),)
    score = pickle.loads(pickle.dumps(CheckpointScore(name)))(prompt, completion)
    config, params = load_policy(name, dtype=jnp.float32)
    ((tokens, mask),) = supervise(RENDERER, (*prompt, *completion))
    tokens_BT = jnp.array([tokens])
    places, segments = jnp.arange(len(tokens), dtype=jnp.int32)[None], jnp.ones((1, len(tokens)), jnp.int32)
    hidden = hidden_states(params, None, tokens_BT, places, segments, config=config)
    logp = jax.nn.log_softmax(logits(params, hidden, config), axis=-1)
    said = [float(logp[0, t - 1, tokens[t]]) for t in range(len(tokens)) if mask[t]]
    assert len(said) == 4
    assert score == pytest.approx(sum(said) / len(said), abs=1e-4)
    assert CheckpointScore(name, name)(prompt, completion) == pytest.approx(0.0, abs=1e-5)
