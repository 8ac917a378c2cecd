"""The forward pass: identities of any correct decoder, tiny hand computations, and what XLA must not be asked to do."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import our_logits, random_adapter, random_params

from jaxrl.models.config import LinearScaling, Llama3Scaling, ModelConfig, rope_frequencies
from jaxrl.models.forward import block, embed, hidden_states, logits, rms_norm, rotate
from jaxrl.models.lora import LoraConfig, at_layer, lora_specs, merge
from jaxrl.models.spec import init

CONFIG = ModelConfig(
    vocab_size=53,
    width=24,
    ff_width=40,
    layers=3,
    heads=4,
    kv_heads=2,
    head_width=10,
    max_positions=64,
    qkv_bias=True,
    qk_norm=True,
    windows=(None, 6, None),
)
LORA = LoraConfig(rank=3, alpha=5.0)
TOKENS = np.random.default_rng(0).integers(0, 53, (3, 16))


@pytest.fixture(scope="module")
def params() -> Any:
    return random_params(CONFIG)


def run(params: Any, adapter: Any = None, tokens: Any = TOKENS, **kw: Any) -> jax.Array:
    """Logits without jit."""
    t = jnp.asarray(tokens, jnp.int32)
    positions = jnp.arange(t.shape[1])[None].repeat(len(t), 0)
    return logits(params, hidden_states(params, adapter, t, positions, jnp.ones_like(t), config=CONFIG, **kw), CONFIG)


def test_jit_equals_eager(params: Any) -> None:
    np.testing.assert_allclose(our_logits(CONFIG, params, TOKENS), run(params), atol=1e-5)


def test_rows_are_independent(params: Any) -> None:
    other = TOKENS.copy()
    other[1] = (other[1] + 1) % 53
    a, b = our_logits(CONFIG, params, TOKENS), our_logits(CONFIG, params, other)
    np.testing.assert_array_equal(a[[0, 2]], b[[0, 2]])
    assert np.abs(a[1] - b[1]).max() > 0.1
    np.testing.assert_allclose(our_logits(CONFIG, params, TOKENS[:1])[0], a[0], atol=1e-5)


def test_the_future_is_not_seen(params: Any) -> None:
    other = TOKENS.copy()
    other[:, 9:] = (other[:, 9:] + 1) % 53
    a, b = our_logits(CONFIG, params, TOKENS), our_logits(CONFIG, params, other)
    np.testing.assert_array_equal(a[:, :9], b[:, :9])


def test_packing_changes_nothing(params: Any) -> None:
    row = np.concatenate([TOKENS[0, :7], TOKENS[1, :11], [5, 5, 5]])[None]
    positions = np.concatenate([np.arange(7), np.arange(11), [0, 0, 0]])[None]
    segments = np.array([[1] * 7 + [2] * 11 + [0] * 3])
    packed = our_logits(CONFIG, params, row, positions, segments)[0]
    alone = our_logits(CONFIG, params, TOKENS)
    np.testing.assert_allclose(packed[:7], alone[0, :7], atol=1e-5)
    np.testing.assert_allclose(packed[7:18], alone[1, :11], atol=1e-5)
    assert np.isfinite(packed).all()


def test_remat_changes_neither_value_nor_gradient(params: Any) -> None:
    def loss(p: Any, remat: bool) -> jax.Array:
        return jnp.sum(jnp.sin(run(p, remat=remat)))

    with_remat, without = (jax.jit(jax.value_and_grad(lambda p, r=r: loss(p, r)))(params) for r in (True, False))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), with_remat, without)


def test_a_new_adapter_changes_nothing(params: Any) -> None:
    """Also the reference policy at step 0: its log-probs are the policy's, exactly (trl#6043)."""
    adapter = init(lora_specs(CONFIG, LORA), jnp.float32, seed=0)
    np.testing.assert_array_equal(
        our_logits(CONFIG, params, TOKENS, adapter=adapter), our_logits(CONFIG, params, TOKENS)
    )


def test_merged_equals_unmerged(params: Any) -> None:
    adapter = random_adapter(CONFIG, LORA)
    unmerged = our_logits(CONFIG, params, TOKENS, adapter=adapter, lora_scale=LORA.scale)
    merged = our_logits(CONFIG, merge(params, adapter, LORA), TOKENS)
    assert np.abs(unmerged - our_logits(CONFIG, params, TOKENS)).max() > 0.1
    np.testing.assert_allclose(merged, unmerged, atol=1e-5)


def test_gradient_reaches_every_matrix_of_the_adapter(params: Any) -> None:
    adapter = random_adapter(CONFIG, LORA)
    grads = jax.jit(jax.grad(lambda a: jnp.sum(jnp.sin(run(params, a, lora_scale=LORA.scale)))))(adapter)
    assert all((np.abs(g).max(axis=(1, 2)) > 0).all() for g in jax.tree.leaves(jax.device_get(grads)))


def test_rms_norm_by_hand() -> None:
    x = jnp.array([[3.0, 4.0]])
    scale = 1 / math.sqrt((9 + 16) / 2 + 0.5)
    np.testing.assert_allclose(rms_norm(x, jnp.array([1.0, 2.0]), 0.5), [[3 * scale, 8 * scale]], rtol=1e-6)


def test_rotate_by_hand() -> None:
    """Channel i turns with channel i + C/2, by position times theta**(-2 i / C)."""
    config = ModelConfig(8, 4, 4, 1, 1, 1, 4, 16, rope_theta=100.0)
    x = jnp.array([1.0, 0.0, 0.0, 2.0]).reshape(1, 1, 1, 4)
    got = rotate(x, jnp.array([[3]]), config)[0, 0, 0]
    np.testing.assert_allclose(got, [math.cos(3), -2 * math.sin(0.3), math.sin(3), 2 * math.cos(0.3)], rtol=1e-5)


def test_rope_scalings_by_hand() -> None:
    base = ModelConfig(8, 4, 4, 1, 1, 1, 6, 16, rope_theta=1e6)
    np.testing.assert_allclose(rope_frequencies(base), [1, 1e-2, 1e-4], rtol=1e-6)
    linear = ModelConfig(8, 4, 4, 1, 1, 1, 6, 16, rope_theta=1e6, rope_scaling=LinearScaling(4.0))
    np.testing.assert_allclose(rope_frequencies(linear), [0.25, 0.25e-2, 0.25e-4], rtol=1e-6)
    # Wavelengths 2 pi, 200 pi, 20000 pi; 1000 positions make 159, 1.59 and 0.016 turns: kept, between, divided.
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 1000)
    llama3 = ModelConfig(8, 4, 4, 1, 1, 1, 6, 16, rope_theta=1e6, rope_scaling=scaling)
    kept = (1000 / (200 * math.pi) - 1) / 3
    np.testing.assert_allclose(rope_frequencies(llama3), [1, 1e-2 * (kept + (1 - kept) / 8), 1e-4 / 8], rtol=1e-6)


def test_rotation_of_bf16_keeps_angles_in_float32() -> None:
    """Frequencies rounded to bf16 turn far positions by whole radians (SkyRL#1725)."""
    assert rope_frequencies(CONFIG).dtype == np.float32
    positions = np.array([[0, 1, 1000, 30_000, 131_071]])
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, 10)), jnp.bfloat16)
    got = rotate(x, jnp.asarray(positions), CONFIG)
    assert got.dtype == jnp.bfloat16
    a, b = np.split(np.asarray(x, np.float64), 2, axis=-1)
    angles = (positions[..., None] * rope_frequencies(CONFIG).astype(np.float64))[:, :, None]
    want = np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=0.03)


# What XLA is asked to do. Sizes are all different, so that a shape in the program names its matrix; they are large
# enough for XLA:CPU's library kernels to be chosen.
WIDE = ModelConfig(
    vocab_size=640, width=192, ff_width=320, layers=2, heads=4, kv_heads=2, head_width=64, max_positions=64,
    tie_embeddings=True,
)  # fmt: skip
_M, _F, _Q, _KV, _V = 192, 320, 256, 128, 640
_WEIGHTS = [(_M, _Q), (_M, _KV), (_Q, _M), (_M, _F), (_F, _M)]
_TOKENS = jnp.zeros((2, 48), jnp.int32)
_POSITIONS = jnp.arange(48)[None].repeat(2, 0)


def whole(params: Any, adapter: Any) -> jax.Array:
    """A scalar of the whole model."""
    h = hidden_states(params, adapter, _TOKENS, _POSITIONS, jnp.ones_like(_TOKENS), config=WIDE, lora_scale=0.5)
    return jnp.sum(jnp.sin(logits(params, h, WIDE)))


def one_layer(params: Any, adapter: Any) -> jax.Array:
    """A scalar of embedding, first layer (without attention) and head."""
    x, layer, ab = embed(params, _TOKENS), params["layers"][0], at_layer(adapter, 0)
    x = block(x, layer, ab, _POSITIONS, lambda q, k, v: q.reshape(2, 48, _Q), config=WIDE, lora_scale=0.5)
    return jnp.sum(jnp.sin(logits(params, x, WIDE)))


def lowered(f: Any, dtype: Any) -> Any:
    """The program as it is given to XLA."""
    return jax.jit(f).lower(random_params(WIDE, dtype), random_adapter(WIDE, LoraConfig(rank=8)))


def shapes(pattern: str, program: str) -> set[tuple[int, ...]]:
    """Every shape that the pattern's one group finds."""
    return {tuple(int(n) for n in re.split("[,x]", s)) for s in re.findall(pattern, program)}


def unfused(program: str) -> str:
    """The program without the insides of its fusions, where values are never written to memory."""
    return re.sub(r"^%(?:fused|wrapped|parallel)[^\n]*\{\n.*?^\}", "", program, flags=re.MULTILINE | re.DOTALL)


def in_memory(program: Any) -> set[tuple[int, ...]]:
    """Shapes of the float32 arrays that XLA's program writes."""
    return shapes(r"\bf32\[([\d,]+)\]", unfused(program.compile().as_text() or ""))


def of_weights(found: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Those that are a projection or the embedding, transposed or not, stacked or not."""
    matrices = [*_WEIGHTS, (_V, _M)]
    return {s for s in found if s[-2:] in matrices or s[-2:][::-1] in matrices}


def test_the_gradient_of_the_adapter_does_not_compute_that_of_the_base() -> None:
    products = r"dot_general .*-> tensor<([\dx]+)xf32>"
    base, adapter = (lowered(jax.grad(whole, i), jnp.float32).as_text() for i in (0, 1))
    assert of_weights(shapes(products, base)), "the test would not see a product if there was one"
    assert not of_weights(shapes(products, adapter))


@pytest.mark.parametrize("f", [one_layer, jax.grad(one_layer, 1)], ids=["value", "gradient"])
def test_bf16_weights_are_never_copied_to_float32(f: Any, fully_optimized: None) -> None:
    """Stacking the layers does so on XLA:CPU, which widens every bf16 concatenate; the products must not."""
    wide = in_memory(lowered(f, jnp.bfloat16))
    assert wide
    assert not of_weights(wide)
    copy = jax.jit(lambda w: w.astype(jnp.float32)).lower(jnp.zeros((_M, _F), jnp.bfloat16))
    assert of_weights(in_memory(copy)), "the test would not see a copy if there was one"
