"""Small approximations of a layer's experts, and how much of an expert's size each takes."""

from dataclasses import dataclass

import torch

RIDGE = 0.01
"""Of the mean second moment, added to each input's own, so that directions no token took are not left to chance."""


@dataclass(frozen=True)
class Weights:
    """A layer's experts: `gate_up` [N, 2I, hidden] (gate above up, as servers keep them), `down` [N, hidden, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both."""
        return self.gate_up, self.down

    @property
    def size(self) -> int:
        """Numbers of one expert."""
        return sum(one[0].numel() for one in self.pair)


@dataclass(frozen=True)
class Moments:
    """Roots of second moments of what experts read, lower triangles L with L @ L.T = E[x @ x.T]: `hidden` [N, hidden,
    hidden] or of the whole layer [hidden, hidden], `inner` [N, I, I] or [I, I].
    """

    hidden: torch.Tensor
    inner: torch.Tensor

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the inputs of `gate_up` and of `down`."""
        return self.hidden, self.inner


@dataclass(frozen=True)
class StandIns:
    """Approximations of all experts of a layer, as whole matrices, and what is loaded of them: `own` as a share of an
    expert's size for each one that is used, `common` as such a share once a layer and step where any is.
    """

    weights: Weights
    own: float
    common: float = 0.0


def root_moment(inputs: torch.Tensor) -> torch.Tensor:
    """The root of the second moment of `inputs` [rows, width], with a ridge: [width, width], a lower triangle."""
    width = inputs.shape[1]
    moment = inputs.T.double() @ inputs.double() / max(len(inputs), 1)
    ridge = RIDGE * moment.diagonal().mean().clamp(min=1e-12)
    return torch.linalg.cholesky(moment + ridge * torch.eye(width, dtype=torch.float64)).float()


def low_rank(weights: Weights, share: float, moments: Moments | None = None) -> StandIns:
    """Each matrix at the largest rank whose factors take at most `share` of an expert in all: the nearest in squared
    error, of the weights themselves or, with `moments` of each expert's inputs, of its outputs.
    """
    a_rank = sum(sum(one.shape[1:]) for one in weights.pair)
    rank = max(int(share * weights.size / a_rank), 1)
    roots = moments.pair if moments else (None, None)
    pair = [truncate(one, rank, root) for one, root in zip(weights.pair, roots, strict=True)]
    return StandIns(Weights(*pair), rank * a_rank / weights.size)


def truncate(matrices: torch.Tensor, rank: int, root: torch.Tensor | None = None) -> torch.Tensor:
    """[..., rows, columns] at a rank; with the `root` [..., columns, columns] of its inputs' moment, best for those."""
    left, values, right = torch.linalg.svd(matrices if root is None else matrices @ root, full_matrices=False)
    short = (left[..., :rank] * values[..., None, :rank]) @ right[..., :rank, :]
    return short if root is None else _divide(short, root)


def shared_basis(weights: Weights, share: float, moments: Moments | None = None) -> StandIns:
    """Each matrix as a core of its own between two bases of the layer, the best for all experts together; the cores
    take at most `share` of an expert. With `moments` of the layer's inputs, best for those.
    """
    rank = _core_rank(weights, share)
    roots = moments.pair if moments else (None, None)
    pair = [_project(one, rank, root) for one, root in zip(weights.pair, roots, strict=True)]
    own = sum(min(rank, one.shape[1]) * min(rank, one.shape[2]) for one in weights.pair)
    common = sum(rank * edge for one in weights.pair for edge in one.shape[1:] if rank < edge)
    return StandIns(Weights(*pair), own / weights.size, common / weights.size)


def _core_rank(weights: Weights, share: float) -> int:
    """The largest with which the cores take at most `share` of an expert, 1 at least."""

    def core(rank: int) -> int:
        return sum(min(rank, one.shape[1]) * min(rank, one.shape[2]) for one in weights.pair)

    widest = max(max(one.shape[1:]) for one in weights.pair)
    return max((rank for rank in range(1, widest + 1) if core(rank) <= share * weights.size), default=1)


def _project(matrices: torch.Tensor, rank: int, root: torch.Tensor | None) -> torch.Tensor:
    """[N, rows, columns] within the best `rank` common rows and columns."""
    whitened = matrices if root is None else matrices @ root
    left = _leading((whitened @ whitened.mT).sum(0), rank)
    right = _leading((whitened.mT @ whitened).sum(0), rank)
    short = left @ left.T @ whitened @ right @ right.T
    return short if root is None else _divide(short, root)


def _leading(gram: torch.Tensor, rank: int) -> torch.Tensor:
    """The eigenvectors of the largest eigenvalues: [width, rank]."""
    return torch.linalg.eigh(gram).eigenvectors[:, -rank:]


def _divide(matrices: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """`matrices` @ `root`^-1."""
    root = root.expand(*matrices.shape[:-2], *root.shape[-2:])
    return torch.linalg.solve_triangular(root, matrices, upper=False, left=False)
