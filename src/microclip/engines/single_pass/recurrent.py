"""Recurrent layers, step by step: a fused kernel would hide how their parameters are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from microclip.engines.base import CannotFuseError
from microclip.engines.single_pass.owners import Owned
from microclip.engines.single_pass.recorder import Recorder
from microclip.engines.single_pass.torch_functions import Handler

State = tuple[Tensor, ...]  # (h,), or (h, c) of an LSTM
Step = Callable[[Tensor, Tensor, State], State]  # of the two products and the state


def _lstm_step(x: Tensor, h: Tensor, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_step(x: Tensor, h: Tensor, state: State) -> State:
    (rx, zx, nx), (rh, zh, nh) = x.chunk(3, -1), h.chunk(3, -1)
    z, n = (zx + zh).sigmoid(), (nx + (rx + rh).sigmoid() * nh).tanh()
    return ((1 - z) * n + z * state[0],)


def _rnn_step(activation: Any) -> Step:
    return lambda x, h, state: (activation(x + h),)


class _Layer:
    """One direction of one layer."""

    def __init__(self, recorder: Recorder, step: Step, weights: Sequence[Tensor | None]) -> None:
        self.recorder, self.step = recorder, step
        self.w_ih, self.w_hh, self.b_ih, self.b_hh, self.w_hr = weights

    def run(self, inputs: Sequence[Tensor], state: State, backwards: bool) -> Any:
        """Run over all times; later times may have fewer rows, as the last sequences end."""
        sizes = [len(x) for x in inputs]
        starts = list(range(len(inputs)))
        outputs: list[Tensor] = [inputs[0]] * len(inputs)
        products = self._products(inputs)
        ended: list[State] = []  # those with the most rows last
        if backwards:
            starts.reverse()
            rest, state = state, tuple(part[: sizes[-1]] for part in state)
            for time in starts:
                more = sizes[time] - len(state[0])
                if more:
                    at = len(state[0])
                    rows = inputs[time][at : at + more]
                    fresh = tuple(self._alike(part[at : at + more], rows) for part in rest)
                    state = tuple(torch.cat(pair) for pair in zip(state, fresh, strict=True))
                state = self._step(products[time], state, inputs[time])
                outputs[time] = state[0]
            return outputs, state
        for time in starts:
            gone = len(state[0]) - sizes[time]
            if gone:
                ended.append(tuple(part[sizes[time] :] for part in state))
                state = tuple(part[: sizes[time]] for part in state)
            state = self._step(products[time], state, inputs[time])
            outputs[time] = state[0]
        for earlier in reversed(ended):
            state = tuple(torch.cat(pair) for pair in zip(state, earlier, strict=True))
        return outputs, state

    def _products(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Multiply the inputs of all times at once."""
        sizes = [len(x) for x in inputs]
        assert self.w_ih is not None
        if len(set(sizes)) == 1:
            return list(F.linear(torch.stack(list(inputs), 1), self.w_ih, self.b_ih).unbind(1))
        together = F.linear(torch.cat(list(inputs)), self.w_ih, self.b_ih)
        return list(torch.split(together, sizes))

    def _alike(self, part: Tensor, x: Tensor) -> Tensor:
        """Give a constant state the owners of the rows it belongs to."""
        owner = self.recorder.state(x)
        known = self.recorder.state(part) is not None or self.recorder.is_recorded(part)
        if known or not isinstance(owner, Owned) or len(part) != len(x):
            return part
        return self.recorder.adopt_as(part, self.recorder.owned(x, None))

    def _step(self, product: Tensor, state: State, x: Tensor) -> State:
        state = tuple(self._alike(part, x) for part in state)
        assert self.w_hh is not None
        found = self.step(product, F.linear(state[0], self.w_hh, self.b_hh), state)
        if self.w_hr is not None:
            found = (F.linear(found[0], self.w_hr), *found[1:])
        return found


def _run(
    recorder: Recorder,
    step: Step,
    times: Sequence[Tensor],
    hidden: State,
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
) -> tuple[list[Tensor], State]:
    """Run all layers over inputs given time by time; hidden states are (layers, rows, width)."""
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    finals: list[State] = []
    for layer in range(layers):
        found = []
        for direction in range(directions):
            number = layer * directions + direction
            mine: list[Tensor | None] = list(weights[number * each : (number + 1) * each])
            if not biases:
                mine[2:2] = [None, None]
            mine += [None] * (5 - len(mine))
            start = tuple(part[number] for part in hidden)
            part = _Layer(recorder, step, mine)
            outputs, final = part.run(times, start, direction == 1)
            found.append(outputs)
            finals.append(final)
        times = (
            [torch.cat(pair, -1) for pair in zip(*found, strict=True)]
            if directions > 1
            else found[0]
        )
        if dropout and training and layer + 1 < layers:
            times = [F.dropout(x, dropout) for x in times]
    return list(times), tuple(torch.stack(parts) for parts in zip(*finals, strict=True))


def _recurrent(step: Step, original: Any, is_lstm: bool) -> Handler:
    """Return the handler of one kind of layer, for padded and for packed sequences."""

    def handler(recorder: Recorder, *args: Any) -> Any:
        packed = isinstance(args[1], Tensor) and isinstance(args[3], list | tuple)
        if not recorder.any_depends(args[0]):
            if recorder.any_depends(*args[1:]):
                raise CannotFuseError(
                    "The single-pass engine does not support a recurrent layer whose input does "
                    f"not depend on the examples, with parameter {recorder.first_name(args)!r}."
                )
            return recorder.derive(original, args, {})
        if packed:
            data, sizes, hidden, weights, *options = args
            times = None
        else:
            data, hidden, weights, *options = args
        biases, layers, dropout, training, bidirectional = options[:5]
        states = tuple(hidden) if is_lstm else (hidden,)
        with recorder:
            if packed:
                times = list(data.split(sizes.tolist()))
            else:
                batch_first = options[5]
                times = list(data.unbind(1 if batch_first else 0))
            outputs, finals = _run(
                recorder, step, times, states, weights, biases, layers, dropout, training,
                bidirectional,
            )  # fmt: skip
            time = 1 if not packed and options[5] else 0
            output = torch.cat(outputs) if packed else torch.stack(outputs, time)
        return (output, *finals)

    return handler


lstm = _recurrent(_lstm_step, torch.lstm, True)
gru = _recurrent(_gru_step, torch.gru, False)
rnn_tanh = _recurrent(_rnn_step(torch.tanh), torch.rnn_tanh, False)
rnn_relu = _recurrent(_rnn_step(torch.relu), torch.rnn_relu, False)


def _cell(
    recorder: Recorder, step: Step, x: Tensor, state: State, weights: Sequence[Tensor | None]
) -> State:
    with recorder:
        layer = _Layer(recorder, step, [*weights, None])
        state = tuple(layer._alike(part, x) for part in state)
        return layer._step(F.linear(x, weights[0], weights[2]), state, x)  # type: ignore[arg-type]


def lstm_cell(
    recorder: Recorder, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor,
    b_ih: Tensor | None = None, b_hh: Tensor | None = None,
) -> Any:  # fmt: skip
    """torch.lstm_cell."""
    return _cell(recorder, _lstm_step, input, tuple(hx), (w_ih, w_hh, b_ih, b_hh))


def gru_cell(
    recorder: Recorder, input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor,
    b_ih: Tensor | None = None, b_hh: Tensor | None = None,
) -> Any:  # fmt: skip
    """torch.gru_cell."""
    return _cell(recorder, _gru_step, input, (hx,), (w_ih, w_hh, b_ih, b_hh))[0]


def rnn_cell(activation: Any) -> Handler:
    """Return the handler of torch.rnn_tanh_cell or torch.rnn_relu_cell."""
    step = _rnn_step(activation)

    def handler(
        recorder: Recorder, input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor,
        b_ih: Tensor | None = None, b_hh: Tensor | None = None,
    ) -> Any:  # fmt: skip
        return _cell(recorder, step, input, (hx,), (w_ih, w_hh, b_ih, b_hh))[0]

    return handler
