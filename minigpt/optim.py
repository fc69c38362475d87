"""The update of the weights: Muon for the matrices inside the blocks, AdamW for the rest, one schedule for both."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from minigpt.config import TrainConfig
from minigpt.model import GPT

# Averages over about 20 steps, with Nesterov's look ahead, and a quintic as steep at zero as keeps its iterates near
# one (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks").
MUON_MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
# A second moment that averages over about 20 steps: in a run of minutes, gradients change fast.
ADAMW_BETAS = (0.9, 0.95)


def learning_rate_factor(step: int, config: TrainConfig) -> float:
    """What the peak learning rates are multiplied by at a step (from 0): warm-up, constant, linear fall to zero."""
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    remaining = 1 - step / config.steps
    decay = min(1.0, remaining / config.decay_fraction) if config.decay_fraction else 1.0
    return warmup * decay


def orthogonalise(matrices: Tensor) -> Tensor:
    """Keeps the directions of matrices and makes their singular values about equal: U S V^T to about U V^T.

    "About": those above a hundredth of the norm end between 0.6 and 1.3, smaller ones below, which is near enough.

    Args:
        matrices: (N, rows, columns) with rows <= columns; not changed. The dtype is kept: bfloat16, the usual choice
            on GPUs, is ten times slower than float32 on a processor without instructions for it.

    Source:
        The iteration X <- a X + (b A + c A^2) X with A = X X^T of Jordan et al. 2024, "Muon".
    """
    a, b, c = NEWTON_SCHULZ
    X: Tensor = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


class Muon:
    """Momentum whose step is orthogonalised, so that every direction of a matrix moves by the same amount.

    The update is that of ``torch.optim.Muon`` (decoupled weight decay, rate times sqrt(max(1, rows / columns))), but
    in the dtype of the weights, and for all matrices of one shape at once.

    Args:
        params: (parameter, n): n matrices of equal shape, stacked along the rows of a fused parameter, each of which
            is orthogonalised by itself.
        lr: peak learning rate.
        weight_decay: share of a weight that is lost in a step at a learning rate of 1.
    """

    def __init__(self, params: Sequence[tuple[Tensor, int]], lr: float, weight_decay: float) -> None:
        self.lr = lr
        self.weight_decay = weight_decay
        self.momentum = {param: torch.zeros_like(param) for param, _ in params}
        self._groups: dict[tuple[int, int], list[tuple[Tensor, int]]] = defaultdict(list)
        for param, n in params:
            rows, columns = param.shape[0] // n, param.shape[1]
            # A tall matrix is worked on as its transpose.
            self._groups[min(rows, columns), max(rows, columns)].append((param, n))

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update at ``factor`` times the peak learning rate, from the gradients that stand in the parameters."""
        lr = self.lr * factor
        for group in self._groups.values():
            momenta = [self.momentum[param] for param, _ in group]
            grads = [_gradient(param) for param, _ in group]
            torch._foreach_lerp_(momenta, grads, 1 - MUON_MOMENTUM)
            ahead = torch._foreach_lerp(grads, momenta, MUON_MOMENTUM)
            updates = [part for (_, n), fused in zip(group, ahead, strict=True) for part in fused.chunk(n)]
            weights = [part for param, n in group for part in param.chunk(n)]
            orthogonal = orthogonalise(torch.stack([_wide(update) for update in updates]))
            for weight, update in zip(weights, orthogonal, strict=True):
                rows, columns = weight.shape
                weight.mul_(1 - lr * self.weight_decay)
                weight.add_(update if rows <= columns else update.mT, alpha=-lr * math.sqrt(max(1.0, rows / columns)))


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
        matrices: list[tuple[Tensor, int]] = []
        for block in model.blocks:
            matrices += [
                (block.attn.qkv.weight, 3),
                (block.attn.proj.weight, 1),
                (block.mlp.gate_up.weight, 2),
                (block.mlp.down.weight, 1),
            ]
        self._muon = Muon(matrices, config.muon_lr, config.weight_decay)
        rest = [param for param in self._params if param not in self._muon.momentum]
        # The schedule multiplies this rate, which torch reads from its parameter group.
        self._adamw = torch.optim.AdamW(rest, lr=config.adamw_lr, betas=ADAMW_BETAS, weight_decay=0.0, fused=True)

    def reschedule(self, config: TrainConfig) -> None:
        """Follows the schedule of another number of steps from here on; nothing else of the config may differ."""
        self._config = config

    def clip_gradients(self) -> float:
        """Scales the whole gradient down to norm ``grad_clip`` if it is longer; returns the norm it had."""
        limit = self._config.grad_clip or math.inf
        return nn.utils.clip_grad_norm_(self._params, limit).item()

    def step(self, step: int) -> None:
        """Applies the gradients at the learning rates of that step, then drops them."""
        factor = learning_rate_factor(step, self._config)
        self._muon.step(factor)
        self._adamw.param_groups[0]["lr"] = self._config.adamw_lr * factor
        self._adamw.step()
        for param in self._params:
            param.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """All that the next step depends on, besides the weights: "<parameter>/<what>" -> tensor."""
        tensors = {f"{self._names[param]}/momentum": value for param, value in self._muon.momentum.items()}
        for param, state in self._adamw.state.items():
            tensors |= {f"{self._names[param]}/{what}": value for what, value in state.items()}
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over what `state_tensors` gave; copies it.

        Raises:
            ValueError: a tensor is missing, unknown, or of another shape.
        """
        left = dict(tensors)
        stepped = any(name.endswith("/step") for name in left)
        for param, momentum in self._muon.momentum.items():
            momentum.copy_(_take(left, f"{self._names[param]}/momentum", momentum.shape))
        for param in self._adamw.param_groups[0]["params"]:
            name = self._names[param]
            # Before the first step AdamW has no state at all.
            if stepped:
                self._adamw.state[param] = {
                    "step": _take(left, f"{name}/step", torch.Size()).clone(),
                    "exp_avg": _take(left, f"{name}/exp_avg", param.shape).to(param.device, copy=True),
                    "exp_avg_sq": _take(left, f"{name}/exp_avg_sq", param.shape).to(param.device, copy=True),
                }
        if left:
            raise ValueError(f"unknown optimizer state {min(left)!r}")


def _gradient(param: Tensor) -> Tensor:
    if param.grad is None:
        raise ValueError("every parameter needs a gradient before a step")
    return param.grad


def _wide(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def _take(tensors: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    tensor = tensors.pop(name, None)
    if tensor is None or tensor.shape != shape:
        found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
        raise ValueError(f"optimizer state {name!r} {found}, expected {tuple(shape)}")
    return tensor
