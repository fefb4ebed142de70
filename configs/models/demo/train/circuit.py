"""A head start in looking back: the two attention patterns of copying, written into fresh weights.

To repeat what was said ("My name is Clara" ... "Nice to meet you, Clara") a decoder needs two heads
in a row (Olsson et al., "In-context Learning and Induction Heads", 2022): one notes at every token
which token came before it, and a later one looks for the place whose *previous* token equals the
current one and copies what stands there. Gradient descent finds the pair, but late; minutes of one
CPU core are too few. So the pair is laid down by hand, and training refines it.

The residual stream is divided: channel 0 is a constant, CONTENT holds the token, and NOTES is kept
free for the token before. Rotary angles turn fast in the first channel pairs of a head and hardly
at all in the last: the first tell "one step back" apart, the last compare content at any distance.
Its scale is near one, so that the optimiser's first steps refine the circuit and do not drown it.
"""

import math

import torch
from model import Attention, DemoModel, Layer
from torch import Tensor

NOTES_WIDTH = 64
TOKEN_STD, CONSTANT = 0.5, 2.0
FAST_PAIRS = 6  # rotary pairs that tell neighbouring positions apart
SLOW_FROM = 7  # rotary pairs from here on hardly turn within a conversation
NEIGHBOUR_LOGIT = 8.0  # how much each fast pair favours the previous token
MATCH_GAIN = 8.0
FINAL_SCALE = 0.09  # the tied head multiplies by large embeddings again; keep logits near 10
COPY_STD = 1.5  # copied content stands out three times over the token's own


def write_copying_circuit(model: DemoModel) -> None:
    """Overwrite the embedding and the attention of layers 0 and 1 of a freshly made model."""
    width = model.shape.hidden_size
    content = slice(1, width - NOTES_WIDTH)
    num_content = width - NOTES_WIDTH - 1
    basis = torch.linalg.qr(torch.randn(num_content, num_content)).Q
    first, second = model.layers[0], model.layers[1]
    assert isinstance(first, Layer)
    assert isinstance(second, Layer)
    with torch.no_grad():
        embedding = model.embed_tokens.weight
        embedding.normal_(std=TOKEN_STD)
        embedding[:, 0] = CONSTANT
        embedding[:, width - NOTES_WIDTH :] = 0.0
        model.norm.weight.fill_(FINAL_SCALE)
        rms = math.sqrt((CONSTANT**2 + num_content * TOKEN_STD**2) / width)
        _note_previous_token(first.self_attn, basis, content, CONSTANT / rms, TOKEN_STD / rms)
        rms = math.sqrt((CONSTANT**2 + (width - 1) * TOKEN_STD**2) / width)
        _copy_after_match(second.self_attn, basis, content, TOKEN_STD / rms)


def keep_reserved_channels(gradient: Tensor) -> Tensor:
    """A gradient hook for the embedding: the constant and the NOTES channels stay as they are."""
    gradient = gradient.clone()
    gradient[:, 0] = 0.0
    gradient[:, -NOTES_WIDTH:] = 0.0
    return gradient


def _note_previous_token(
    attention: Attention, basis: Tensor, content: slice, constant: float, unit: float
) -> None:
    """Heads of the first groups look one token back and write its content into NOTES."""
    shape = attention.shape
    c, half = shape.head_dim, shape.head_dim // 2
    scale = math.sqrt(NEIGHBOUR_LOGIT * math.sqrt(c)) / constant
    for group in range(NOTES_WIDTH // c):
        k_rows = attention.k_proj.weight[group * c : (group + 1) * c]
        k_rows.zero_()
        k_rows[:FAST_PAIRS, 0] = scale
        attention.v_proj.weight[group * c : (group + 1) * c] = 0.0
        rows = basis[group * c : (group + 1) * c]
        attention.v_proj.weight[group * c : (group + 1) * c, content] = rows
        notes = slice(content.stop + group * c, content.stop + (group + 1) * c)
        for head in _heads_of(attention, group):
            q_rows = attention.q_proj.weight[head * c : (head + 1) * c]
            q_rows.zero_()
            for pair in range(FAST_PAIRS):
                turn = shape.rope_theta ** (-pair / half)
                q_rows[pair, 0] = scale * math.cos(turn)
                q_rows[pair + half, 0] = -scale * math.sin(turn)
            share = TOKEN_STD / unit / len(_heads_of(attention, group))
            attention.o_proj.weight[notes, head * c : (head + 1) * c] = share * torch.eye(c)


def _copy_after_match(attention: Attention, basis: Tensor, content: slice, unit: float) -> None:
    """Every head asks "where was my token the one before?" and copies part of what stands there."""
    shape = attention.shape
    c, half = shape.head_dim, shape.head_dim // 2
    slow = [*range(SLOW_FROM, half), *range(SLOW_FROM + half, c)]
    notes = slice(content.stop, content.stop + NOTES_WIDTH)
    for group in range(shape.num_key_value_heads):
        mix = torch.linalg.qr(torch.randn(NOTES_WIDTH, NOTES_WIDTH)).Q[: len(slow)]
        gain = math.sqrt(MATCH_GAIN)
        keys = torch.zeros(c, shape.hidden_size)
        keys[slow, notes] = gain * mix
        attention.k_proj.weight[group * c : (group + 1) * c] = keys
        values = basis[group * c : (group + 1) * c]
        attention.v_proj.weight[group * c : (group + 1) * c] = 0.0
        attention.v_proj.weight[group * c : (group + 1) * c, content] = values
        for head in _heads_of(attention, group):
            queries = torch.zeros(c, shape.hidden_size)
            queries[slow, content] = gain * (mix @ basis[:NOTES_WIDTH])
            attention.q_proj.weight[head * c : (head + 1) * c] = queries
            share = COPY_STD / unit / len(_heads_of(attention, group))
            attention.o_proj.weight[content, head * c : (head + 1) * c] = share * values.T


def _heads_of(attention: Attention, group: int) -> range:
    """Query heads that share one key-value head."""
    size = attention.shape.num_attention_heads // attention.shape.num_key_value_heads
    return range(group * size, (group + 1) * size)
