"""The update: against torch's own optimizers, plain numpy and literal values."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from minigpt import optim
from minigpt.config import GPTConfig, TrainConfig
from minigpt.model import GPT
from minigpt.optim import POLYNOMIALS, AdamW, Muon, Optimizer, learning_rate_factor, ngram_factor, orthogonalise
from tests.cli_support import as_in_a_shell
from tests.model_support import random_model

SHAPE = GPTConfig(vocab_size=7, n_layer=2, n_head=2, n_embd=8, block_size=12, window=4)

# Names of the parameters that Muon is for, by what stands behind "blocks.<n>.".
MATRICES = ("attn.qkv.weight", "attn.proj.weight", "mlp.gate_up.weight", "mlp.down.weight")


def random_matrix(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def set_gradients(model: GPT, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.empty_like(param).normal_(generator=generator)


def weights_of(model: GPT) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def with_singular_values(seed: int, rows: int, columns: int, values: Sequence[float]) -> Tensor:
    u, _, vh = torch.linalg.svd(random_matrix(seed, rows, columns), full_matrices=False)
    matrix: Tensor = u @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ vh
    return matrix


# The schedule


def factors(**settings: float) -> list[float]:
    config = TrainConfig(**settings)  # type: ignore[arg-type]
    return [learning_rate_factor(step, config) for step in range(config.steps)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"steps": 10, "warmup_steps": 4, "decay_fraction": 0.5},
            [0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.6, 0.4, 0.2],
        ),
        ({"steps": 4, "warmup_steps": 0, "decay_fraction": 0.5}, [1, 1, 1, 0.5]),
        ({"steps": 4, "warmup_steps": 2, "decay_fraction": 0.0}, [0.5, 1, 1, 1]),
        ({"steps": 3, "warmup_steps": 0, "decay_fraction": 0.0}, [1, 1, 1]),
        ({"steps": 4, "warmup_steps": 0, "decay_fraction": 1.0}, [1, 0.75, 0.5, 0.25]),
        # A warm-up that meets the decay, and one longer than the run.
        ({"steps": 4, "warmup_steps": 4, "decay_fraction": 1.0}, [0.25, 0.375, 0.375, 0.25]),
        ({"steps": 2, "warmup_steps": 8, "decay_fraction": 0.0}, [0.125, 0.25]),
        ({"steps": 1, "warmup_steps": 1, "decay_fraction": 0.5}, [1]),
    ],
)
def test_the_rates_rise_stay_and_fall_as_set(settings: dict[str, float], expected: list[float]) -> None:
    assert factors(**settings) == pytest.approx(expected, abs=1e-12)


def test_rates_rise_stay_and_fall_over_a_thousand_steps() -> None:
    values = factors(steps=1000, warmup_steps=50, decay_fraction=0.6)
    assert values[0] == pytest.approx(0.02)
    assert values[48] == pytest.approx(0.98)
    assert values[49:401] == [1.0] * 352
    assert values[401] == pytest.approx(599 / 600)
    assert values[700] == pytest.approx(0.5)
    assert values[999] == pytest.approx(1 / 600)


@pytest.mark.parametrize(
    ("decay_fraction", "expected"),
    [(0.5, [1, 1, 1, 0.75]), (0.0, [1, 1, 1, 1]), (1.0, [1, 0.875, 0.75, 0.625])],
)
def test_half_of_the_counts_share_falls_as_the_rates_do(decay_fraction: float, expected: list[float]) -> None:
    config = TrainConfig(steps=4, warmup_steps=3, decay_fraction=decay_fraction)
    assert [ngram_factor(step, config) for step in range(4)] == pytest.approx(expected)


# Orthogonalising


def test_each_polynomial_is_the_nearest_to_one_over_what_those_before_it_leave() -> None:
    low, high = 0.001, 1.0
    for a, b, c in POLYNOMIALS:
        # The best of three coefficients is that whose error has four equal extremes of alternating sign (Chebyshev).
        roots = np.sqrt(np.roots([5 * c, 3 * b, a]).real)
        places = np.array([low, *sorted(roots), high])
        errors = a * places + b * places**3 + c * places**5 - 1
        error = abs(errors[0])
        np.testing.assert_allclose(errors, error * np.array([-1, 1, -1, 1]), atol=3e-3)
        low, high = 1 - error, 1 + error
    assert low > 0.45


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 9), (8, 8), (8, 24), (32, 33), (64, 64)])
def test_a_random_matrix_gets_singular_values_near_one_and_keeps_its_directions(rows: int, columns: int) -> None:
    matrix = random_matrix(rows * 100 + columns, rows, columns)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    # Random square matrices have a smallest singular value of about 1 / rows of the largest.
    assert s.min() / s.norm() > 0.0015
    inner = u.mT @ orthogonalise(matrix[None])[0] @ vh.mT
    values = inner.diagonal()
    assert values.min() > 0.45
    assert values.max() < 1.55
    # Nothing turned: U^T X V is diagonal, and no diagonal entry changed its sign.
    assert (inner - torch.diag(values)).abs().max() < 1e-12


@pytest.mark.parametrize("smallest", [0.1, 0.02, 0.002])
def test_singular_values_of_a_badly_conditioned_matrix_end_near_one_too(smallest: float) -> None:
    spread = np.geomspace(smallest, 1.0, 6)
    values = (spread / np.linalg.norm(spread)).tolist()
    result = orthogonalise(1e3 * with_singular_values(5, 6, 10, values)[None])[0]
    found = torch.linalg.svdvals(result)
    assert found.min() > 0.45
    assert found.max() < 1.55


@pytest.mark.parametrize("columns", [64, 128, 512])
@pytest.mark.parametrize("smallest", [0.1, 0.02, 0.002])
def test_in_float32_in_which_training_is_singular_values_end_near_one_too(columns: int, smallest: float) -> None:
    spread = np.geomspace(smallest, 1.0, 64)
    matrix = with_singular_values(11, 64, columns, (spread / np.linalg.norm(spread)).tolist())[None]
    expected = torch.linalg.svdvals(orthogonalise(matrix))
    found = torch.linalg.svdvals(orthogonalise(matrix.float()).double())
    # Squaring the matrix squares its condition, which costs half the digits of the smallest ones.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_direction_that_is_a_millionth_of_the_rest_grows_but_stays_small() -> None:
    # The slopes at zero multiply to 461.
    result = orthogonalise(with_singular_values(6, 4, 4, [1.0, 1.0, 1.0, 1e-6])[None])[0]
    expected = 1e-6 / 3**0.5 * 8.4703 * 4.1828 * 3.9619 * 3.2866
    assert torch.linalg.svdvals(result).min().item() == pytest.approx(expected, rel=1e-3)


def test_the_size_of_a_matrix_does_not_matter_and_its_sign_is_kept() -> None:
    matrix = random_matrix(7, 5, 9)
    once = orthogonalise(matrix[None])
    torch.testing.assert_close(orthogonalise(1e5 * matrix[None]), once, rtol=0, atol=1e-12)
    torch.testing.assert_close(orthogonalise(1e-5 * matrix[None]), once, rtol=0, atol=1e-12)
    torch.testing.assert_close(orthogonalise(-matrix[None]), -once, rtol=0, atol=1e-12)


def test_matrices_of_a_stack_do_not_know_each_other() -> None:
    first, second = random_matrix(8, 4, 6), 1e4 * random_matrix(9, 4, 6)
    both = orthogonalise(torch.stack([first, second]))
    torch.testing.assert_close(both[0], orthogonalise(first[None])[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(both[1], orthogonalise(second[None])[0], rtol=0, atol=1e-12)


def test_a_zero_matrix_stays_zero() -> None:
    assert torch.equal(orthogonalise(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_orthogonalising_keeps_the_dtype_and_its_argument(dtype: torch.dtype) -> None:
    matrices = random_matrix(10, 2, 4, 4, dtype=dtype)
    before = matrices.clone()
    assert orthogonalise(matrices).dtype == dtype
    assert torch.equal(matrices, before)


# Muon


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_muon_is_the_muon_of_torch(
    weight_decay: float, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch orthogonalises in bfloat16; without that cast its iteration runs in the dtype of the weights, as ours does.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    # And with one polynomial, five times.
    monkeypatch.setattr(optim, "POLYNOMIALS", [(3.4445, -4.7750, 2.0315)] * 5)
    shapes = [(6, 6), (5, 11), (4, 12), (4, 12), (1, 3), (64, 70)]
    ours = [random_matrix(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]
    theirs = [weight.clone().requires_grad_() for weight in ours]
    muon = Muon(ours, lr=0.05, weight_decay=weight_decay)
    reference = torch.optim.Muon(theirs, lr=0.05, weight_decay=weight_decay, momentum=0.9, nesterov=True)
    for step in range(6):
        # Not the same rate at every step: the factor takes part.
        factor = 1.0 - 0.1 * step
        reference.param_groups[0]["lr"] = 0.05 * factor
        for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            our.grad = random_matrix(1000 * step + i, *our.shape, dtype=dtype)
            their.grad = our.grad.clone()
        muon.step(factor)
        reference.step()  # type: ignore[no-untyped-call]
        for our, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our, their.detach(), rtol=0, atol=tolerance)


def polynomials_of(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """The polynomials of one matrix, written out."""
    x = matrix / np.linalg.norm(matrix)
    for a, b, c in POLYNOMIALS:
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


@pytest.mark.parametrize(
    ("rows", "columns", "blocks"),
    [
        (6, 6, [6]),
        (4, 10, [4]),
        # No block is higher than wide, the last one may be lower.
        (10, 4, [4, 4, 2]),
        (192, 80, [64, 64, 64]),
        (100, 80, [64, 36]),
    ],
)
def test_muon_is_the_published_formula_for_each_block_of_rows(rows: int, columns: int, blocks: list[int]) -> None:
    weight = random_matrix(20, rows, columns)
    expected, momentum = weight.numpy().copy(), np.zeros((rows, columns))
    muon = Muon([weight], lr=0.1, weight_decay=0.2)
    # Very different sizes, so that one norm over all blocks would be seen.
    scales = np.repeat([1.0, 100.0, 0.01][: len(blocks)], blocks)[:, None]
    for step in range(4):
        weight.grad = torch.from_numpy(scales) * random_matrix(30 + step, rows, columns)
        gradient = weight.grad.numpy().copy()
        momentum = 0.9 * momentum + 0.1 * gradient
        ahead = 0.1 * gradient + 0.9 * momentum
        parts = np.split(ahead, np.cumsum(blocks)[:-1])
        expected = expected * (1 - 0.1 * 0.2) - 0.1 * np.concatenate([polynomials_of(part) for part in parts])
        muon.step(1.0)
    np.testing.assert_allclose(weight.numpy(), expected, rtol=0, atol=1e-11)


def test_matrices_that_are_updated_together_do_not_know_each_other() -> None:
    shapes = [(10, 4), (6, 4), (4, 10), (130, 4)]
    together = [random_matrix(i, *shape) for i, shape in enumerate(shapes)]
    alone = [weight.clone() for weight in together]
    optimizers = [Muon([weight], lr=0.1, weight_decay=0.2) for weight in alone]
    muon = Muon(together, lr=0.1, weight_decay=0.2)
    for step in range(3):
        for i, (weight, twin) in enumerate(zip(together, alone, strict=True)):
            weight.grad = 10.0**i * random_matrix(50 + 10 * step + i, *weight.shape)
            twin.grad = weight.grad.clone()
        muon.step(0.7)
        for optimizer in optimizers:
            optimizer.step(0.7)
    for weight, twin in zip(together, alone, strict=True):
        torch.testing.assert_close(weight, twin, rtol=0, atol=1e-12)


def test_muon_asks_for_a_gradient_of_every_matrix() -> None:
    weight = random_matrix(60, 2, 2)
    with pytest.raises(ValueError, match="gradient"):
        Muon([weight], lr=0.1, weight_decay=0.0).step(1.0)


# AdamW


def test_adamw_takes_the_steps_of_the_class_of_torch() -> None:
    params = [random_matrix(70 + i, 5, 3).float() for i in range(3)]
    twins = [param.clone().requires_grad_() for param in params]
    ours = AdamW(params, lr=0.01)
    theirs = torch.optim.AdamW(twins, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for step, factor in enumerate((0.5, 1.0, 0.25)):
        for i, (param, twin) in enumerate(zip(params, twins, strict=True)):
            param.grad = random_matrix(80 + 10 * step + i, 5, 3).float()
            twin.grad = param.grad.clone()
        ours.step(factor)
        theirs.param_groups[0]["lr"] = 0.01 * factor
        theirs.step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin.detach(), rtol=0, atol=1e-7)


def test_an_optimizer_does_not_load_the_compiler_of_torch() -> None:
    code = """
import sys
from minigpt.config import GPTConfig, TrainConfig
from minigpt.model import GPT
from minigpt.optim import Optimizer
model = GPT(GPTConfig(vocab_size=3, n_layer=1, n_embd=8, n_head=1, block_size=8, window=8))
for param in model.parameters():
    param.grad = param.detach().clone()
optimizer = Optimizer(model, TrainConfig())
optimizer.clip_gradients()
optimizer.step(0)
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], **as_in_a_shell()).returncode == 0


# Both together


def test_every_parameter_belongs_to_exactly_one_optimizer() -> None:
    model = random_model(SHAPE)
    optimizer = Optimizer(model, TrainConfig())
    set_gradients(model, 1)
    optimizer.step(0)
    names = [name.rpartition("/") for name in optimizer.state_tensors()]
    muon = {name for name, _, what in names if what == "momentum"}
    adamw = {name for name, _, what in names if what != "momentum"}
    assert muon == {f"blocks.{layer}.{matrix}" for layer in range(2) for matrix in MATRICES}
    assert muon | adamw == {name for name, _ in model.named_parameters()}
    assert not muon & adamw


def test_every_weight_moves_at_the_rate_of_its_optimizer() -> None:
    config = TrainConfig(muon_lr=0.0, adamw_lr=0.01, warmup_steps=0, decay_fraction=0.0)
    model = random_model(SHAPE)
    before = weights_of(model)
    optimizer = Optimizer(model, config)
    set_gradients(model, 1)
    optimizer.step(0)
    for name, weight in weights_of(model).items():
        # The first step of AdamW is the rate times the sign of the gradient.
        expected = 0.0 if name.endswith(MATRICES) else 0.01
        torch.testing.assert_close((weight - before[name]).abs(), torch.full_like(weight, expected), rtol=0, atol=1e-5)


def test_what_is_not_a_matrix_is_updated_by_adamw_without_decay_and_the_matrices_by_muon_with_it() -> None:
    config = TrainConfig(steps=10, muon_lr=0.02, adamw_lr=0.01, weight_decay=0.5, warmup_steps=2, decay_fraction=0.5)
    model = random_model(SHAPE).double()
    expected = {name: weight.numpy() for name, weight in weights_of(model).items()}
    mean = {name: np.zeros_like(weight) for name, weight in expected.items()}
    square = {name: np.zeros_like(weight) for name, weight in expected.items()}
    momentum = {name: np.zeros_like(weight) for name, weight in expected.items()}
    optimizer = Optimizer(model, config)
    # Warm-up at 1/2, then the peak, then two steps of the decay.
    for count, (step, factor) in enumerate([(0, 0.5), (3, 1.0), (6, 0.8), (9, 0.2)], start=1):
        set_gradients(model, step)
        for name, param in model.named_parameters():
            assert param.grad is not None
            g = param.grad.numpy().copy()
            if name.endswith(MATRICES):
                momentum[name] = 0.9 * momentum[name] + 0.1 * g
                # Square blocks of 8 rows, and those that are 8 x 32.
                parts = np.split(0.1 * g + 0.9 * momentum[name], len(g) // 8)
                update = np.concatenate([polynomials_of(part) for part in parts])
                expected[name] = expected[name] * (1 - 0.02 * factor * 0.5) - 0.02 * factor * update
            else:
                mean[name] = 0.9 * mean[name] + 0.1 * g
                square[name] = 0.95 * square[name] + 0.05 * g**2
                direction = mean[name] / (1 - 0.9**count) / (np.sqrt(square[name] / (1 - 0.95**count)) + 1e-8)
                expected[name] = expected[name] - 0.01 * factor * direction
        optimizer.step(step)
    for name, weight in weights_of(model).items():
        np.testing.assert_allclose(weight.numpy(), expected[name], rtol=0, atol=1e-10, err_msg=name)


def test_gradients_are_dropped_after_a_step() -> None:
    model = random_model(SHAPE)
    optimizer = Optimizer(model, TrainConfig())
    set_gradients(model, 1)
    optimizer.step(0)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize(
    ("limit", "length", "expected"), [(1.0, 5.0, 1.0), (1.0, 0.5, 0.5), (0.0, 5000.0, 5000.0), (0.25, 1e-3, 1e-3)]
)
def test_a_gradient_longer_than_the_limit_is_shortened_to_it_and_its_length_told(
    limit: float, length: float, expected: float
) -> None:
    model = random_model(SHAPE)
    optimizer = Optimizer(model, TrainConfig(grad_clip=limit))
    set_gradients(model, 2)
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(length / norm)
    before = torch.cat([gradient.flatten() for gradient in gradients])
    assert optimizer.clip_gradients() == pytest.approx(length, rel=1e-5)
    after = torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])
    assert after.norm().item() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(after, before * (expected / length), rtol=1e-5, atol=0)


# State


def trained(steps: int) -> tuple[GPT, Optimizer]:
    model = random_model(SHAPE)
    optimizer = Optimizer(model, TrainConfig(steps=20, warmup_steps=2, weight_decay=0.1))
    for step in range(steps):
        set_gradients(model, step)
        optimizer.step(step)
    return model, optimizer


@pytest.mark.parametrize("stop", [0, 1, 4])
def test_an_optimizer_with_the_state_of_another_goes_on_bit_for_bit(stop: int) -> None:
    straight, _ = trained(8)
    first, before = trained(stop)
    state = {name: tensor.clone() for name, tensor in before.state_tensors().items()}
    second = random_model(SHAPE, seed=99)
    second.load_state_dict(first.state_dict())
    after = Optimizer(second, TrainConfig(steps=20, warmup_steps=2, weight_decay=0.1))
    after.load_state_tensors(state)
    for step in range(stop, 8):
        set_gradients(second, step)
        after.step(step)
    for name, weight in weights_of(straight).items():
        assert torch.equal(weight, weights_of(second)[name]), name


def test_loading_a_state_copies_it() -> None:
    _, optimizer = trained(3)
    state = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    _, other = trained(0)
    other.load_state_tensors(state)
    for tensor in state.values():
        tensor.fill_(7)
    for name, tensor in optimizer.state_tensors().items():
        assert torch.equal(other.state_tensors()[name], tensor), name


STATE_NAMES = [
    f"{name}/{what}"
    for name, _ in GPT(SHAPE).named_parameters()
    for what in (["momentum"] if name.endswith(MATRICES) else ["step", "exp_avg", "exp_avg_sq"])
]


def test_the_state_is_all_that_the_next_step_depends_on_and_nothing_else() -> None:
    assert sorted(trained(2)[1].state_tensors()) == sorted(STATE_NAMES)


@pytest.mark.parametrize("name", STATE_NAMES)
def test_a_state_that_lacks_a_tensor_is_refused(name: str) -> None:
    _, optimizer = trained(2)
    state = optimizer.state_tensors()
    del state[name]
    with pytest.raises(ValueError, match=r"missing|unknown"):
        trained(0)[1].load_state_tensors(state)


def test_a_state_that_lacks_all_tensors_of_one_parameter_is_refused() -> None:
    _, optimizer = trained(2)
    state = {name: value for name, value in optimizer.state_tensors().items() if not name.startswith("wte.weight/")}
    with pytest.raises(ValueError, match="missing"):
        trained(0)[1].load_state_tensors(state)


@pytest.mark.parametrize("name", STATE_NAMES)
def test_a_state_of_another_shape_is_refused(name: str) -> None:
    _, optimizer = trained(2)
    state = optimizer.state_tensors()
    state[name] = torch.zeros(*state[name].shape, 2)
    with pytest.raises(ValueError, match=r"shape \("):
        trained(0)[1].load_state_tensors(state)


@pytest.mark.parametrize("name", ["wte.weight/momentum", "blocks.2.attn.proj.weight/momentum", "", "step"])
def test_a_state_with_an_unknown_tensor_is_refused(name: str) -> None:
    _, optimizer = trained(2)
    with pytest.raises(ValueError, match="unknown"):
        trained(0)[1].load_state_tensors({**optimizer.state_tensors(), name: torch.zeros(1)})
