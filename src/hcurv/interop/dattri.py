"""Influence functions with the exact Gauss-Newton matrix, as an attributor of dattri."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

from hcurv.damping import DampingLike
from hcurv.factorized import Factorized
from hcurv.losses import Loss
from hcurv.network.gauss_newton import GaussNewton

try:
    from dattri.algorithm.base import BaseInnerProductAttributor
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "hcurv.interop.dattri needs dattri: pip install 'hcurv[dattri]'", name=error.name
    ) from error

__all__ = ["GaussNewtonAttributor"]


class GaussNewtonAttributor(BaseInnerProductAttributor):
    """Scores ∇f_iᵀ (H + D)⁻¹ ∇m_q of training points i and test points q, (train, test).

    H is the exact Gauss-Newton matrix over the data of `cache`, once for each checkpoint; scores
    are averaged over checkpoints. Gradients are those of the task. If the loss is a mean,
    `hcurv.influence` gives the same scores divided by the number of training points, transposed,
    and without forming gradients of whole batches.

    Args:
        task: dattri's `AttributionTask`.
        loss: the loss of the task as a torch module or an `hcurv.losses.Loss`, because H cannot be
            read from the task's function. The model must take the first item of a batch as its
            input, and the loss the second one as its target.
        damping: D, positive, as for `GaussNewton.factorize`; dattri's ``regularization``.
        layer_name: names of parameters to take into account; None for all.
        device: where to compute.
        factorize_kwargs: passed on to `GaussNewton.factorize`, such as ``tolerance``.

    Examples:
        >>> from dattri.task import AttributionTask
        >>> from hcurv.interop.dattri import GaussNewtonAttributor
        >>> def f(parameters, batch):
        ...     outputs = torch.func.functional_call(model, parameters, batch[0])
        ...     return loss(outputs, batch[1].long())
        >>> data = torch.utils.data.TensorDataset(inputs, targets)
        >>> loader = torch.utils.data.DataLoader(data, batch_size=10)
        >>> task = AttributionTask(loss_func=f, model=model, checkpoints=model.state_dict())
        >>> attributor = GaussNewtonAttributor(task, loss, damping=0.1)
        >>> attributor.cache(loader)
        >>> attributor.attribute(loader, loader).shape
        torch.Size([20, 20])
    """

    def __init__(
        self,
        task: Any,
        loss: nn.Module | Loss,
        damping: DampingLike,
        layer_name: str | list[str] | None = None,
        device: str = "cpu",
        *,
        factorize_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(task, _in_order(task.model, layer_name), device)
        self._loss, self._damping = loss, damping
        self._factorize_kwargs = dict(factorize_kwargs or {})
        self._factorized: dict[int, Factorized] = {}

    def cache(self, full_train_dataloader: DataLoader[Any]) -> None:
        """Read H over all training data, for every checkpoint, and factorize it.

        Args:
            full_train_dataloader: batches (inputs, targets) of all training points.
        """
        super().cache(full_train_dataloader)
        data: Any = full_train_dataloader
        if not isinstance(full_train_dataloader.sampler, SequentialSampler):
            data = list(full_train_dataloader)  # it is read twice, and must not change
        for checkpoint in range(len(self.task.get_checkpoints())):
            matrix = GaussNewton(self._model(checkpoint), self._loss, data)
            self._factorized[checkpoint] = matrix.factorize(self._damping, **self._factorize_kwargs)

    def _model(self, checkpoint: int) -> nn.Module:
        """The model of a checkpoint, with gradients for the parameters that are asked for."""
        self.task._load_checkpoints(checkpoint)
        model: nn.Module = copy.deepcopy(self.task.model).to(self.device)
        if self.layer_name is not None:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in self.layer_name)
        return model

    def _solved(self, checkpoint: int, gradients: Tensor) -> Tensor:
        """(H + D)⁻¹ times each row."""
        if checkpoint not in self._factorized:
            self.cache(self.full_train_dataloader)
        factorized = self._factorized[checkpoint]
        columns = gradients.detach().T.to(factorized.device, factorized.dtype)
        with torch.no_grad():
            return factorized.solve(columns.contiguous()).T.to(gradients)

    def transform_test_rep(self, ckpt_idx: int, test_rep: Tensor) -> Tensor:
        """(H + D)⁻¹ times the gradient of each test point."""
        return self._solved(ckpt_idx, test_rep)

    def _compute_denom(
        self,
        ckpt_idx: int,
        train_batch_rep: Tensor,
        test_batch_rep: Tensor | None = None,
        relatif_method: str | None = None,
    ) -> Tensor:
        if relatif_method == "l":
            assert test_batch_rep is not None
            own = self._solved(ckpt_idx, test_batch_rep)
            return (test_batch_rep * own).sum(1).clamp(min=0.0).sqrt()
        if relatif_method == "theta":
            return torch.linalg.vector_norm(self._solved(ckpt_idx, train_batch_rep), dim=1)
        raise ValueError(f'relatif_method must be "l", "theta" or None; got {relatif_method!r}')


def _in_order(model: nn.Module, names: str | list[str] | None) -> list[str] | None:
    """The names of parameters in the order of the model, which is that of H."""
    if names is None:
        return None
    wanted = {names} if isinstance(names, str) else set(names)
    known = [name for name, _ in model.named_parameters()]
    if unknown := wanted - set(known):
        raise ValueError(f"the model has no parameters {sorted(unknown)}; it has {known}")
    return [name for name in known if name in wanted]
