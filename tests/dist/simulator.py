"""Eq. 3 and 5 written out for one process with dense matrices: what the ranks together must compute.

Every layer keeps its inputs and the gradients of its three slots; ages pick among them. No part of the engine is used.
"""

import torch
import torch.nn.functional as F
from torch_geometric.nn import GCNConv, GINConv, SAGEConv


def matrix(conv, edge_index, n):
    """(A, d): the layer gathers A h and takes d * h of the node itself."""
    ones = torch.ones(edge_index.size(1), dtype=torch.float64)
    A = torch.zeros(n, n, dtype=torch.float64).index_put((edge_index[1], edge_index[0]), ones, accumulate=True)
    if isinstance(conv, SAGEConv):
        return A / A.sum(1, keepdim=True).clamp(min=1), None
    if isinstance(conv, GINConv):
        return A, None
    A = A - torch.diag(A.diagonal())
    scale = (A.sum(1) + 1).rsqrt()
    return scale[:, None] * A * scale, scale.square()


def neural(conv, gathered, own, loop):
    if isinstance(conv, SAGEConv):
        return conv.lin_l(gathered) + conv.lin_r(own)
    if isinstance(conv, GINConv):
        return conv.nn(gathered + (1 + conv.eps) * own)
    assert isinstance(conv, GCNConv)
    return conv.lin(gathered + loop[:, None] * own) + conv.bias


def simulate(model, data, owner, staleness, steps, optimizer):
    """Losses and gradients, step by step."""
    n, convs = data.num_nodes, list(model.convs)
    same = (owner[:, None] == owner[None, :]).double()
    inputs, local_grads, remote_grads = [], [], []  # [step][layer]
    losses, gradients = [], []
    weights = list(model.parameters())

    def pick(history, layer, bound, direction):
        now = history[-1]
        reach = [a for a in range(1, bound.layers + 1) if layer + direction * (a - 1) in now]
        fits = [a for a in reach if inputs[-1][layer + direction * (a - 1)].shape == inputs[-1][layer].shape]
        back = min(bound.steps, len(history) - 1)
        return history[-1 - back][layer + direction * (max(fits) - 1)]

    for _ in range(steps):
        optimizer.zero_grad()
        inputs.append({})
        local_grads.append({})
        remote_grads.append({})
        h, outs, slots = data.x, {}, {}
        for layer, conv in enumerate(convs, 1):
            inputs[-1][layer] = h
            own = pick(inputs, layer, staleness.own, -1).clone().requires_grad_()
            local = pick(inputs, layer, staleness.local, -1).clone().requires_grad_()
            remote = pick(inputs, layer, staleness.remote, -1).clone().requires_grad_()
            A, loop = matrix(conv, data.edge_index, n)
            outs[layer] = neural(conv, (A * same) @ local + (A * (1 - same)) @ remote, own, loop)
            slots[layer] = own, local, remote
            h = F.relu(outs[layer]).detach()
        top = outs[len(convs)]
        loss = F.cross_entropy(top[data.train_mask], data.y[data.train_mask])
        (grad,) = torch.autograd.grad(loss, top, retain_graph=True)
        summed = [torch.zeros_like(w) for w in weights]
        for layer in range(len(convs), 0, -1):
            found = torch.autograd.grad(outs[layer], [*slots[layer], *weights], grad, allow_unused=True)
            own, local_grads[-1][layer], remote_grads[-1][layer] = found[:3]
            summed = [s if g is None else s + g for s, g in zip(summed, found[3:], strict=True)]
            if layer > 1:
                grad = own + pick(local_grads, layer, staleness.local_gradient, 1)
                grad = grad + pick(remote_grads, layer, staleness.remote_gradient, 1)
                grad = grad * (outs[layer - 1] > 0)
        for weight, total in zip(weights, summed, strict=True):
            weight.grad = total
        losses.append(float(loss.detach()))
        gradients.append(torch.cat([total.reshape(-1) for total in summed]))
        optimizer.step()
    return losses, gradients
