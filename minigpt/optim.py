"""The update of the weights: Muon for the matrices inside the blocks, AdamW for the rest, and the schedules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from minigpt.config import TrainConfig
from minigpt.model import GPT

# Averages over about 10 steps, with Nesterov's look ahead (Jordan et al. 2024, "Muon: An optimizer for hidden layers in
# neural networks", has 0.95; in runs of a thousand steps 0.9 learns more).
MUON_MOMENTUM = 0.9
# Odd polynomials a x + b x^3 + c x^5, applied one after the other. Each is the best approximation of 1 on the range of
# singular values that those before it leave, starting from 0.001 to 1; so is the whole (Amsel et al. 2025, "The Polar
# Express"). These four learn as well as five of Muon's own do.
POLYNOMIALS = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
)
# Rows that are orthogonalised together: the smaller, the cheaper. 64 learn as well as whole matrices do, 32 less well
# (see the README's section on training).
BLOCK_ROWS = 64
# A second moment that averages over about 20 steps: in a run of minutes, gradients change fast.
ADAMW_BETAS = (0.9, 0.95)
# Torch's own.
ADAMW_EPS = 1e-8


def learning_rate_factor(step: int, config: TrainConfig) -> float:
    """What the peak learning rates are multiplied by at a step (from 0): warm-up, constant, linear fall to zero."""
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    return warmup * decay_factor(step, config)


def decay_factor(step: int, config: TrainConfig) -> float:
    """What is left of the learning rates at a step (from 0) near the end: 1, then a linear fall to zero."""
    return min(1.0, (1 - step / config.steps) / config.decay_fraction) if config.decay_fraction else 1.0


def ngram_factor(step: int, config: TrainConfig) -> float:
    """The share of the counts at a step (from 0), relative to its peak: 1, then a fall to a half as the rates fall.

    Counts teach fast at first, but know less in the end than the model does. Half of their share stays, which keeps a
    model that reads a short text many times from learning it by heart. Like the rates it must not depend on
    ``config.steps`` before they fall: until then a run by the clock only estimates that number.
    """
    return (1 + decay_factor(step, config)) / 2


def orthogonalise(matrices: Tensor) -> Tensor:
    """Keeps the directions of matrices and makes their singular values about equal: U S V^T to about U V^T.

    "About": those above a thousandth of the norm end between 0.45 and 1.55, smaller ones below, which is near enough.

    Args:
        matrices: (N, rows, columns) with rows <= columns; not changed. The dtype is kept: bfloat16, the usual choice
            on GPUs, is ten times slower than float32 on a processor without instructions for it.

    Source:
        On X with A = X X^T a polynomial of the singular values is (a + b A + c A^2) X (Jordan et al. 2024, "Muon").
    """
    first, *others = POLYNOMIALS
    A = matrices @ matrices.mT
    # Of the matrices divided by their norms, without dividing them: the trace is the squared norm.
    squared_norm = A.diagonal(dim1=-2, dim2=-1).sum(dim=-1).clamp(min=1e-14)[:, None, None]
    # A factor is what a polynomial multiplies by. The first lifts the small singular values, whose squares would drown
    # in the rounding of A; then all is worked out in terms of A, which is smaller than X.
    X = _factor(A / squared_norm, *first).div_(squared_norm.sqrt()) @ matrices
    A = X @ X.mT
    product = _factor(A, *others[0])
    factor = product
    for polynomial in others[1:]:
        A = factor @ A @ factor
        factor = _factor(A, *polynomial)
        product = factor @ product
    return product @ X


def _factor(A: Tensor, a: float, b: float, c: float) -> Tensor:
    """a + b A + c A^2."""
    factor = torch.baddbmm(A, A, A, beta=b, alpha=c)
    factor.diagonal(dim1=-2, dim2=-1).add_(a)
    return factor


class Muon:
    """Momentum whose step is orthogonalised, so that every direction of a matrix moves by the same amount.

    Every block of `BLOCK_ROWS` rows is orthogonalised by itself (Khaled et al. 2025, "MuonBP", without its occasional
    steps for whole matrices). The work then grows with the number of weights only, and all blocks of equal width go
    through in one piece. For a matrix that is one block, and but for the polynomials, it is the update of
    ``torch.optim.Muon``, in the dtype of the weights, with decoupled weight decay.

    Args:
        params: matrices, (rows, columns).
        lr: peak learning rate.
        weight_decay: share of a weight that is lost in a step at a learning rate of 1.
    """

    def __init__(self, params: Sequence[Tensor], lr: float, weight_decay: float) -> None:
        self.lr = lr
        self.weight_decay = weight_decay
        by_shape: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for param in params:
            by_shape[_block_shape(param)].append(param)
        self._stacks = [_Stack(members, *shape) for shape, members in by_shape.items()]
        self.momentum = {
            param: momentum
            for stack in self._stacks
            for param, momentum in zip(stack.params, stack.of_params(stack.momentum), strict=True)
        }

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update at ``factor`` times the peak learning rate, from the gradients that stand in the parameters."""
        lr = self.lr * factor
        for stack in self._stacks:
            torch._foreach_copy_(stack.of_params(stack.update), [_gradient(param) for param in stack.params])
            stack.momentum.lerp_(stack.update, 1 - MUON_MOMENTUM)
            # Nesterov's look ahead.
            stack.update.lerp_(stack.momentum, MUON_MOMENTUM)
            if self.weight_decay:
                torch._foreach_mul_(stack.params, 1 - lr * self.weight_decay)
            torch._foreach_add_(stack.params, stack.of_params(orthogonalise(stack.update)), alpha=-lr)


class _Stack:
    """Matrices whose blocks of rows have one shape, and what an update needs of all of them in one piece.

    Args:
        params: the matrices.
        rows, columns: of a block. The last one of a matrix is filled up with zeros.
    """

    def __init__(self, params: list[Tensor], rows: int, columns: int) -> None:
        self.params = params
        self._n_blocks = [-(-len(param) // rows) for param in params]
        self.momentum = params[0].new_zeros(sum(self._n_blocks), rows, columns)
        self.update = torch.zeros_like(self.momentum)

    def of_params(self, blocks: Tensor) -> list[Tensor]:
        """The matrices that blocks like `momentum` are made of, as views."""
        parts = zip(torch.split(blocks, self._n_blocks), self.params, strict=True)
        return [part.flatten(0, 1)[: len(param)] for part, param in parts]


class AdamW:
    """The update of ``torch.optim.AdamW``, whose class would load torch's compiler first, which takes a second.

    Args:
        params: tensors of any shapes. There is no weight decay.
        lr: peak learning rate.

    Source:
        Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2, by torch's fused kernel.
    """

    def __init__(self, params: Sequence[Tensor], lr: float) -> None:
        self.lr = lr
        self.params = list(params)
        # Running means of the gradient and of its square, under torch's names, and updates done.
        self.exp_avg = [torch.zeros_like(param) for param in params]
        self.exp_avg_sq = [torch.zeros_like(param) for param in params]
        self.step_count = [torch.zeros((), device=param.device) for param in params]

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update at ``factor`` times the peak learning rate, from the gradients that stand in the parameters."""
        gradients = [_gradient(param) for param in self.params]
        adamw(
            self.params, gradients, self.exp_avg, self.exp_avg_sq, [], self.step_count, fused=True, amsgrad=False,
            maximize=False, lr=self.lr * factor, beta1=ADAMW_BETAS[0], beta2=ADAMW_BETAS[1], eps=ADAMW_EPS,
            weight_decay=0.0,
        )  # fmt: skip


class Optimizer:
    """Both optimizers of a model, stepped together; their state by parameter name.

    Args:
        model: its parameters are updated in place.
        config: peak learning rates, weight decay (of the matrices only), and the schedule.
    """

    def __init__(self, model: GPT, config: TrainConfig) -> None:
        self._config = config
        self._params = list(model.parameters())
        self._names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
        matrices: list[Tensor] = []
        for block in model.blocks:
            matrices += [block.attn.qkv.weight, block.attn.proj.weight, block.mlp.gate_up.weight, block.mlp.down.weight]
        self._muon = Muon(matrices, config.muon_lr, config.weight_decay)
        self._adamw = AdamW([param for param in self._params if param not in self._muon.momentum], config.adamw_lr)

    def reschedule(self, config: TrainConfig) -> None:
        """Follows the schedule of another config from here on; its peak rates and weight decay must be the same."""
        self._config = config

    def clip_gradients(self) -> float:
        """Scales the whole gradient down to norm ``grad_clip`` if it is longer; returns the norm it had."""
        limit = self._config.grad_clip or math.inf
        return nn.utils.clip_grad_norm_(self._params, limit).item()

    def step(self, step: int) -> None:
        """Applies the gradients at the learning rates of that step, then drops them.

        Raises:
            ValueError: a parameter has no gradient.
        """
        factor = learning_rate_factor(step, self._config)
        self._muon.step(factor)
        self._adamw.step(factor)
        for param in self._params:
            param.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """All that the next step depends on, besides the weights: "<parameter>/<what>" -> tensor."""
        return dict(self._state())

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over what `state_tensors` gave; copies it.

        Raises:
            ValueError: a tensor is missing, unknown, or of another shape.
        """
        left = dict(tensors)
        for name, value in self._state():
            value.copy_(_take(left, name, value.shape))
        if left:
            raise ValueError(f"unknown optimizer state {min(left)!r}")

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        for param, momentum in self._muon.momentum.items():
            yield f"{self._names[param]}/momentum", momentum
        adamw = self._adamw
        for param, *values in zip(adamw.params, adamw.step_count, adamw.exp_avg, adamw.exp_avg_sq, strict=True):
            for what, value in zip(("step", "exp_avg", "exp_avg_sq"), values, strict=True):
                yield f"{self._names[param]}/{what}", value


def _gradient(param: Tensor) -> Tensor:
    if param.grad is None:
        raise ValueError("every parameter needs a gradient before a step")
    return param.grad


def _block_shape(matrix: Tensor) -> tuple[int, int]:
    """Rows and columns of its blocks, which are no higher than wide."""
    rows, columns = matrix.shape
    return min(BLOCK_ROWS, rows, columns), columns


def _take(tensors: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    tensor = tensors.pop(name, None)
    if tensor is None or tensor.shape != shape:
        found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
        raise ValueError(f"optimizer state {name!r} {found}, expected {tuple(shape)}")
    return tensor
