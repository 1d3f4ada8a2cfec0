"""
The policies' hot loops, compiled: the decoder, drawing groups, their gradients, sums, paths.

Arrays in, arrays out, no classes; the decoder's are float32 and contiguous.
`placewright.policies.seq2seq` says what it computes; its plain PyTorch form is in the tests, which
hold the two equal. Results do not depend on the number of threads.

Letters: ``M`` groupings, ``B`` samples (the same number for each grouping), ``G`` groups (of the
grouping that has most; what lies past a grouping's own number is left alone), ``D`` devices, ``H``
hidden size, ``R`` sequences.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from placewright._compiling import kept

F = np.float32

SLICES = 8
"""Into how many parts sums over steps are taken apart, at least; each part has one thread."""


@njit(fastmath=True, error_model="numpy", inline="always")
def _tanh(x):
    """Lambert's continued fraction, cut after eleven terms: within 5e-6, and it vectorises."""
    x = min(max(x, F(-7.5)), F(7.5))
    s = x * x
    top = F(2837835.0) + s * (F(25740.0) + s * F(55.0))
    top = x * (F(654729075.0) + s * (F(91891800.0) + s * top))
    bottom = F(18918900.0) + s * (F(315315.0) + s * (F(1485.0) + s))
    return top / (F(654729075.0) + s * (F(310134825.0) + s * bottom))


@njit(fastmath=True, error_model="numpy", inline="always")
def _sigmoid(x):
    return F(0.5) + F(0.5) * _tanh(F(0.5) * x)


@njit(fastmath=True, error_model="numpy")
def _add_product(x, weights, out):
    """Add ``x @ weights`` to `out`, four rows of weights at a time."""
    rows, columns = weights.shape
    i = 0
    while i + 4 <= rows:
        a, b, c, d = x[i], x[i + 1], x[i + 2], x[i + 3]
        for j in range(columns):
            out[j] += (
                a * weights[i, j]
                + b * weights[i + 1, j]
                + c * weights[i + 2, j]
                + d * weights[i + 3, j]
            )
        i += 4
    while i < rows:
        a = x[i]
        for j in range(columns):
            out[j] += a * weights[i, j]
        i += 1


@njit(fastmath=True, error_model="numpy")
def _add_transposed(weights, x, out):
    """Add ``weights @ x`` to `out`."""
    rows, columns = weights.shape
    for i in range(rows):
        total = F(0)
        for j in range(columns):
            total += weights[i, j] * x[j]
        out[i] += total


@njit(fastmath=True, error_model="numpy")
def _cell(gates, before, after, hidden):
    """Turn gates (input, forget, new, output) into what they let through; step the LSTM."""
    size = len(hidden)
    for h in range(size):
        gates[h] = _sigmoid(gates[h])
        gates[size + h] = _sigmoid(gates[size + h])
        gates[2 * size + h] = _tanh(gates[2 * size + h])
        gates[3 * size + h] = _sigmoid(gates[3 * size + h])
        after[h] = gates[size + h] * before[h] + gates[h] * gates[2 * size + h]
        hidden[h] = gates[3 * size + h] * _tanh(after[h])


@njit(fastmath=True, error_model="numpy")
def _attend(keys, query, weight, attention, context):
    """Attend: scores ``weight . tanh(keys + query)``, their softmax, and the mean of the keys."""
    count, size = keys.shape
    top = F(-1e30)
    for j in range(count):
        total = F(0)
        for h in range(size):
            total += weight[h] * _tanh(keys[j, h] + query[h])
        attention[j] = total
        top = max(top, total)
    total = F(0)
    for j in range(count):
        attention[j] = np.exp(attention[j] - top)
        total += attention[j]
    for j in range(count):
        attention[j] /= total
    _add_product(attention, keys, context)


@njit(error_model="numpy")
def _choose(scores, temperature, constant, noise, rate, legal, uniform, added):
    """Shape the scores and draw a device; `added` is the noise that took part."""
    count = len(scores)
    power = F(0)
    logits = np.empty(count, dtype=np.float32)
    for d in range(count):
        logits[d] = scores[d] / temperature
        if constant > 0:
            logits[d] = constant * np.tanh(logits[d])
        power += logits[d] * logits[d]
    spread = rate * np.sqrt(power / count)
    top = F(-1e30)
    for d in range(count):
        if rate > 0:
            added[d] = spread * noise[d]
            logits[d] += added[d]
        if legal[d]:
            top = max(top, logits[d])
    total = F(0)
    for d in range(count):
        logits[d] = np.exp(logits[d] - top) if legal[d] else F(0)
        total += logits[d]
    left = uniform * total
    chosen = -1
    for d in range(count):
        if legal[d]:
            chosen = d
            left -= logits[d]
            if left < 0:
                break
    return chosen


@njit(error_model="numpy")
def _mark_legal(legal, allowed, needs, used, capacity, twin_of, is_taken):
    """
    Allow the devices with room; if none has, the one with most room; else what is allowed.

    Of equal devices one is allowed only after the one before it was taken.
    """
    is_any = False
    roomiest = -1
    for d in range(len(legal)):
        is_turn = twin_of[d] < 0 or is_taken[twin_of[d]]
        legal[d] = allowed[d] and is_turn and used[d] + needs <= capacity[d]
        is_any = is_any or legal[d]
        if allowed[d] and (
            roomiest < 0 or capacity[d] - used[d] > capacity[roomiest] - used[roomiest]
        ):
            roomiest = d
    if not is_any:
        if roomiest >= 0:
            legal[roomiest] = True
        else:
            legal[:] = True


@njit(error_model="numpy")
def _decode_one(
    steps,
    keys,
    group_gates,
    device_gates,
    recurrent,
    state,
    to_query,
    weight,
    to_scores,
    uniform,
    temperature,
    constant,
    noise,
    rate,
    allowed,
    lean,
    follow,
    needs,
    capacity,
    twin_of,
    forced,
    devices,
    scores,
    legal,
    added,
    hidden,
    cells,
    gates,
    queries,
    attention,
    context,
):
    """Decode one sample: `decode` for one of its rows."""
    used = np.zeros(len(capacity))
    is_taken = np.zeros(len(capacity), dtype=np.bool_)
    h, c = state[0], state[1]
    size = len(h)
    before = len(capacity)
    for t in range(steps):
        gates[t] = group_gates[t] + device_gates[before]
        _add_product(h, recurrent, gates[t])
        _cell(gates[t], c, cells[t], hidden[t])
        h, c = hidden[t], cells[t]
        queries[t] = F(0)
        _add_product(h, to_query, queries[t])
        _attend(keys[:steps], queries[t], weight, attention[t, :steps], context[t])
        scores[t] = lean[t]
        if t > 0:
            scores[t, before] += follow
        _add_product(h, to_scores[:size], scores[t])
        _add_product(context[t], to_scores[size:], scores[t])
        _mark_legal(legal[t], allowed[t], needs[t], used, capacity, twin_of, is_taken)
        before = _choose(
            scores[t], temperature, constant, noise[t], rate, legal[t], uniform[t], added[t]
        )
        if forced[t] >= 0:
            before = forced[t]
            legal[t, before] = True
        devices[t] = before
        used[before] += needs[t]
        is_taken[before] = True


@kept(parallel=True, error_model="numpy")
def decode(
    lengths,  # [M] groups
    keys,  # [M, G, H]
    group_gates,  # [M, G, 4H] what the group being placed adds to the gates
    device_gates,  # [D + 1, 4H] what the device chosen before adds; the last row begins
    recurrent,  # [H, 4H]
    state,  # [M, 2, H] hidden and cell to begin with
    to_query,  # [H, H]
    weight,  # [H]
    to_scores,  # [2H, D]
    uniform,  # [B, G]
    temperature,
    constant,  # of the tanh; 0 for none
    noise,  # [B, G, D] standard normal; [1, G, D] if `rate` is 0
    rate,
    allowed,  # [M, G, D]
    lean,  # [M, G, D] added to the scores
    follow,  # [M] added to the score of the device chosen before
    needs,  # [M, G] bytes
    capacity,  # [D] bytes
    twin_of,  # [D] the equal device before it, -1 for none
    forced,  # [B, G] the devices to choose, or [1, G] of -1 to draw them
    devices,  # out [B, G]
    scores,  # out [B, G, D]
    legal,  # out [B, G, D]
    added,  # out [B, G, D] noise; as long as `noise`
    hidden,  # out [B, G, H]
    cells,  # out [B, G, H]
    gates,  # out [B, G, 4H] after their non-linearities
    queries,  # out [B, G, H]
    attention,  # out [B, G, G]
    context,  # out [B, G, H], zero when called
):
    each = len(devices) // len(keys)
    for row in prange(len(devices)):
        b = np.int64(row)
        m, k = b // each, b % len(noise)
        _decode_one(
            lengths[m],
            keys[m],
            group_gates[m],
            device_gates,
            recurrent,
            state[m],
            to_query,
            weight,
            to_scores,
            uniform[b],
            temperature,
            constant,
            noise[k],
            rate,
            allowed[m],
            lean[m],
            follow[m],
            needs[m],
            capacity,
            twin_of,
            forced[b % len(forced)],
            devices[b],
            scores[b],
            legal[b],
            added[k],
            hidden[b],
            cells[b],
            gates[b],
            queries[b],
            attention[b],
            context[b],
        )


@kept(parallel=True, fastmath=True, error_model="numpy")
def attention_gradients(
    lengths,  # [M] groups
    keys,  # [M, G, H]
    queries,  # [B, G, H]
    weight,  # [H]
    slopes,  # [B, G, G] gradient by the scores of attention
    key_slopes,  # out [P, G, H], P a multiple of M, zero when called: to be summed
    query_slopes,  # out [B, G, H], zero when called
    weight_slopes,  # out [P, H], zero when called: to be summed
):
    num_parts = len(key_slopes)
    size = keys.shape[2]
    each = len(queries) // len(keys)
    slices = num_parts // len(keys)
    for p in prange(num_parts):
        m, part = p // slices, p % slices
        steps = lengths[m]
        by_key, by_weight = key_slopes[p], weight_slopes[p]
        for row in range(part * each * steps // slices, (part + 1) * each * steps // slices):
            b, t = m * each + row // steps, row % steps
            query, by_query = queries[b, t], query_slopes[b, t]
            for j in range(steps):
                slope = slopes[b, t, j]
                for h in range(size):
                    y = _tanh(keys[m, j, h] + query[h])
                    inner = slope * weight[h] * (F(1) - y * y)
                    by_key[j, h] += inner
                    by_query[h] += inner
                    by_weight[h] += slope * y


@kept(parallel=True, error_model="numpy")
def unroll(
    lengths,  # [R] steps
    inputs,  # [R, G, 4H] what the inputs add to the gates
    recurrent,  # [n, H, 4H] weights of the first R / n sequences, the next R / n, ...
    hidden,  # out [R, G, H]
    cells,  # out [R, G, H]
    gates,  # out [R, G, 4H] after their non-linearities
):
    each = len(inputs) // len(recurrent)
    for row in prange(len(inputs)):
        r = np.int64(row)
        weights = recurrent[r // each]
        h = np.zeros(len(weights), dtype=np.float32)
        c = np.zeros(len(weights), dtype=np.float32)
        for t in range(lengths[r]):
            gates[r, t] = inputs[r, t]
            _add_product(h, weights, gates[r, t])
            _cell(gates[r, t], c, cells[r, t], hidden[r, t])
            h, c = hidden[r, t], cells[r, t]


@kept(parallel=True, fastmath=True, error_model="numpy")
def unroll_back(
    lengths,  # [R] steps
    recurrent,  # [n, H, 4H] weights of the first R / n sequences, the next R / n, ...
    first_cells,  # [R, H]
    cells,  # [R, G, H]
    gates,  # [R, G, 4H] after their non-linearities
    hidden_slopes,  # [R, G, H] gradient by the hidden states, from everything but the next step
    gate_slopes,  # out [R, G, 4H] gradient before the non-linearities, zero when called
    hidden_slope,  # out [R, H] gradient by the first hidden state
    cell_slope,  # in [R, H] gradient by the last cells; out: by the first ones
):
    size = cells.shape[2]
    each = len(cells) // len(recurrent)
    for row in prange(len(cells)):
        r = np.int64(row)
        weights = recurrent[r // each]
        by_hidden, by_cell = hidden_slope[r], cell_slope[r]
        by_hidden[:] = F(0)
        for t in range(lengths[r] - 1, -1, -1):
            gate, slope = gates[r, t], gate_slopes[r, t]
            before = cells[r, t - 1] if t > 0 else first_cells[r]
            for h in range(size):
                i, f, n, o = gate[h], gate[size + h], gate[2 * size + h], gate[3 * size + h]
                y = _tanh(cells[r, t, h])
                up = by_hidden[h] + hidden_slopes[r, t, h]
                cell = by_cell[h] + up * o * (F(1) - y * y)
                slope[h] = cell * n * i * (F(1) - i)
                slope[size + h] = cell * before[h] * f * (F(1) - f)
                slope[2 * size + h] = cell * i * (F(1) - n * n)
                slope[3 * size + h] = up * y * o * (F(1) - o)
                by_cell[h] = cell * f
                by_hidden[h] = F(0)
            _add_transposed(weights, slope, by_hidden)


@kept()
def longest_paths(before, after, time_s):
    """Give the longest path up to each op; edges sorted so that what comes before is known."""
    found = np.zeros(len(time_s))
    for e in range(len(before)):
        found[after[e]] = max(found[after[e]], found[before[e]] + time_s[before[e]])
    return found


@kept()
def sum_groups(group_of, features, out):  # [M, U], [U, F], [M, G, F]
    """Add the features of each unit to those of its group."""
    for m in range(group_of.shape[0]):
        for u in range(group_of.shape[1]):
            row = out[m, group_of[m, u]]
            for f in range(features.shape[1]):
                row[f] += features[u, f]


@kept()
def sum_edges(group_of, source, target, weight, out):  # [M, U], [E], [E], [E], [M, G, G]
    """Add the weight of each edge between units to that between their groups."""
    for m in range(group_of.shape[0]):
        for e in range(len(source)):
            a, b = group_of[m, source[e]], group_of[m, target[e]]
            if a != b:
                out[m, a, b] += weight[e]


@njit(fastmath=True, error_model="numpy", inline="always")
def _exp(x):
    """The exponential of what is not positive: a short series of x / 64, squared six times."""
    y = max(x, F(-80.0)) * F(1 / 64)
    y = F(1) + y * (F(1) + y * (F(1 / 2) + y * (F(1 / 6) + y * (F(1 / 24) + y * F(1 / 120)))))
    y = y * y
    y = y * y
    y = y * y
    y = y * y
    y = y * y
    return y * y


@njit(fastmath=True, error_model="numpy")
def _chances(scores, temperature, constant, noise, out):
    """Turn a row of scores into chances; give the logarithm of what they were divided by."""
    top = F(-1e30)
    for j in range(len(scores)):
        logit = scores[j] / temperature
        if constant > 0:
            logit = constant * _tanh(logit)
        out[j] = logit
    if len(noise) == len(scores):
        for j in range(len(scores)):
            out[j] += noise[j]
    for j in range(len(scores)):
        top = max(top, out[j])
    total = F(0)
    for j in range(len(scores)):
        out[j] = _exp(out[j] - top)
        total += out[j]
    scale = F(1) / total
    for j in range(len(scores)):
        out[j] *= scale


@kept(parallel=True, error_model="numpy")
def draw(
    scores,  # [C, G]
    temperature,
    constant,  # of the tanh; 0 for none
    noise,  # [C, G], or [C, 0] for none
    uniform,  # [M, C]
    options,  # [M, C] -1: draw it; out: what was drawn
    chances,  # out [C, G]
    log_chances,  # out [M, C]
):
    for row in prange(len(scores)):
        c = np.int64(row)
        chance = chances[c]
        _chances(scores[c], temperature, constant, noise[c], chance)
        for m in range(len(uniform)):
            if options[m, c] < 0:
                left = uniform[m, c]
                chosen = 0
                for j in range(len(chance)):
                    if chance[j] > 0:
                        chosen = j
                        left -= chance[j]
                        if left < 0:
                            break
                options[m, c] = chosen
            log_chances[m, c] = np.log(max(chance[options[m, c]], F(1e-30)))


@kept(parallel=True, error_model="numpy")
def draw_back(
    scores,  # [C, G]
    temperature,
    constant,
    options,  # [M, C]
    chances,  # [C, G]
    chance_slopes,  # [M, C] gradient by `log_chances`
    slopes,  # out [C, G]
):
    for row in prange(len(scores)):
        c = np.int64(row)
        chance, slope = chances[c], slopes[c]
        total = F(0)
        for m in range(len(options)):
            total += chance_slopes[m, c]
        for j in range(len(chance)):
            slope[j] = -total * chance[j]
        for m in range(len(options)):
            slope[options[m, c]] += chance_slopes[m, c]
        _shape_back(scores[c], temperature, constant, slope)


@njit(fastmath=True, error_model="numpy")
def _shape_back(scores, temperature, constant, slope):
    """Take a gradient by logits back to scores."""
    for j in range(len(scores)):
        if constant > 0:
            y = _tanh(scores[j] / temperature)
            slope[j] *= constant * (F(1) - y * y)
        slope[j] /= temperature
