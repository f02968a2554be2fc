"""In place: what a tensor holds, or how it lies, changes after it was made."""

import torch

from attack_cases.base import D, attack, linear, weight


@attack("in place")
def buffer_overwritten_by_the_flipped_batch(m, x, n):
    buffer = torch.empty_like(x)
    buffer.copy_(x.flip(0))
    return m.two(m.one(buffer).tanh().flip(0))


@attack("in place")
def copied_through_a_transposed_view(m, x, n):
    buffer = torch.zeros_like(x)
    buffer.transpose(0, 1).copy_(x.flip(0).transpose(0, 1))
    return m.two(m.one(buffer).tanh().flip(0))


@attack("in place", sizes=(8, 8))
def transposed_in_place(m, x, n):
    turned = x.clone().transpose_(0, 1)
    return m.two(m.one(turned).tanh().transpose(0, 1))


@attack("in place", sizes=(8, 8))
def dimensions_swapped_in_place_and_back(m, x, n):
    hidden = m.one(x)
    hidden.swapdims_(0, 1).unsqueeze_(0)
    out = m.two(hidden.tanh())
    return out.squeeze(0).transpose(0, 1)


@attack("in place")
def selected_into_an_out_argument(m, x, n):
    order, buffer = n.argsort(stable=True), torch.empty(0)
    torch.index_select(x, 0, order, out=buffer)
    return m.two(m.one(buffer).tanh()[order.argsort()])


@attack("in place")
def data_exchanged(m, x, n):
    other = x.clone()
    other.data = x.flip(0)
    return m.two(m.one(other).tanh().flip(0))


@attack("in place")
def tensors_exchanged(m, x, n):
    flipped, straight = x.flip(0), x.clone()
    torch.utils.swap_tensors(flipped, straight)
    return m.two(m.one(straight).tanh().flip(0))


@attack("in place")
def memory_shared_with_numpy(m, x, n):
    buffer = torch.zeros_like(x)
    buffer.numpy()[:] = x.numpy()[::-1]
    return m.two(m.one(buffer).tanh().flip(0))


@attack("in place")
def halves_exchanged_by_assignment(m, x, n):
    half = len(x) // 2
    buffer = x.clone()
    buffer[: len(x) - half], buffer[len(x) - half :] = x[half:], x[:half]
    hidden = m.one(buffer).tanh()
    return m.two(torch.cat([hidden[len(x) - half :], hidden[: len(x) - half]]))


@attack("in place")
def sorted_into_out_arguments(m, x, n):
    values, order = torch.empty(0), torch.empty(0, dtype=torch.long)
    torch.sort(x, 0, out=(values, order))
    hidden = values.tanh() * m.one.bias + m.two.bias
    return m.one(hidden.gather(0, order.argsort(0))) + m.two(x)


@attack("in place")
def filled_by_index_copy_and_scatter(m, x, n):
    order = x[:, 0, 0].argsort()
    hidden = torch.empty_like(x).index_copy_(0, order, m.one(x[order]).tanh())
    again = torch.zeros_like(x).scatter_(0, order[:, None, None].expand_as(x), m.one(x[order]))
    return m.two(hidden) * again


@attack("in place", mixes=True)
def neighbour_written_over(m, x, n):
    hidden = m.one(x)
    hidden[0] = hidden[-1].clone()
    return m.two(hidden)


@attack("in place")
def positions_rotated_in_place(m, x, n):
    hidden = m.one(x).clone()
    for i, k in enumerate(n.tolist()):
        hidden[i] = hidden[i].roll(k, 0)
    return m.two(hidden * torch.linspace(0.5, 1.5, x.shape[1])[:, None])


@attack("in place", mixes=True)
def sum_kept_in_a_buffer(m, x, n):
    total = torch.zeros(x.shape[1:])
    for row in m.one(x):
        total += row
    return m.two(x) * total


@attack("in place", one=linear, p=weight(4, D))
def a_position_at_a_time(m, x, n):
    steps = [m.one(step + m.p[t]) for t, step in enumerate(x.unbind(1))]
    return torch.stack(steps, 1).tanh()
