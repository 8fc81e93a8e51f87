"""What a model may hold: the layers of torch."""

from __future__ import annotations

from tests.fuzz.scope import Production, Scope


def linear(s: Scope) -> str:
    width = s.last if s.often(0.3) else s.size()
    layer = s.layer("linear", f"nn.Linear({s.last}, {width}{', bias=False' if s.often(0.25) else ''})")
    if width == s.last:
        s.calls.append(layer)
    return f"h = {layer}(h)"


def bilinear(s: Scope) -> str:
    return f"h = {s.layer('bilinear', f'nn.Bilinear({s.last}, {s.last}, {s.size()})')}(h, h.cos())"


def convolution(s: Scope) -> str:
    dims = s.h.ndim - 2
    s.need(1 <= dims <= 3 and min(s.shape[2:], default=0) >= 1)
    channels, filters = s.shape[1], s.size()
    kernel = [min(s.one((1, 2, 3, 3)), size) for size in s.shape[2:]]
    options = []
    if s.often(0.2):
        options.append('padding="same"')
    else:
        if s.often(0.5):
            options.append(f"padding={s.one((1, 1, 2))}")
            if s.often(0.3) and min(s.shape[2:]) > 2:
                options.append(f'padding_mode="{s.one(("reflect", "circular", "replicate", "zeros"))}"')
        if s.often(0.3):
            options.append("stride=2")
    if s.often(0.15):
        options.append("dilation=2")
    if s.often(0.25) and channels > 1:
        groups = s.one([n for n in range(1, channels + 1) if channels % n == 0])
        filters = groups * s.one((1, 2))
        options.append(f"groups={groups}")
    if s.often(0.25):
        options.append("bias=False")
    more = "".join(f", {option}" for option in options)
    return f"h = {s.layer('conv', f'nn.Conv{dims}d({channels}, {filters}, {tuple(kernel)}{more})')}(h)"


def transposed_convolution(s: Scope) -> str:
    dims = s.h.ndim - 2
    s.need(1 <= dims <= 3)
    more = s.one(("", ", stride=2", ", padding=1", ", stride=2, output_padding=1", ", bias=False", ", dilation=2"))
    channels = s.shape[1]
    if s.often(0.2) and channels % 2 == 0:
        more += ", groups=2"
        return f"h = {s.layer('up', f'nn.ConvTranspose{dims}d({channels}, {2 * s.one((1, 2, 3))}, 2{more})')}(h)"
    return f"h = {s.layer('up', f'nn.ConvTranspose{dims}d({channels}, {s.size()}, {s.one((2, 3))}{more})')}(h)"


def one_image(s: Scope) -> str:
    s.need(s.h.ndim == 4 and s.shape[0] > 0)
    return f"h = {s.layer('conv', f'nn.Conv2d({s.shape[1]}, {s.size()}, 1)')}(h[0])"


def norm(s: Scope) -> str:
    channels = s.shape[1] if s.h.ndim > 1 else 0
    kinds = [f"nn.LayerNorm({s.last})", f"nn.RMSNorm({s.last})"]
    if channels:
        kinds.append(f"nn.GroupNorm(1, {channels})")
    if 2 <= s.h.ndim <= 5 and s.shape[0] > 1:
        momentum = s.one(("", ", momentum=0.3", ", affine=False", ", track_running_stats=False", ", momentum=None"))
        kinds += [f"nn.BatchNorm{max(s.h.ndim - 2, 1)}d({channels}{momentum})"] * 3
    if 3 <= s.h.ndim <= 5:
        kinds.append(f"nn.InstanceNorm{s.h.ndim - 2}d({channels}, affine=True)")
    return f"h = {s.layer('norm', s.one(kinds))}(h)"


def recurrent(s: Scope) -> str:
    s.need(s.h.ndim in (2, 3) and min(s.shape) > 0)
    kind, options = s.one(("LSTM", "GRU", "RNN")), ""
    for option in ("bidirectional=True", "num_layers=2", "bias=False", "batch_first=True"):
        options += f", {option}" if s.often(0.3) else ""
    if kind == "LSTM" and s.often(0.15):
        options += ", proj_size=3"
    if kind == "RNN" and s.often(0.3):
        options += ', nonlinearity="relu"'
    if "num_layers" in options and s.often(0.3):
        options += ", dropout=0.2"
    layer = s.layer("rnn", f"nn.{kind}({s.last}, {s.one((5, 6, 4))}{options})")
    if s.often(0.2):
        return f"h, state = {layer}(h)\nh = h + 0.1 * {'state[0]' if kind == 'LSTM' else 'state'}.sum()"
    return f"h = {layer}(h)[0]"


def cell(s: Scope) -> str:
    s.need(s.h.ndim == 3 and min(s.shape) > 0)
    _, length, width = s.shape
    kind, size = s.one(("LSTMCell", "GRUCell", "RNNCell")), s.one((5, 6, 7))
    layer = s.layer("cell", f"nn.{kind}({width}, {size}{s.one(('', ', bias=False'))})")
    state = "state[0]" if kind == "LSTMCell" else "state"
    start = f"h.new_zeros(h.shape[0], {size})"
    start = f"({start}, {start})" if kind == "LSTMCell" else start
    if s.often(0.2):
        return f"h = {layer}(h[:, 0]){'[0]' if kind == 'LSTMCell' else ''}"
    steps = s.one(("h.unbind(1)", f"[h[:, i] for i in range({min(length, 3)})]", "h.split(1, dim=1)"))
    item = "part.squeeze(1)" if "split" in steps else "part"
    return (
        f"state = {start}\nstates = []\nfor part in {steps}:\n    state = {layer}({item}, state)\n"
        f"    states.append({state})\nh = torch.stack(states, dim=1)"
    )


def attention(s: Scope) -> str:
    s.need(s.h.ndim in (2, 3) and min(s.shape) > 0)
    heads = s.one([n for n in (1, 2, 3, 4) if s.last % n == 0])
    first = s.h.ndim == 3 and s.often(0.6)
    options = ", batch_first=True" if first else ""
    for option in ("bias=False", "dropout=0.2", "add_bias_kv=True", "add_zero_attn=True"):
        options += f", {option}" if s.often(0.12) else ""
    layer = s.layer("attention", f"nn.MultiheadAttention({s.last}, {heads}{options})")
    other = s.one(("h, h, h", "h, h, h", "h, h.cos(), h", "h, h + 1, h + 1"))
    more = s.one(("", "", ", need_weights=False", ", average_attn_weights=False"))
    length = s.shape[1] if first else s.shape[0]
    if s.often(0.25):
        mask = s.make("mask", f"nn.Buffer(torch.ones({length}, {length}, dtype=torch.bool).triu(1))")
        more += f", attn_mask={mask}"
    if "need_weights" not in more and s.often(0.15):
        return f"h, weights = {layer}({other}{more})\nh = h * weights.sum()"
    return f"h = {layer}({other}{more})[0]"


def transformer(s: Scope) -> str:
    s.need(s.h.ndim == 3 and min(s.shape) > 0)
    heads = s.one([n for n in (1, 2, 3) if s.last % n == 0])
    more = f"{s.last}, {heads}, dim_feedforward={s.size()}, batch_first=True"
    more += s.one(("", ", dropout=0.0", ", norm_first=True", ', activation="gelu"', ", bias=False"))
    kind = s.one(("encoder", "encoder", "decoder", "stack"))
    if kind == "decoder":
        return f"h = {s.layer('decoder', f'nn.TransformerDecoderLayer({more})')}(h, h.sin())"
    text = f"nn.TransformerEncoderLayer({more})"
    if kind == "stack":
        text = f"nn.TransformerEncoder({text}, 2{s.one(('', ', enable_nested_tensor=False'))})"
    return f"h = {s.layer('encoder', text)}(h)"


def embedding(s: Scope) -> str:
    s.need(s.h.numel() and s.h.ndim < 4)
    symbols = s.one((5, 7, 11))
    more = s.one(("", "", ", padding_idx=0", ", max_norm=1.0", ", scale_grad_by_freq=True"))
    s.need(s.h.dtype.itemsize >= 4)  # in half precision rounding alone would choose other rows
    index = f"(h.detach().abs() * 3).long() % {symbols}"
    if s.h.ndim == 2 and s.often(0.3):
        layer = s.layer("bag", f'nn.EmbeddingBag({symbols}, {s.last}, mode="{s.one(("sum", "mean"))}")')
        return f"h = h + {layer}({index})"
    return f"h = h + {s.layer('embedding', f'nn.Embedding({symbols}, {s.last}{more})')}({index}).mean(-2)"


def dropout(s: Scope) -> str:
    kinds = ["nn.Dropout(0.3)", "nn.Dropout(0.5, inplace=True)", "nn.AlphaDropout(0.2)", "nn.Dropout(0.0)"]
    if s.h.ndim in (3, 4, 5):
        kinds.append(f"nn.Dropout{s.h.ndim - 2}d(0.2)")
    layer = s.make("dropout", s.one(kinds))
    return s.one((f"h = {layer}(h)", f"h = {layer}(h + 0.0)", "h = F.dropout(h, 0.3, self.training)"))


def activation(s: Scope) -> str:
    kinds = [
        "nn.ReLU()",
        "nn.ReLU(inplace=True)",
        "nn.GELU()",
        "nn.SiLU()",
        "nn.Tanh()",
        "nn.Softmax(-1)",
        "nn.Identity()",
        "nn.Sigmoid()",
        "nn.ELU()",
        "nn.Softplus()",
        "nn.PReLU()",
        "nn.Hardtanh()",
    ]
    if s.last % 2 == 0:
        kinds.append("nn.GLU()")
    return f"h = {s.layer('act', s.one(kinds))}(h)"


def pooling(s: Scope) -> str:
    dims = s.h.ndim - 2
    s.need(1 <= dims <= 3 and min(s.shape) > 0)
    kinds = [
        f"nn.AdaptiveAvgPool{dims}d(3)",
        f"nn.MaxPool{dims}d(2, 1)",
        f"nn.AvgPool{dims}d(2, 1)",
        f"nn.AdaptiveMaxPool{dims}d(5)",
        "nn.Upsample(scale_factor=2)",
    ]
    return f"h = {s.make('pool', s.one(kinds))}(h)"


def sequential(s: Scope) -> str:
    inner = [
        f"nn.Linear({s.last}, {s.last})",
        "nn.ReLU()",
        f"nn.LayerNorm({s.last})",
        "nn.Dropout(0.1)",
        f"nn.Sequential(nn.Linear({s.last}, 7), nn.Tanh(), nn.Linear(7, {s.last}))",
    ]
    parts = ", ".join(s.one(inner) for _ in range(s.one((1, 2, 3))))
    layer = s.layer("stack", f"nn.Sequential({parts})")
    s.calls.append(layer)
    if s.often(0.2):
        return f"for part in {layer}:\n    h = part(h)"
    return f"h = {layer}(h)"


LAYERS: dict[Production, float] = {
    linear: 9,
    bilinear: 1,
    convolution: 7,
    transposed_convolution: 3,
    one_image: 1,
    norm: 4,
    recurrent: 2,
    cell: 1.5,
    attention: 2,
    transformer: 1.5,
    embedding: 1,
    dropout: 1.5,
    activation: 3,
    pooling: 1,
    sequential: 2,
}
