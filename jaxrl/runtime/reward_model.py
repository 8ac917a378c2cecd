"""A model as a judge of answers: how likely it finds them.

Knows policies by name, renderers and log-probs. Must not know what is done with a score.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl.algo.batch import choose_width, datum_values, pack
from jaxrl.algo.step import make_eval_logprobs
from jaxrl.chat.families import renderer_for
from jaxrl.chat.supervised import supervise, supervised_datum
from jaxrl.runtime.policy import load_policy, policy_tokenizer
from jaxrl.types import Datum, Message

_WIDTHS = tuple(2**n for n in range(6, 18))


class CheckpointScore:
    """How much likelier a model finds an answer than a reference does: the reward implied by a model trained from
    preferences (Rafailov et al., arXiv 2305.18290). Without a reference, the mean log-prob of a token.

    model, reference: names that `load_policy` takes, of one tokenizer. Owns their weights, which it loads when it is
    first called. Blocks on the device: call it in a thread.
    """

    def __init__(self, model: str, reference: str | None = None) -> None:
        self._names = (model, reference)
        self._loaded: list[Callable[[Datum], float]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_names": self._names, "_loaded": None}  # whoever unpickles it loads for itself

    def __call__(self, prompt: Sequence[Message], completion: Sequence[Message]) -> float:
        """The score, natural logarithms."""
        if self._loaded is None:
            self._renderer = renderer_for(policy_tokenizer(self._names[0]))
            self._loaded = [_scorer(name) for name in self._names if name is not None]
        said = [len(prompt) + i for i, message in enumerate(completion) if message.role == "assistant"]
        whole = supervise(self._renderer, (*prompt, *completion), train_on=said)
        data = [supervised_datum(sequence, episode=0) for sequence in whole]
        count = sum(int(datum.mask.sum()) for datum in data)
        totals = [sum(score(datum) for datum in data) for score in self._loaded]
        return totals[0] - totals[1] if len(totals) == 2 else totals[0] / count


def _scorer(name: str) -> Callable[[Datum], float]:
    """datum -> the sum of the log-probs of its trained tokens. One program for each power of two of its length."""
    config, params = load_policy(name, dtype=jnp.float32)
    evaluate = make_eval_logprobs(config, None, temperature=1.0)

    def score(datum: Datum) -> float:
        batch = pack([datum], [np.zeros(len(datum.tokens))], width=choose_width([datum], _WIDTHS), rows=1)
        (logp,) = datum_values(np.asarray(evaluate(params, None, batch)), [datum])
        return float(np.sum(logp[datum.mask]))

    return score
